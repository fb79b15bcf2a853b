"""What has gone wrong with real heads in other software, one test for each; none may be silent.

Some are elsewhere: the layer count under another name, SpecForge's mask id and verl-SpeCo's d2t in
test_convert_formats.py; the layer ids in test_convert_aux_ids.py; t2d alone in
test_convert_vocabulary.py; the first block's names and another hidden size than the target's in
test_convert_drafters.py.
"""

from pathlib import Path

import numpy as np
import pytest
from convert_sources import (
    DRAFT_IDS,
    PEAGLE,
    SPECULATORS,
    Config,
    assert_identical,
    drafter_tensors,
    expected_drafter,
    parse_drafter,
    read_native,
    vocabulary,
    without,
    write,
)
from format_sources import AUTOMODEL, SAFEAILAB, VERL, wrapped

from peagle_jax.config import DrafterConfig, RopeConfig
from peagle_jax.convert import ConvertError, convert_drafter

NO_ROPE = without(PEAGLE, "rope_theta", "rope_scaling")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


# Rotary embedding


@pytest.mark.parametrize(
    "spelled",
    [
        {"rope_theta": 7e5},
        {"rope_theta": 7e5, "rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 7e5}},
        {"rope_parameters": {"rope_theta": 7e5, "rope_type": "default"}},
        {"rope_scaling": {"rope_theta": 7e5, "type": "default"}},
    ],
)
def test_rope_theta_in_either_spelling(spelled: Config, tmp_path: Path) -> None:
    assert parse_drafter(tmp_path, NO_ROPE | spelled, drafter_tensors()).rope == RopeConfig(7e5)


@pytest.mark.parametrize("scaling", [LLAMA3, YARN])
@pytest.mark.parametrize("new", [True, False])
def test_rope_scaling_is_kept(scaling: Config, new: bool, tmp_path: Path) -> None:
    spelled: Config = {"rope_theta": 7e5, "rope_scaling": scaling}
    if new:
        spelled = {"rope_parameters": scaling | {"rope_theta": 7e5}}
    rope = parse_drafter(tmp_path, NO_ROPE | spelled, drafter_tensors()).rope
    assert (rope.kind, rope.theta) == (scaling["rope_type"], 7e5)
    assert (rope.factor, rope.original_max_position_embeddings) == (scaling["factor"], 16)
    nested = SPECULATORS["transformer_layer_config"]
    inner = without(nested, "rope_theta", "rope_scaling") | spelled
    config = SPECULATORS | {"transformer_layer_config": inner}
    assert parse_drafter(tmp_path, config, drafter_tensors(first="layers.0")).rope == rope


@pytest.mark.parametrize("config", [NO_ROPE, without(AUTOMODEL, "rope_parameters")])
def test_rope_theta_has_no_default(config: Config, tmp_path: Path) -> None:
    tensors = drafter_tensors() if config is NO_ROPE else wrapped(drafter_tensors(first="layers.0"))
    with pytest.raises(ConvertError, match=r"config\.json: rope_theta is missing.*add the one"):
        parse_drafter(tmp_path, config, tensors, 8)


def test_only_safeailab_heads_without_rope_theta_have_base_10000(tmp_path: Path) -> None:
    tensors = without(drafter_tensors(SAFEAILAB | {"head_dim": 4}), "mask_hidden")
    assert parse_drafter(tmp_path, SAFEAILAB, tensors, 32).rope == RopeConfig(10000.0)
    own = SAFEAILAB | {"rope_theta": 500.0}
    assert parse_drafter(tmp_path, own, tensors, 32).rope == RopeConfig(500.0)
    for other in ("LlamaForCausalLMEagle3", "Eagle3DraftModel"):
        with pytest.raises(ConvertError, match="rope_theta is missing"):
            parse_drafter(tmp_path, SAFEAILAB | {"architectures": [other]}, tensors, 32)
    renamed = {name.replace("midlayer", "layers.0"): value for name, value in tensors.items()}
    with pytest.raises(ConvertError, match="rope_theta is missing"):
        parse_drafter(tmp_path, SAFEAILAB, renamed, 32)


# What is shared with the target


def test_missing_lm_head_with_a_reduced_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"10 of 40, but lm_head\.weight is missing"):
        parse_drafter(tmp_path, PEAGLE, without(drafter_tensors(), "lm_head.weight"))


