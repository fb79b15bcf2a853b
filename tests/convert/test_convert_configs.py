"""Published configs, and rotary embeddings, to the exact native config."""

from pathlib import Path

import numpy as np
import pytest
from convert_sources import LLAMA, Config, write

from peagle_jax.config import MoEConfig, RopeConfig, TargetConfig
from peagle_jax.convert import ConvertError
from peagle_jax.convert.source import open_source
from peagle_jax.convert.targets import target_config
from peagle_jax.models.layers import rope_frequencies

ORIGINAL = "original_max_position_embeddings"

LLAMA_31_8B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        ORIGINAL: 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
QWEN3_06B: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_CODER_30B: Config = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5472,
    "max_position_embeddings": 262144,
    "max_window_layers": 28,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "qkv_bias": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.3",
    "use_cache": True,
    "use_qk_norm": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
YARN: Config = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    ORIGINAL: 4096,
    "rope_type": "yarn",
    "truncate": False,
}
GPT_OSS_20B: Config = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": YARN,
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}
# OpenAI's own config of the same model.
GPT_OSS_20B_ORIGINAL: Config = {
    "num_hidden_layers": 24,
    "num_experts": 32,
    "experts_per_token": 4,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "swiglu_limit": 7.0,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "sliding_window": 128,
    "initial_context_length": 4096,
    "rope_theta": 150000,
    "rope_scaling_factor": 32.0,
    "rope_ntk_alpha": 1,
    "rope_ntk_beta": 32,
}
PLAIN = {"attention_bias": False, "attention_output_bias": False, "mlp_bias": False}
PARSED = TargetConfig(
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(
        theta=150000.0,
        kind="yarn",
        factor=32.0,
        original_max_position_embeddings=4096,
        beta_fast=32.0,
        beta_slow=1.0,
        truncate=False,
        attention_factor=1.3465735902799727,
    ),
    max_position_embeddings=131072,
    attention_bias=True,
    attention_output_bias=True,
    mlp_bias=False,
    qk_norm=False,
    sliding_windows=(128, None) * 12,
    attention_sinks=True,
    norm_weight_in_float32=True,
    moe=MoEConfig(
        num_experts=32,
        num_experts_per_token=4,
        intermediate_size=2880,
        layers=(True,) * 24,
        router="top_k_softmax",
        norm_topk_prob=False,
        router_bias=True,
        expert_bias=True,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
        weights="mxfp4",
    ),
    family="gpt_oss",
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_ids=(200002, 199999, 200012),
)


def parse(folder: Path, config: Config, generation: Config | None = None) -> TargetConfig:
    tensors = {"unused": np.zeros(1, np.float32)}
    return target_config(open_source(write(folder, config, tensors, generation=generation)))


def test_llama_31_8b(tmp_path: Path) -> None:
    assert parse(tmp_path, LLAMA_31_8B) == TargetConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope=RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192),
        max_position_embeddings=131072,
        qk_norm=False,
        sliding_windows=(None,) * 32,
        family="llama",
        tie_word_embeddings=False,
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
        **PLAIN,
    )


def test_qwen3_06b(tmp_path: Path) -> None:
    generation = {"do_sample": True, "eos_token_id": [151645, 151643], "temperature": 0.6}
    assert parse(tmp_path, QWEN3_06B, generation) == TargetConfig(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(1000000.0),
        max_position_embeddings=40960,
        qk_norm=True,
        sliding_windows=(None,) * 28,
        family="qwen3",
        tie_word_embeddings=True,
        bos_token_id=151643,
        eos_token_ids=(151645, 151643),
        **PLAIN,
    )


def test_qwen3_coder_30b_a3b(tmp_path: Path) -> None:
    generation = {"eos_token_id": [151645, 151643], "repetition_penalty": 1.05}
    assert parse(tmp_path, QWEN3_CODER_30B, generation) == TargetConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=5472,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(10000000.0),
        max_position_embeddings=262144,
        qk_norm=True,
        sliding_windows=(None,) * 48,
        moe=MoEConfig(
            num_experts=128,
            num_experts_per_token=8,
            intermediate_size=768,
            layers=(True,) * 48,
            router="softmax_top_k",
            norm_topk_prob=True,
            router_bias=False,
            expert_bias=False,
        ),
        family="qwen3_moe",
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_ids=(151645, 151643),
        **PLAIN,
    )


def test_gpt_oss_20b(tmp_path: Path) -> None:
    generation = {"bos_token_id": 199998, "eos_token_id": [200002, 199999, 200012]}
    assert parse(tmp_path, GPT_OSS_20B, generation) == PARSED


def test_gpt_oss_20b_of_openai(tmp_path: Path) -> None:
    assert parse(tmp_path, GPT_OSS_20B_ORIGINAL) == PARSED


def test_openai_config_without_scaling(tmp_path: Path) -> None:
    config = parse(tmp_path, GPT_OSS_20B_ORIGINAL | {"rope_scaling_factor": 1.0})
    assert config.rope == RopeConfig(150000.0)
    assert config.max_position_embeddings == 4096


# Some of the 32 that transformers computes for GPT-OSS (shared/reference/targets.md, 6.6).
YARN_FREQUENCIES = {
    0: 1.0,
    1: 6.890442967e-01,
    8: 5.081327260e-02,
    9: 3.170569614e-02,
    13: 3.860359080e-03,
    17: 1.293186942e-04,
    31: 3.023511397e-07,
}


@pytest.mark.parametrize("config", [GPT_OSS_20B, GPT_OSS_20B_ORIGINAL])
def test_frequencies_of_gpt_oss(config: Config, tmp_path: Path) -> None:
    parsed = parse(tmp_path, config)
    found = rope_frequencies(parsed.rope, parsed.head_dim)[list(YARN_FREQUENCIES)]
    np.testing.assert_allclose(found, list(YARN_FREQUENCIES.values()), rtol=1e-5)


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text", "mixtral", "qwen2_moe"])
def test_other_families_list_the_supported(model_type: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="llama or qwen3 or qwen3_moe or gpt_oss"):
        parse(tmp_path, LLAMA | {"model_type": model_type})
