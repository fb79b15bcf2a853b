"""Drafters in the AWS/vLLM and the speculators layout: every option, and every disagreement."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from convert_sources import (
    GOLDEN,
    PEAGLE,
    SPECULATORS,
    Config,
    assert_identical,
    drafter_tensors,
    expected_drafter,
    parse_drafter,
    read_native,
    read_source,
    without,
    write,
)

from peagle_jax.config import DrafterConfig, RopeConfig
from peagle_jax.convert import ConvertError, convert_drafter
from peagle_jax.convert.drafters import Given, drafter_plan
from peagle_jax.convert.source import open_source

ROOT = GOLDEN.parents[1]
SAVED = {
    "llama_reduced": GOLDEN / "oracle" / "llama_reduced" / "draft",
    "qwen3_full": GOLDEN / "oracle" / "qwen3_sliding_fcnorm_fullvocab" / "draft",
    "smollm2": ROOT / "examples" / "smollm2-135m-p-eagle",
}
EXPECTED = DrafterConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope=RopeConfig(500.0),
    max_position_embeddings=64,
    attention_bias=False,
    attention_output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    sliding_windows=(None, None),
    target_hidden_size=16,
    draft_vocab_size=10,
    aux_boundaries=(2, 4, 5),
    aux_source_convention="given as boundaries (the input of layer id: vLLM, speculators)",
    mask_token_id=39,
    num_depths=5,
    norm_before_residual=False,
    norm_before_fc=False,
    fc_norm=False,
    norm_output=False,
    own_embedding=True,
    own_lm_head=True,
)


def nested(**change: Any) -> Config:
    decoder = SPECULATORS["transformer_layer_config"] | change
    return SPECULATORS | {"transformer_layer_config": decoder}


@pytest.mark.parametrize("name", SAVED)
def test_saved_heads(name: str, tmp_path: Path) -> None:
    source = SAVED[name]
    convert_drafter(source, tmp_path / "out")
    config, arrays = read_native(tmp_path / "out", DrafterConfig)
    tensors = read_source(source)
    first = "midlayer" if "midlayer.hidden_norm.weight" in tensors else "layers.0"
    assert_identical(arrays, expected_drafter(tensors, config.num_layers, first))


def test_config_of_the_published_package() -> None:
    plan = drafter_plan(open_source(SAVED["qwen3_full"]), Given())
    config = plan.config
    assert isinstance(config, DrafterConfig)
    assert config.sliding_windows == (6, None, 6)
    assert config.qk_norm and config.fc_norm and config.norm_before_residual
    assert (config.aux_boundaries, config.mask_token_id, config.num_depths) == ((2, 4, 5), 159, 5)
    assert (config.draft_vocab_size, config.vocab_size) == (160, 160)


@pytest.mark.parametrize("first", ["midlayer", "layers.0"])
def test_first_block_is_midlayer_or_layers_0_bit_for_bit(first: str, tmp_path: Path) -> None:
    tensors = drafter_tensors(PEAGLE | {"attention_bias": True, "mlp_bias": True}, first=first)
    write(tmp_path / "hf", PEAGLE | {"attention_bias": True, "mlp_bias": True}, tensors)
    convert_drafter(tmp_path / "hf", tmp_path / "out")
    assert_identical(
        read_native(tmp_path / "out", DrafterConfig)[1], expected_drafter(tensors, 2, first)
    )


@pytest.mark.parametrize(
    ("config", "first"), [(PEAGLE, "midlayer"), (PEAGLE, "layers.0"), (SPECULATORS, "layers.0")]
)
def test_both_layouts_parse_to_the_same_config(config: Config, first: str, tmp_path: Path) -> None:
    assert parse_drafter(tmp_path, config, drafter_tensors(first=first)) == EXPECTED


def test_names_with_the_wrappers_prefix(tmp_path: Path) -> None:
    tensors = drafter_tensors(first="layers.0")
    bare = ("lm_head.weight", "mask_hidden", "d2t", "t2d")
    wrapped = {n if n in bare else f"model.{n}": value for n, value in tensors.items()}
    write(tmp_path / "hf", PEAGLE, wrapped)
    convert_drafter(tmp_path / "hf", tmp_path / "out")
    config, arrays = read_native(tmp_path / "out", DrafterConfig)
    assert config == EXPECTED
    assert_identical(arrays, expected_drafter(tensors, 2, "layers.0"))


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"norm_before_residual": True}, "norm_before_residual", True),
        ({"norm_output": True}, "norm_output", True),
        ({"eagle_config": {"use_aux_hidden_state": True}}, "aux_boundaries", (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 5, 8]}, "aux_boundaries", (2, 5, 8)),
        ({"num_depths": None}, "num_depths", None),
        ({"parallel_drafting": True, "num_aux_hidden_states": 3}, "num_depths", 5),
        ({"tie_word_embeddings": True}, "own_lm_head", True),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9},
            "sliding_windows",
            (None, 9),
        ),
    ],
)
def test_options(change: Config, field: str, value: Any, tmp_path: Path) -> None:
    config = parse_drafter(tmp_path, PEAGLE | change, drafter_tensors())
    assert config == dataclasses.replace(EXPECTED, **{field: value})


@pytest.mark.parametrize(
    "nested_ids", [{"eagle_aux_hidden_state_layer_ids": [2, 4, 6], "norm_before_fc": True}]
)
def test_eagle_config_holds_options_too(nested_ids: Config, tmp_path: Path) -> None:
    config = without(PEAGLE, "eagle_aux_hidden_state_layer_ids") | {"eagle_config": nested_ids}
    tensors = drafter_tensors(norm_before_fc=True)
    parsed = parse_drafter(tmp_path / "hf", config, tensors)
    assert parsed.norm_before_fc and parsed.aux_boundaries == (2, 4, 6)
    convert_drafter(tmp_path / "hf", tmp_path / "out")
    assert_identical(
        read_native(tmp_path / "out", DrafterConfig)[1], expected_drafter(tensors, 2, "midlayer")
    )


@pytest.mark.parametrize("boundaries", [1, 2, 4])
def test_any_number_of_boundaries(boundaries: int, tmp_path: Path) -> None:
    ids = list(range(2, 2 + boundaries))
    config = PEAGLE | {"eagle_aux_hidden_state_layer_ids": ids, "fc_norm": True}
    tensors = drafter_tensors(boundaries=boundaries, fc_norm=True)
    assert parse_drafter(tmp_path / "hf", config, tensors).aux_boundaries == tuple(ids)
    convert_drafter(tmp_path / "hf", tmp_path / "out")
    assert_identical(
        read_native(tmp_path / "out", DrafterConfig)[1], expected_drafter(tensors, 2, "midlayer")
    )


def test_default_boundaries_need_the_targets_depth(tmp_path: Path) -> None:
    config = without(PEAGLE, "eagle_aux_hidden_state_layer_ids")
    parsed = parse_drafter(tmp_path, config, drafter_tensors(), target_layers=24)
    assert parsed.aux_boundaries == (2, 12, 21)
    assert parsed.aux_source_convention == "not given: default of a target of 24 layers"
    for layers in (None, 5):
        with pytest.raises(ConvertError, match=f"got {layers}: give the target's number of layers"):
            parse_drafter(tmp_path, config, drafter_tensors(), target_layers=layers)


def test_boundaries_must_lie_in_the_target(tmp_path: Path) -> None:
    assert parse_drafter(tmp_path, PEAGLE, drafter_tensors(), target_layers=5).aux_boundaries == (
        2,
        4,
        5,
    )
    with pytest.raises(ConvertError, match=r"layer_ids is \[2, 4, 5\].*layer ids 0\.\.4"):
        parse_drafter(tmp_path, PEAGLE, drafter_tensors(), target_layers=4)


def test_another_hidden_size_than_the_targets(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    tensors["fc.weight"] = np.ones((16, 3 * 24), np.float32)
    tensors["mask_hidden"] = np.ones((1, 1, 3 * 24), np.float32)
    parsed = parse_drafter(tmp_path, PEAGLE | {"target_hidden_size": 24}, tensors)
    assert (parsed.target_hidden_size, parsed.feature_size) == (24, 72)
    with pytest.raises(ConvertError, match=r"fc\.weight reads 72 features.*make 48"):
        parse_drafter(tmp_path, PEAGLE, tensors)
    with pytest.raises(ConvertError, match="needs an embedding and an lm_head of its own"):
        shared = without(tensors, "embed_tokens.weight")
        parse_drafter(tmp_path, PEAGLE | {"target_hidden_size": 24}, shared)


# EAGLE-3 heads


def test_eagle3_is_a_head_without_mask(tmp_path: Path) -> None:
    tensors = without(drafter_tensors(), "mask_hidden")
    parsed = parse_drafter(tmp_path, without(PEAGLE, "ptd_token_id"), tensors)
    assert parsed == dataclasses.replace(EXPECTED, mask_token_id=None, num_depths=None)
    assert parsed.num_depths is None


# What is shared with the target


def test_embedding_and_head_are_shared_where_absent(tmp_path: Path) -> None:
    parsed = parse_drafter(tmp_path, PEAGLE, without(drafter_tensors(), "embed_tokens.weight"))
    assert (parsed.own_embedding, parsed.own_lm_head) == (False, True)
    full = PEAGLE | {"draft_vocab_size": 40}
    tensors = without(drafter_tensors(full), "lm_head.weight")
    parsed = parse_drafter(tmp_path, full, tensors)
    assert (parsed.own_embedding, parsed.own_lm_head) == (True, False)
    with pytest.raises(ConvertError, match=r"tie_word_embeddings is true.*not said"):
        parse_drafter(tmp_path, full | {"tie_word_embeddings": True}, tensors)
    both = without(tensors, "embed_tokens.weight")
    assert not parse_drafter(tmp_path, full | {"tie_word_embeddings": True}, both).own_lm_head


# Disagreements


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ptd_token_id": None}, "has mask_hidden, but none of .*ptd_token_id"),
        ({"num_depths": 0}, "num_depths must be at least 1"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state is False"),
        ({"eagle_config": {"new_norm": True}}, "eagle_config: keys .*new_norm"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, r"in eagle_config, \["),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4]}, "reads 48 features, but 2 boundaries"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2, 5]}, "distinct layer ids"),
        ({"eagle_aux_hidden_state_layer_ids": [-1, 2, 5]}, "distinct layer ids"),
        ({"eagle_aux_hidden_state_layer_ids": []}, "distinct layer ids"),
        ({"eagle_aux_hidden_state_layer_ids": ["2"]}, "a list of integers"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4"),
        ({"parallel_drafting": False}, "parallel_drafting is False"),
        ({"logit_scale": 0.5}, "logit_scale is 0.5"),
        ({"hidden_size": 20, "head_dim": 4}, r"hidden_size is 20, but fc\.weight has 16 rows"),
        ({"num_hidden_layers": 4}, "num_hidden_layers is 4, but the tensors make 2"),
        ({"num_hidden_layers": 1}, "num_hidden_layers is 1, but the tensors make 2"),
        ({"draft_vocab_size": 12}, r"draft_vocab_size is 12, but lm_head\.weight has 10 rows"),
        ({"model_type": "qwen3"}, "model_type is qwen3, but the checkpoint has no .*q_norm"),
        ({"model_type": "eagle"}, "model_type is 'eagle'"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "architectures is .*EagleLlama"),
        ({"some_new_norm": True}, "some_new_norm = True"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
    ],
)
def test_config_that_does_not_fit_is_named(change: Config, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=rf"config\.json.*{named}"):
        parse_drafter(tmp_path, PEAGLE | change, drafter_tensors())


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (SPECULATORS | {"speculators_model_type": "dflash"}, "speculators_model_type is 'dflash'"),
        (SPECULATORS | {"new_top_key": 1}, "new_top_key = 1"),
        (nested(new_nested_key=1), "transformer_layer_config: .*new_nested_key = 1"),
        (nested(rms_norm_eps=None), "transformer_layer_config: rms_norm_eps is missing"),
        (nested(model_type="gemma3"), "transformer_layer_config: model_type is 'gemma3'"),
        (without(SPECULATORS, "transformer_layer_config"), "model_type is None"),
        (SPECULATORS | {"speculators_config": {"algorithm": "eagle3"}}, "algorithm is 'eagle3'"),
        (
            SPECULATORS | {"speculators_config": {"proposal_methods": []}},
            "proposal_methods is",
        ),
        (SPECULATORS | {"speculators_config": {"tree": 4}}, "speculators_config: .*tree = 4"),
        (SPECULATORS | {"speculators_config": [1]}, "speculators_config must be a JSON object"),
    ],
)
def test_speculators_config_that_does_not_fit(config: Config, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=rf"config\.json.*{named}"):
        parse_drafter(tmp_path, config, drafter_tensors(first="layers.0"))


@pytest.mark.parametrize(
    ("add", "named"),
    [
        (
            {"midlayer.self_attn.q_norm.weight": (4,)},
            r"model_type is llama, but the .* has .*q_norm",
        ),
        ({"fc.weight": (16,)}, r"fc\.weight is \(16,\), expected 2 axes"),
    ],
)
def test_tensor_that_does_not_fit(
    add: dict[str, tuple[int, ...]], named: str, tmp_path: Path
) -> None:
    tensors = drafter_tensors() | {n: np.ones(shape, np.float32) for n, shape in add.items()}
    with pytest.raises(ConvertError, match=named):
        parse_drafter(tmp_path, PEAGLE, tensors)


@pytest.mark.parametrize(
    ("gone", "named"),
    [
        (("mask_hidden",), "ptd_token_id = 39, but the checkpoint has no mask_hidden"),
        (("fc.weight",), r"fc\.weight is missing"),
    ],
)
def test_missing_tensor(gone: tuple[str, ...], named: str, tmp_path: Path) -> None:
    write(tmp_path / "hf", PEAGLE, without(drafter_tensors(), *gone))
    with pytest.raises(ConvertError, match=named):
        drafter_plan(open_source(tmp_path / "hf"), Given())


def test_both_names_of_the_first_block_are_one_too_many(tmp_path: Path) -> None:
    tensors = drafter_tensors(first="layers.0") | drafter_tensors(first="midlayer")
    write(tmp_path / "hf", PEAGLE, tensors)
    with pytest.raises(ConvertError, match=r"layers\.0\.hidden_norm\.weight \(16,\) is unexpected"):
        convert_drafter(tmp_path / "hf", tmp_path / "out")