def test_tied_flag_inherited_from_the_target(tmp_path: Path) -> None:
    """The table has 40 rows, the head 10: tying would not even fit."""
    config = PEAGLE | {"tie_word_embeddings": True}
    write(tmp_path / "hf", config, drafter_tensors())
    convert_drafter(tmp_path / "hf", tmp_path / "out")
    parsed, arrays = read_native(tmp_path / "out", DrafterConfig)
    assert parsed.own_lm_head
    np.testing.assert_array_equal(arrays["lm_head"], drafter_tensors()["lm_head.weight"])


# Draft vocabulary


def test_d2t_as_arange_is_no_identity(tmp_path: Path) -> None:
    """Offsets 0, 1, 2, ... are the ids 0, 2, 4, ...; without t2d only a large one shows it."""
    full = without(PEAGLE, "draft_vocab_size")
    tensors = drafter_tensors(PEAGLE | {"draft_vocab_size": 40})
    with pytest.raises(ConvertError, match=r"maps 20 draft ids outside .*20 -> 40"):
        parse_drafter(tmp_path, full, tensors | {"d2t": np.arange(40)})
    with pytest.raises(ConvertError, match="d2t and t2d name different"):
        parse_drafter(tmp_path, PEAGLE, drafter_tensors() | {"d2t": np.arange(10)})


def test_d2t_of_target_ids_is_no_offsets(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="offsets, not target ids"):
        parse_drafter(tmp_path, PEAGLE, drafter_tensors() | {"d2t": DRAFT_IDS})


def test_d2t_with_duplicates(tmp_path: Path) -> None:
    offsets = DRAFT_IDS - np.arange(10)
    offsets[3] = DRAFT_IDS[2] - 3
    with pytest.raises(ConvertError, match="several draft ids to one target id"):
        parse_drafter(tmp_path, PEAGLE, drafter_tensors() | {"d2t": offsets})


@pytest.mark.parametrize("with_t2d", [True, False])
def test_unsorted_draft_ids_keep_their_order(with_t2d: bool, tmp_path: Path) -> None:
    """AutoModel puts the special tokens first and the rest by frequency."""
    ids = np.array([2, 0, 38, 1, 30, 4, 36, 9, 25, 16])
    tensors = drafter_tensors(first="layers.0") | vocabulary(ids, 40)
    if not with_t2d:
        tensors = without(tensors, "t2d")
    write(tmp_path / "hf", AUTOMODEL, wrapped(tensors))
    convert_drafter(tmp_path / "hf", tmp_path / "out", target_layers=8)
    offsets = read_native(tmp_path / "out", DrafterConfig)[1]["d2t"]
    np.testing.assert_array_equal(offsets + np.arange(10), ids)


# Norms


def test_norm_before_residual_has_a_default_per_format(tmp_path: Path) -> None:
    first = drafter_tensors(first="layers.0")
    eagle3 = without(SPECULATORS, "mask_token_id") | {"speculators_model_type": "eagle3"}
    eagle3["speculators_config"] = SPECULATORS["speculators_config"] | {"algorithm": "eagle3"}
    without_mask = without(first, "mask_hidden")
    assert parse_drafter(tmp_path, eagle3, without_mask).norm_before_residual
    off = eagle3 | {"norm_before_residual": False}
    assert not parse_drafter(tmp_path, off, without_mask).norm_before_residual
    assert not parse_drafter(tmp_path, SPECULATORS, first).norm_before_residual
    assert not parse_drafter(tmp_path, PEAGLE, drafter_tensors()).norm_before_residual
    assert not parse_drafter(tmp_path, VERL, first, 8).norm_before_residual


