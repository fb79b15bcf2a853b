"""Every public format of a head: the config that its program writes, and what it must become."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from convert_sources import (
    PEAGLE,
    SPECULATORS,
    Config,
    Tensors,
    assert_identical,
    drafter_tensors,
    expected_drafter,
    parse_drafter,
    read_native,
    without,
    write,
)
from format_sources import AUTOMODEL, SAFEAILAB, SPECFORGE, VERL, wrapped

from peagle_jax.config import DrafterConfig, RopeConfig
from peagle_jax.convert import ConvertError, convert_drafter, to_native
from peagle_jax.convert.head_formats import head_format
from peagle_jax.convert.head_tensors import head_tensors
from peagle_jax.convert.source import open_source

AUX = "eagle_aux_hidden_state_layer_ids"
TENSORS = drafter_tensors(first="layers.0")
EAGLE3 = without(drafter_tensors(SAFEAILAB | {"head_dim": 4}), "mask_hidden", "embed_tokens.weight")
TARGET_LAYERS = 8  # whose default boundaries are 2, 4, 5

CONFIGS: dict[str, tuple[Config, Tensors]] = {
    "speculators": (SPECULATORS, TENSORS),
    "vLLM": (PEAGLE, drafter_tensors()),
    "SpecForge": (SPECFORGE, TENSORS),
    "AutoModel": (AUTOMODEL, wrapped(TENSORS)),
    "verl-SpeCo": (VERL, TENSORS),
    "SafeAILab": (SAFEAILAB, EAGLE3),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_format_is_known_by_its_marks(name: str, tmp_path: Path) -> None:
    source = open_source(write(tmp_path, *CONFIGS[name]))
    assert head_format(source.config, head_tensors(source)) == name


@pytest.mark.parametrize("name", ["SpecForge", "AutoModel", "verl-SpeCo"])
def test_one_head_in_every_format(name: str, tmp_path: Path) -> None:
    """Up to what a format does not say, all of them are the head in the vLLM layout."""
    vllm = parse_drafter(tmp_path / "vllm", PEAGLE, drafter_tensors())
    config, tensors = CONFIGS[name]
    write(tmp_path / "hf", config, tensors)
    mask = 39 if name == "SpecForge" else None
    to_native(tmp_path / "hf", tmp_path / "out", "keep", TARGET_LAYERS, False, None, mask)
    parsed, arrays = read_native(tmp_path / "out", DrafterConfig)
    same = {
        "aux_source_convention": vllm.aux_source_convention,
        "num_depths": None if name == "SpecForge" else 5,
    }
    assert dataclasses.replace(parsed, **same) == dataclasses.replace(vllm, **same)
    assert_identical(arrays, expected_drafter(TENSORS, 2, "layers.0"))


def test_safeailab_head(tmp_path: Path) -> None:
    write(tmp_path / "hf", SAFEAILAB, EAGLE3)
    convert_drafter(tmp_path / "hf", tmp_path / "out", target_layers=32)
    config, arrays = read_native(tmp_path / "out", DrafterConfig)
    assert_identical(arrays, expected_drafter(EAGLE3, 1, "midlayer"))
    assert config.aux_boundaries == (2, 16, 29)
    assert config.mask_token_id is None
    assert (config.own_embedding, config.own_lm_head) == (False, True)
    assert not config.norm_before_residual
    with pytest.raises(ConvertError, match=r"layer_ids is missing.*--target-layers"):
        parse_drafter(tmp_path / "bare", SAFEAILAB, EAGLE3)


def test_specforge_mask_token_is_in_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"has mask_hidden, but none of .*--mask-token-id"):
        parse_drafter(tmp_path, SPECFORGE, TENSORS)
    assert parse_drafter(tmp_path, SPECFORGE, TENSORS, mask_token_id=39).mask_token_id == 39


def test_specforge_residual_follows_its_key(tmp_path: Path) -> None:
    config = SPECFORGE | {"norm_before_residual": True}
    assert parse_drafter(tmp_path, config, TENSORS, mask_token_id=39).norm_before_residual
    absent = without(SPECFORGE, "norm_before_residual")
    assert not parse_drafter(tmp_path, absent, TENSORS, mask_token_id=39).norm_before_residual


def test_specforge_mirrors_rope_scaling_in_both_spellings(tmp_path: Path) -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    config = SPECFORGE | {
        "rope_scaling": llama3,
        "rope_parameters": llama3 | {"rope_theta": 500.0},
    }
    parsed = parse_drafter(tmp_path, config, TENSORS, mask_token_id=39)
    assert parsed.rope == RopeConfig(500.0, "llama3", 8.0, 1.0, 4.0, 16)


# AutoModel and verl-SpeCo start from the target's config


@pytest.mark.parametrize(
    "copied",
    [
        {"model_type": "llama", "mlp_bias": False, "pretraining_tp": 1},
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9},
        {
            "model_type": "qwen3_moe",
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
        },
    ],
)
def test_automodel_blocks_are_llamas_whatever_the_target_has(
    copied: Config, tmp_path: Path
) -> None:
    parsed = parse_drafter(tmp_path, AUTOMODEL | copied, wrapped(TENSORS), TARGET_LAYERS)
    assert not parsed.qk_norm and parsed.moe is None
    assert parsed.sliding_windows == (None, None)


def test_automodel_boundaries_are_the_default(tmp_path: Path) -> None:
    parsed = parse_drafter(tmp_path, AUTOMODEL, wrapped(TENSORS), target_layers=36)
    assert parsed.aux_boundaries == (2, 18, 33)
    assert parsed.aux_source_convention == "not given: default of a target of 36 layers"


def test_automodel_fc_norm(tmp_path: Path) -> None:
    tensors = drafter_tensors(first="layers.0", fc_norm=True)
    write(tmp_path / "hf", AUTOMODEL | {"fc_norm": True, "norm_output": True}, wrapped(tensors))
    convert_drafter(tmp_path / "hf", tmp_path / "out", target_layers=TARGET_LAYERS)
    config, arrays = read_native(tmp_path / "out", DrafterConfig)
    assert config.fc_norm and config.norm_output
    assert_identical(arrays, expected_drafter(tensors, 2, "layers.0"))


def automodel_eagle3() -> tuple[Config, Tensors]:
    """EAGLE-3 of AutoModel: one block, while the config still counts the target's."""
    gone = ("mask_token_id", "num_depths", "down_sample_ratio", "down_sample_ratio_min")
    config = without(AUTOMODEL, *gone) | {
        "parallel_drafting": False,
        "num_hidden_layers": 36,
        "layer_types": ["full_attention"] * 36,
    }
    one = drafter_tensors(PEAGLE | {"num_hidden_layers": 1}, first="layers.0")
    return config, wrapped(without(one, "mask_hidden"))


