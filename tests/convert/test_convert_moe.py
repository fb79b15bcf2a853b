"""Targets with experts, and quantised ones: every layout to the exact arrays, every trap named."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from convert_sources import (
    GOLDEN,
    LLAMA,
    Config,
    assert_identical,
    read_native,
    without,
    write,
)
from expert_sources import (
    FP8,
    GPT_OSS,
    MXFP4,
    ORIGINAL,
    QWEN3_MOE,
    YARN,
    converted,
    dequantised,
    expected_sparse_target,
    gpt_oss_tensors,
    original_tensors,
    parse,
    qwen3_moe_tensors,
    read_tensors,
    refused,
    write_fp8,
)

from peagle_jax.config import MoEConfig, TargetConfig
from peagle_jax.convert import ConvertError, convert_target
from peagle_jax.convert.layouts import target_slots
from peagle_jax.convert.source import open_source

BF16 = ml_dtypes.bfloat16
NEW_ROPE = {**YARN, "rope_theta": 500.0}


SPARSE_GOLDEN = ("gpt_oss", "gpt_oss_mxfp4", "qwen3_moe", "qwen3_moe_fp8", "qwen3_moe_fused")


@pytest.mark.parametrize("name", SPARSE_GOLDEN)
def test_models_saved_by_transformers(name: str, tmp_path: Path) -> None:
    source = GOLDEN / "targets" / name
    convert_target(source, tmp_path / "out")
    config, arrays = read_native(tmp_path / "out", TargetConfig)
    tensors = dequantised(read_tensors(source), (128, 128), BF16)
    assert_identical(arrays, expected_sparse_target(tensors, config.num_layers))


@pytest.mark.parametrize("fused", [False, True])
def test_qwen3_moe(fused: bool, tmp_path: Path) -> None:
    tensors = qwen3_moe_tensors(fused)
    config, arrays = converted(tmp_path, QWEN3_MOE, tensors)
    assert_identical(arrays, expected_sparse_target(tensors, 4))
    assert config.moe == MoEConfig(
        num_experts=5,
        num_experts_per_token=2,
        intermediate_size=6,
        layers=(True, True, True, False),
        router="softmax_top_k",
        norm_topk_prob=True,
        router_bias=False,
        expert_bias=False,
    )
    assert (config.qk_norm, config.norm_weight_in_float32) == (True, False)


@pytest.mark.parametrize("mxfp4", [False, True])
def test_gpt_oss(mxfp4: bool, tmp_path: Path) -> None:
    tensors = gpt_oss_tensors(mxfp4)
    config, arrays = converted(
        tmp_path, GPT_OSS | {"quantization_config": MXFP4 if mxfp4 else None}, tensors
    )
    assert_identical(arrays, expected_sparse_target(tensors, 2))
    assert config.moe == MoEConfig(
        num_experts=3,
        num_experts_per_token=2,
        intermediate_size=32,
        layers=(True, True),
        router="top_k_softmax",
        norm_topk_prob=False,
        router_bias=True,
        expert_bias=True,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
        weights="mxfp4" if mxfp4 else "plain",
    )
    assert config.attention_sinks and config.norm_weight_in_float32
    assert config.attention_bias and config.attention_output_bias
    assert config.sliding_windows == (8, None)


@pytest.mark.parametrize("sharded", [False, True])
def test_gpt_oss_of_openai_is_that_of_the_hub(sharded: bool, tmp_path: Path) -> None:
    hub = gpt_oss_tensors(mxfp4=True, vocab=ORIGINAL["vocab_size"])
    original = write(tmp_path / "original", ORIGINAL, original_tensors(hub))
    if sharded:
        _shard_like_openai(original)
    convert_target(original, tmp_path / "out")
    config, arrays = read_native(tmp_path / "out", TargetConfig)
    assert_identical(arrays, expected_sparse_target(hub, 2))
    assert config == parse(
        tmp_path / "hub",
        GPT_OSS
        | {
            "quantization_config": MXFP4,
            "vocab_size": 201088,
            "eos_token_id": [200002, 199999, 200012],
        },
    )


def _shard_like_openai(folder: Path) -> None:
    tensors = read_tensors(folder)
    (folder / "model.safetensors").unlink()
    for shard in range(2):
        part = {name: tensors[name] for name in list(tensors)[shard::2]}
        made = write_fp8(folder / "part", {}, part) / "model.safetensors"
        made.rename(folder / f"model--0000{shard + 1}-of-00002.safetensors")


def test_missing_shard_of_openai_is_named(tmp_path: Path) -> None:
    write(tmp_path, ORIGINAL, {"unused": np.zeros(1, np.float32)})
    (tmp_path / "model.safetensors").rename(tmp_path / "model--00002-of-00003.safetensors")
    with pytest.raises(ConvertError, match=r"missing.*model--00001-of-00003.*model--00003-of"):
        open_source(tmp_path)


@pytest.mark.parametrize("layout", ["hub", "mxfp4", "fused"])
def test_slots_lead_back_to_the_source(layout: str, tmp_path: Path) -> None:
    if layout == "fused":
        model, tensors = QWEN3_MOE, qwen3_moe_tensors(fused=True)
    else:
        model = GPT_OSS | {"quantization_config": MXFP4 if layout == "mxfp4" else None}
        tensors = gpt_oss_tensors(layout == "mxfp4")
    config, arrays = converted(tmp_path, model, tensors)
    slots = target_slots(config, "fused" if layout == "fused" else "hub")
    back = {
        name: slot.view(arrays[slot.native]).reshape(slot.shape) for name, slot in slots.items()
    }
    assert_identical(back, tensors)


def test_experts_in_two_layouts(tmp_path: Path) -> None:
    tensors = qwen3_moe_tensors() | {
        name: value for name, value in qwen3_moe_tensors(fused=True).items() if ".1.mlp" in name
    }
    refused(tmp_path, QWEN3_MOE, tensors, r"two layouts.*experts\.0\.\w+_proj.*experts\.\w+_proj:")


@pytest.mark.parametrize(
    "missing", ["experts.4.up_proj.weight", "gate.weight", "experts.0.down_proj.weight"]
)
def test_missing_expert_tensor_is_named(missing: str, tmp_path: Path) -> None:
    name = f"model.layers.2.mlp.{missing}"
    refused(tmp_path, QWEN3_MOE, without(qwen3_moe_tensors(), name), rf"{name} is missing")


def test_expert_too_many_is_named(tmp_path: Path) -> None:
    tensors = qwen3_moe_tensors()
    tensors["model.layers.0.mlp.experts.5.up_proj.weight"] = np.zeros((6, 16), np.float32)
    refused(tmp_path, QWEN3_MOE, tensors, r"experts\.5\.up_proj\.weight .* is unexpected")


def test_mxfp4_scale_that_is_nan(tmp_path: Path) -> None:
    tensors = gpt_oss_tensors(mxfp4=True)
    tensors["model.layers.1.mlp.experts.gate_up_proj_scales"][2, 63, 1] = 255
    named = r"layers\.1\.mlp\.experts\.gate_up_proj_scales holds NaN"
    refused(tmp_path, GPT_OSS | {"quantization_config": MXFP4}, tensors, named)


def test_packed_experts_without_quantization_config(tmp_path: Path) -> None:
    named = r"experts\.down_proj is missing.*down_proj_blocks .* is unexpected"
    refused(tmp_path, GPT_OSS, gpt_oss_tensors(mxfp4=True), named)


@pytest.mark.parametrize("model", [QWEN3_MOE, GPT_OSS])
def test_old_and_new_spelling_are_equal(model: Config, tmp_path: Path) -> None:
    experts = "num_experts" if model is QWEN3_MOE else "experts_per_token"
    new = without(model, "rope_theta", "rope_scaling", "torch_dtype", experts)
    rope = NEW_ROPE if model is GPT_OSS else {"rope_type": "default", "rope_theta": 500.0}
    new |= {"rope_parameters": rope, "dtype": "float32", "transformers_version": "5.24.0"}
    new |= (
        {"num_local_experts": 5, "attention_bias": False}
        if model is QWEN3_MOE
        else {"swiglu_alpha": 1.702}
    )
    assert parse(tmp_path / "old", model) == parse(tmp_path / "new", new)


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({}, (True, True, True, False)),
        ({"mlp_only_layers": None}, (True, True, True, True)),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, (False, False, False, True)),
        ({"mlp_only_layers": [], "decoder_sparse_step": 3}, (False, False, True, False)),
    ],
)
def test_which_layers_are_sparse(change: Config, layers: tuple[bool, ...], tmp_path: Path) -> None:
    moe = parse(tmp_path, QWEN3_MOE | change).moe
    assert moe is not None
    assert moe.layers == layers


def test_no_layer_is_sparse(tmp_path: Path) -> None:
    assert (
        parse(tmp_path, QWEN3_MOE | {"decoder_sparse_step": 5, "mlp_only_layers": []}).moe is None
    )


def test_layer_types_of_gpt_oss_alternate_by_default(tmp_path: Path) -> None:
    layers = without(GPT_OSS, "layer_types") | {"num_hidden_layers": 5}
    assert parse(tmp_path, layers).sliding_windows == (8, None, 8, None, 8)


def test_sliding_qwen3_moe_slides_in_every_layer(tmp_path: Path) -> None:
    slides = {"use_sliding_window": True, "sliding_window": 6}
    assert parse(tmp_path, QWEN3_MOE | slides).sliding_windows == (6,) * 4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"head_dim": None}, "head_dim is missing"),
        ({"num_key_value_heads": None}, "num_key_value_heads is missing"),
        ({"norm_topk_prob": None}, "norm_topk_prob is missing"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"num_experts": None}, "num_experts is missing"),
        ({"num_local_experts": 6}, "num_experts is 5, but num_local_experts is 6"),
        ({"num_experts_per_tok": 6}, "num_experts_per_token 6 is more than"),
        ({"shared_expert_intermediate_size": 12}, "shared_expert_intermediate_size is 12"),
        ({"use_qk_norm": False}, "use_qk_norm is False"),
        ({"qkv_bias": True}, "qkv_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"mlp_only_layers": [4]}, r"mlp_only_layers is \[4\]"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types is .*full_attention throughout"),
        ({"n_shared_experts": 1}, "n_shared_experts = 1"),
        ({"swiglu_limit": 7.0}, "swiglu_limit = 7.0"),
        ({"quantization_config": MXFP4}, "quant_method is 'mxfp4', supported is fp8"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
    ],
)
def test_unsupported_qwen3_moe_value_is_named(change: Config, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=rf"config\.json.*{named}"):
        parse(tmp_path, QWEN3_MOE | change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"head_dim": None}, "head_dim is missing"),
        ({"experts_per_token": 3}, "num_experts_per_tok is 2, but experts_per_token is 3"),
        ({"num_experts": 4}, "num_local_experts is 3, but num_experts is 4"),
        ({"swiglu_limit": None}, "swiglu_limit is missing"),
        ({"swiglu_limit": 0.0}, "swiglu_limit must be positive"),
        ({"sliding_window": None}, "sliding_window is None"),
        ({"rope_scaling": None}, "rope_scaling is missing; GPT-OSS has yarn"),
        ({"initial_context_length": 32}, "initial_context_length is 32, but .* is 16"),
        (
            {"rope_scaling": without(YARN, "original_max_position_embeddings")},
            "initial_context_length is 16, but .* is 128",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"norm_topk_prob": True}, "norm_topk_prob = True"),
        ({"quantization_config": FP8}, "quant_method is 'fp8', supported is mxfp4"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "is 'bitsandbytes'"),
        ({"quantization_config": {}}, "quant_method is None"),
        ({"quantization_config": MXFP4 | {"bits": 4}}, "quantization_config: keys .*bits = 4"),
        ({"quantization_config": MXFP4, "hidden_size": 48}, "mxfp4 experts need hidden_size"),
    ],
)
def test_unsupported_gpt_oss_value_is_named(change: Config, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=rf"config\.json.*{named}"):
        parse(tmp_path, GPT_OSS | change)


@pytest.mark.parametrize("key", sorted(set(ORIGINAL)))
def test_original_config_has_no_defaults(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=rf"config\.json.*{key} is missing"):
        parse(tmp_path, ORIGINAL | {key: None})


def test_unknown_key_of_an_original_config(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"config\.json.*rope_ntk_gamma = 1"):
        parse(tmp_path, ORIGINAL | {"rope_ntk_gamma": 1})


def test_folder_without_model_type_is_not_taken_for_openais(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="llama or qwen3 or qwen3_moe or gpt_oss"):
        parse(tmp_path, without(LLAMA, "model_type"))


def test_metas_own_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text(json.dumps({"dim": 4096}))
    (tmp_path / "consolidated.00.pth").touch()
    with pytest.raises(ConvertError, match=r"Meta's own files \(consolidated\.00\.pth\)"):
        open_source(tmp_path)
