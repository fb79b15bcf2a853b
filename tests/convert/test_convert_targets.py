"""Targets: every array is the source's bits, and every config key is read or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from convert_sources import (
    GOLDEN,
    LLAMA,
    QWEN3,
    Config,
    assert_identical,
    expected_target,
    read_native,
    read_source,
    target_tensors,
    write,
)

from peagle_jax.config import RopeConfig, TargetConfig
from peagle_jax.convert import ConvertError, convert_target
from peagle_jax.convert.source import open_source
from peagle_jax.convert.targets import target_config

ORIGINAL = "original_max_position_embeddings"
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def parse(folder: Path, config: Config, generation: Config | None = None) -> TargetConfig:
    write(folder, config, {"unused": np.zeros(1, np.float32)}, generation=generation)
    return target_config(open_source(folder))


DENSE_GOLDEN = sorted(
    path.name
    for path in (GOLDEN / "targets").iterdir()
    if not path.name.startswith(("qwen3_moe", "gpt_oss"))
)


@pytest.mark.parametrize("name", DENSE_GOLDEN)
def test_models_saved_by_transformers(name: str, tmp_path: Path) -> None:
    source = GOLDEN / "targets" / name
    convert_target(source, tmp_path / "out")
    config, arrays = read_native(tmp_path / "out", TargetConfig)
    assert_identical(arrays, expected_target(read_source(source), config.num_layers))


@pytest.mark.parametrize("model", [LLAMA, QWEN3])
@pytest.mark.parametrize("shards", [1, 3])
def test_arrays_are_the_source_bit_for_bit(model: Config, shards: int, tmp_path: Path) -> None:
    config = model | {"attention_bias": True}
    tensors = target_tensors(config)
    write(tmp_path / "hf", config, tensors, shards=shards)
    convert_target(tmp_path / "hf", tmp_path / "out")
    assert_identical(read_native(tmp_path / "out", TargetConfig)[1], expected_target(tensors, 2))


def test_config_fields(tmp_path: Path) -> None:
    scaled = LLAMA | {"rope_scaling": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}
    config = parse(tmp_path, scaled)
    assert config == TargetConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=12,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        rms_norm_eps=1e-5,
        rope=RopeConfig(500.0, "llama3", 8.0, 1.0, 4.0, 32),
        max_position_embeddings=64,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        qk_norm=False,
        sliding_windows=(None, None),
        family="llama",
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, LLAMA3_ROPE])
@pytest.mark.parametrize("model", [LLAMA, QWEN3])
def test_old_and_new_layout_are_equal(model: Config, rope: Config, tmp_path: Path) -> None:
    scaling = None if rope == {"rope_type": "default"} else rope
    new = {k: v for k, v in model.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new |= {"rope_parameters": rope | {"rope_theta": 500}, "dtype": "float32"}
    assert parse(tmp_path / "old", model | {"rope_scaling": scaling}) == parse(
        tmp_path / "new", new
    )


def test_rope_scaling_of_very_old_configs_has_type(tmp_path: Path) -> None:
    rope = {"type" if k == "rope_type" else k: v for k, v in LLAMA3_ROPE.items()}
    assert parse(tmp_path, LLAMA | {"rope_scaling": rope}).rope.kind == "llama3"


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        (2, {"eos_token_id": 2}, (2,)),
        (2, {"eos_token_id": [3, 2, 5]}, (2, 3, 5)),
        ([4, 2], {"eos_token_id": 7}, (4, 2, 7)),
        (None, {"eos_token_id": 7}, (7,)),
        (None, {"eos_token_id": None, "temperature": 0.6}, ()),
    ],
)
def test_eos_is_the_union(
    config: Any, generation: Config | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    parsed = parse(tmp_path, LLAMA | {"eos_token_id": config}, generation)
    assert parsed.eos_token_ids == expected


@pytest.mark.parametrize("absent", [{}, {"head_dim": None, "num_key_value_heads": None}])
def test_llama_head_sizes_may_be_absent(absent: Config, tmp_path: Path) -> None:
    short = {k: v for k, v in LLAMA.items() if k not in ("head_dim", "num_key_value_heads")}
    config = parse(tmp_path, short | absent)
    assert (config.num_kv_heads, config.head_dim) == (4, 4)


def test_keys_without_influence_are_ignored(tmp_path: Path) -> None:
    extra = {
        "use_cache": False,
        "attention_dropout": 0.1,
        "pretraining_tp": 2,
        "is_llama_config": True,
        "rope_interleaved": False,
        "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
        "quantization_config": None,
        "temperature": 0.7,
    }
    assert parse(tmp_path / "a", LLAMA | extra) == parse(tmp_path / "b", LLAMA)


@pytest.mark.parametrize(
    ("extra", "windows"),
    [
        ({"sliding_window": 6}, (None, None)),
        ({"use_sliding_window": True, "sliding_window": 6}, (None, 6)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (6, None),
        ),
        ({"layer_types": ["full_attention", "full_attention"]}, (None, None)),
    ],
)
def test_qwen3_windows(extra: Config, windows: tuple[int | None, ...], tmp_path: Path) -> None:
    assert parse(tmp_path, QWEN3 | extra).sliding_windows == windows


REQUIRED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "rms_norm_eps", "rope_theta", "max_position_embeddings"),
)


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("model", [LLAMA, QWEN3])
def test_required_keys_have_no_default(model: Config, key: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=rf"config\.json.*{key} is missing"):
        parse(tmp_path, {k: v for k, v in model.items() if k != key})


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads"])
def test_qwen3_head_sizes_have_no_default(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=f"{key} is missing"):
        parse(tmp_path, {k: v for k, v in QWEN3.items() if k != key})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gemma3_text"}, "model_type is 'gemma3_text'"),
        ({"model_type": None}, "model_type is None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quant_method is 'gptq'.*fp8 for llama",
        ),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"clip_qkv": 8}, "clip_qkv = 8"),
        ({"residual_multiplier": 0.5, "logit_cap": 3}, "logit_cap = 3; residual_multiplier = 0.5"),
        ({"auto_map": {"AutoModel": "modeling.Mine"}}, "auto_map"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "rope_type is 'dynamic', supported is default, linear, llama3 or yarn",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 4.0}}, "yarn and lin"),
        ({"rope_scaling": {"rope_type": ["yarn"], "factor": 4.0}}, "rope_type is .*yarn"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "alpha": 1}}, "alpha = 1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": 1}}, "truncate is 1"),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 2.0, ORIGINAL: 32},
                "original_max_position_embeddings": 16,
            },
            "original_max_position_embeddings is 32, but 16",
        ),
        ({"original_max_position_embeddings": 16}, "absent without llama3 or yarn"),
        ({"rope_scaling": LLAMA3_ROPE | {ORIGINAL: None}}, f"{ORIGINAL} is missing"),
        ({"rope_scaling": LLAMA3_ROPE | {"attention_factor": 2}}, "attention_factor = 2"),
        ({"rope_scaling": LLAMA3_ROPE | {"factor": None}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": LLAMA3_ROPE | {"factor": 0.5}}, "rope factor must be at least 1"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention = "),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "disagree"),
        ({"rope_scaling": LLAMA3_ROPE, "rope_parameters": {"rope_theta": 500.0}}, "disagree"),
        ({"rope_theta": "500"}, "rope_theta is '500'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"hidden_size": 16.0}, "hidden_size is 16.0"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": -16}, "hidden_size must be a positive integer"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "num_kv_heads 3"),
        ({"attention_bias": "no"}, "attention_bias is 'no'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": 40}, "eos_token_ids .*outside the vocabulary"),
        ({"bos_token_id": [1]}, r"bos_token_id is \[1\]"),
        ({"sliding_window": 6}, "sliding_window is 6"),
        (
            {"sliding_window": 6, "layer_types": ["sliding_attention"] * 2},
            "sliding_attention, which Llama does not have",
        ),
    ],
)
def test_unsupported_llama_value_is_named(change: Config, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=rf"config\.json.*{named}"):
        parse(tmp_path, LLAMA | change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"use_sliding_window": True}, "sliding_window is None"),
        (
            {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": None},
            "max_window_layers",
        ),
        ({"layer_types": ["sliding_attention"] * 2}, "use_sliding_window is False"),
        ({"layer_types": ["full_attention"]}, "layer_types is .*each of the 2 layers"),
        ({"layer_types": ["full_attention", "linear"]}, "layer_types is .*linear"),
        ({"use_sliding_window": True, "sliding_window": 0}, "windows must be positive"),
    ],
)
def test_unsupported_qwen3_value_is_named(change: Config, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=rf"config\.json.*{named}"):
        parse(tmp_path, QWEN3 | change)


def test_bad_eos_in_generation_config_names_that_file(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"generation_config\.json: eos_token_id is 'x'"):
        parse(tmp_path, LLAMA, {"eos_token_id": "x"})


def test_tied_head_may_be_stored_but_must_be_equal(tmp_path: Path) -> None:
    tied = LLAMA | {"tie_word_embeddings": True}
    tensors = target_tensors(tied)
    head = tensors["model.embed_tokens.weight"].copy()
    write(tmp_path / "hf", tied, tensors | {"lm_head.weight": head})
    convert_target(tmp_path / "hf", tmp_path / "out")
    assert_identical(read_native(tmp_path / "out", TargetConfig)[1], expected_target(tensors, 2))

    head[-1, -1] += 1
    write(tmp_path / "hf", tied, tensors | {"lm_head.weight": head})
    with pytest.raises(ConvertError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        convert_target(tmp_path / "hf", tmp_path / "out2")


def test_tied_head_of_another_dtype(tmp_path: Path) -> None:
    tied = LLAMA | {"tie_word_embeddings": True}
    tensors = target_tensors(tied)
    rounded = tensors["model.embed_tokens.weight"].astype(np.float16)
    tensors["model.embed_tokens.weight"] = rounded.astype(np.float32)
    write(tmp_path / "hf", tied, tensors | {"lm_head.weight": rounded})
    convert_target(tmp_path / "hf", tmp_path / "out")

    rounded[3, 3] += np.float16(1)
    write(tmp_path / "hf", tied, tensors | {"lm_head.weight": rounded})
    with pytest.raises(ConvertError, match="differs"):
        convert_target(tmp_path / "hf", tmp_path / "out2")


def test_rotary_table_of_old_checkpoints_is_ignored(tmp_path: Path) -> None:
    tensors = target_tensors(LLAMA)
    old = {"model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    write(tmp_path / "hf", LLAMA, tensors | old)
    convert_target(tmp_path / "hf", tmp_path / "out")
    assert_identical(read_native(tmp_path / "out", TargetConfig)[1], expected_target(tensors, 2))


def test_biases_that_the_config_does_not_have_are_unexpected(tmp_path: Path) -> None:
    tensors = target_tensors(LLAMA | {"attention_bias": True})
    write(tmp_path / "hf", LLAMA, tensors)
    with pytest.raises(ConvertError, match=r"layers\.0\.self_attn\.q_proj\.bias.*is unexpected"):
        convert_target(tmp_path / "hf", tmp_path / "out")