@pytest.mark.parametrize(
    ("flag", "tensor"), [("norm_before_fc", "input_norm"), ("fc_norm", "fc_norm")]
)
def test_a_norm_without_its_flag_and_a_flag_without_its_norm(
    flag: str, tensor: str, tmp_path: Path
) -> None:
    on = {"norm_before_fc": flag == "norm_before_fc", "fc_norm": flag == "fc_norm"}
    tensors = drafter_tensors(**on)
    assert getattr(parse_drafter(tmp_path, PEAGLE | {flag: True}, tensors), flag)
    with pytest.raises(ConvertError, match=rf"{flag} is false or absent, but .*{tensor}"):
        parse_drafter(tmp_path, PEAGLE, tensors)
    with pytest.raises(ConvertError, match=rf"{flag} is true, but .* no {tensor}"):
        parse_drafter(tmp_path, PEAGLE | {flag: True}, drafter_tensors())


def test_norm_output_has_no_tensor(tmp_path: Path) -> None:
    assert parse_drafter(tmp_path, PEAGLE | {"norm_output": True}, drafter_tensors()).norm_output


# Mask


@pytest.mark.parametrize("name", ["mask_token_id", "ptd_token_id", "pard_token", "dflash_config"])
def test_mask_id_under_four_names(name: str, tmp_path: Path) -> None:
    value = {"mask_token_id": 7} if name == "dflash_config" else 7
    config = without(PEAGLE, "ptd_token_id") | {name: value}
    assert parse_drafter(tmp_path, config, drafter_tensors()).mask_token_id == 7
    assert parse_drafter(tmp_path, config, drafter_tensors(), mask_token_id=7).mask_token_id == 7
    with pytest.raises(ConvertError, match=rf"mask token differs: {name}.* = 7; --mask.* = 8"):
        parse_drafter(tmp_path, config, drafter_tensors(), mask_token_id=8)
    with pytest.raises(ConvertError, match=r"mask token differs: .*ptd_token_id = 9"):
        parse_drafter(tmp_path, config | {"ptd_token_id": 9, "pard_token": 7}, drafter_tensors())


@pytest.mark.parametrize("token", [-1, 40])
def test_mask_id_outside_the_table(token: int, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=rf"ptd_token_id = {token} is outside .* 40 rows"):
        parse_drafter(tmp_path, PEAGLE | {"ptd_token_id": token}, drafter_tensors())
    config = without(PEAGLE, "ptd_token_id")
    with pytest.raises(ConvertError, match=rf"--mask-token-id = {token} is outside .* 40 rows"):
        parse_drafter(tmp_path, config, drafter_tensors(), mask_token_id=token)
    assert parse_drafter(tmp_path, config, drafter_tensors(), mask_token_id=0).mask_token_id == 0


def test_a_mask_id_given_for_an_eagle3_head(tmp_path: Path) -> None:
    config = without(PEAGLE, "ptd_token_id")
    tensors = without(drafter_tensors(), "mask_hidden")
    with pytest.raises(ConvertError, match=r"--mask-token-id = 39, but .* has no mask_hidden"):
        parse_drafter(tmp_path, config, tensors, mask_token_id=39)


@pytest.mark.parametrize("shape", [(1, 1, 48), (1, 48), (48,)])
def test_mask_hidden_of_any_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = drafter_tensors()
    tensors["mask_hidden"] = tensors["mask_hidden"].reshape(shape)
    write(tmp_path / "hf", PEAGLE, tensors)
    convert_drafter(tmp_path / "hf", tmp_path / "out")
    arrays = read_native(tmp_path / "out", DrafterConfig)[1]
    assert_identical(arrays, expected_drafter(tensors, 2, "midlayer"))


# Values


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight", "mask_hidden"])
def test_nan_marks_a_tensor_that_was_never_loaded(name: str, tmp_path: Path) -> None:
    tensors = drafter_tensors()
    tensors[name] = np.full_like(tensors[name], np.nan)
    write(tmp_path / "hf", PEAGLE, tensors)
    with pytest.raises(ConvertError, match=rf"{name} holds NaN"):
        convert_drafter(tmp_path / "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