def test_automodel_eagle3_keeps_the_targets_layer_count(tmp_path: Path) -> None:
    config, tensors = automodel_eagle3()
    parsed = parse_drafter(tmp_path, config, tensors)
    assert (parsed.num_layers, parsed.aux_boundaries) == (1, (2, 18, 33))
    assert parse_drafter(tmp_path, config, tensors, target_layers=36) == parsed
    with pytest.raises(ConvertError, match=r"the target's in this format, 36, .*layers is 32"):
        parse_drafter(tmp_path, config, tensors, target_layers=32)


def test_layer_count_under_another_name(tmp_path: Path) -> None:
    """verl-SpeCo counts in num_draft_layers; num_hidden_layers may be the target's."""
    config = VERL | {"num_hidden_layers": 8}
    assert parse_drafter(tmp_path, config, TENSORS, TARGET_LAYERS).num_layers == 2
    with pytest.raises(ConvertError, match="num_draft_layers is missing"):
        parse_drafter(tmp_path, without(VERL, "num_draft_layers"), TENSORS, TARGET_LAYERS)
    with pytest.raises(ConvertError, match="num_draft_layers is 3, but the tensors make 2"):
        parse_drafter(tmp_path, VERL | {"num_draft_layers": 3}, TENSORS, TARGET_LAYERS)


def test_verl_stores_arange_for_a_full_vocabulary(tmp_path: Path) -> None:
    """Its training reads t2d alone, which is all true then."""
    full = VERL | {"draft_vocab_size": 40}
    tensors = drafter_tensors(PEAGLE | {"draft_vocab_size": 40}, first="layers.0")
    maps = {"d2t": np.arange(40), "t2d": np.ones(40, np.bool_)}
    write(tmp_path / "hf", full, tensors | maps)
    convert_drafter(tmp_path / "hf", tmp_path / "out", target_layers=TARGET_LAYERS)
    assert "d2t" not in read_native(tmp_path / "out", DrafterConfig)[1]
    reduced = TENSORS | {"d2t": np.arange(10)}
    with pytest.raises(ConvertError, match="d2t and t2d name different"):
        parse_drafter(tmp_path / "reduced", VERL, reduced, TARGET_LAYERS)
    flat = without(PEAGLE, "draft_vocab_size")
    with pytest.raises(ConvertError, match="offsets, not target ids"):
        parse_drafter(tmp_path / "vllm", flat, tensors | maps)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("SafeAILab", {"norm_before_residual": True}, "norm_before_residual is True"),
        ("AutoModel", {"norm_before_residual": True}, "norm_before_residual is True"),
        ("verl-SpeCo", {"norm_before_residual": True}, "norm_before_residual is True"),
        ("AutoModel", {"model_type": "phi3"}, "model_type is 'phi3'"),
        ("AutoModel", {"model_type": None}, "model_type is None"),
        ("AutoModel", {"num_draft_layers": 2}, "num_draft_layers = 2"),
        ("AutoModel", {"parallel_drafting": False}, "parallel_drafting is False"),
        ("AutoModel", {"target_quirk": 1}, "do(es)? not know: target_quirk = 1"),
        ("verl-SpeCo", {"model_type": "llama"}, "model_type is 'llama'"),
        ("verl-SpeCo", {"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4"),
        ("verl-SpeCo", {"target_quirk": 1}, "target_quirk = 1"),
        ("SpecForge", {"eagle_config": {"target_quirk": 1}}, "eagle_config: .*target_quirk = 1"),
        ("SpecForge", {"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm is Fal"),
        ("SafeAILab", {"bias": True}, "bias = True"),
    ],
)
def test_what_a_format_does_not_know_is_an_error(
    name: str, change: Config, named: str, tmp_path: Path
) -> None:
    config, tensors = CONFIGS[name]
    with pytest.raises(ConvertError, match=rf"config\.json.*{named}"):
        parse_drafter(tmp_path, config | change, tensors, TARGET_LAYERS)


def test_modelopts_eagle_config(tmp_path: Path) -> None:
    """NVIDIA's EAGLE-3 heads: whatever is not what every EAGLE-3 head does is an error."""
    eagle: dict[str, Any] = {
        AUX: [2, 4, 5],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    }
    config = without(PEAGLE, AUX) | {"eagle_config": eagle}
    plain = parse_drafter(tmp_path, PEAGLE, drafter_tensors())
    assert parse_drafter(tmp_path, config, drafter_tensors()) == plain
    for key, value in (("use_mtp_layernorm", True), ("parallel_draft_step", 2)):
        other = config | {"eagle_config": eagle | {key: value}}
        with pytest.raises(ConvertError, match=f"eagle_config: {key} is {value}"):
            parse_drafter(tmp_path, other, drafter_tensors())
