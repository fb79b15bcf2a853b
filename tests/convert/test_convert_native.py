"""Conversion as a whole: every tensor accounted for, dtypes, the command line."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from convert_sources import (
    BF16,
    GOLDEN,
    LLAMA,
    PEAGLE,
    QWEN3,
    SPECULATORS,
    Config,
    Tensors,
    assert_identical,
    drafter_tensors,
    expected_drafter,
    expected_target,
    read_native,
    target_tensors,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_jax import checkpoint
from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.convert import ConvertError, convert_drafter, convert_target, to_native
from peagle_jax.convert.cli import main
from peagle_jax.convert.drafters import Given
from peagle_jax.convert.summary import summarise

TENSORS = target_tensors(LLAMA)


# Every tensor is accounted for

SOURCES: dict[str, tuple[Config, Tensors]] = {
    "llama": (LLAMA, TENSORS),
    "qwen3": (QWEN3, target_tensors(QWEN3)),
    "peagle": (
        PEAGLE | {"fc_norm": True},
        drafter_tensors(fc_norm=True),
    ),
    "speculators": (
        SPECULATORS | {"norm_before_fc": True},
        drafter_tensors(first="layers.0", norm_before_fc=True),
    ),
}


def drop(tensors: Tensors, name: str) -> Tensors:
    return {n: value for n, value in tensors.items() if n != name}


def rename(tensors: Tensors, name: str) -> Tensors:
    return {f"{n}_x" if n == name else n: value for n, value in tensors.items()}


def lengthen(tensors: Tensors, name: str) -> Tensors:
    value = tensors[name]
    return tensors | {name: np.concatenate([value, value], axis=-1)}


def add_an_axis(tensors: Tensors, name: str) -> Tensors:
    return tensors | {name: tensors[name][None]}


def change_dtype(tensors: Tensors, name: str) -> Tensors:
    return tensors | {name: tensors[name].astype(np.int32)}


def poison(value: float) -> Callable[[Tensors, str], Tensors]:
    def change(tensors: Tensors, name: str) -> Tensors:
        bad = tensors[name].copy()
        bad.reshape(-1)[-1] = value
        return tensors | {name: bad}

    return change


TAMPERINGS = {
    **{f.__name__: f for f in (drop, rename, lengthen, add_an_axis, change_dtype)},
    "nan": poison(np.nan),
    "infinity": poison(-np.inf),
}
# Without its own table a head shares the target's; mask_hidden may have any number of axes.
MEANT_TO_BE_OPTIONAL = {
    *(("drop", "embed_tokens.weight"), ("add_an_axis", "mask_hidden")),
}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_tampered_tensor_is_named(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    config, tensors = SOURCES[data.draw(st.sampled_from(sorted(SOURCES)))]
    tampering = data.draw(st.sampled_from(sorted(TAMPERINGS)))
    weights = sorted(name for name in tensors if name not in ("d2t", "t2d"))
    name = data.draw(
        st.sampled_from([n for n in weights if (tampering, n) not in MEANT_TO_BE_OPTIONAL])
    )
    folder = tmp_path_factory.mktemp("tampered")
    write(folder / "hf", config, TAMPERINGS[tampering](tensors, name))
    with pytest.raises(ConvertError) as caught:
        to_native(folder / "hf", folder / "out", progress=False)
    # A norm that is absent although its flag is set is named without "weight".
    assert name in str(caught.value) or name.removesuffix("weight") in str(caught.value)
    assert not (folder / "out").exists()


def test_all_that_is_wrong_is_listed(tmp_path: Path) -> None:
    tensors = drop(TENSORS, "model.norm.weight")
    tensors = lengthen(tensors, "lm_head.weight") | {"score.weight": np.ones(3, np.float32)}
    write(tmp_path / "hf", LLAMA, tensors)
    with pytest.raises(ConvertError) as caught:
        convert_target(tmp_path / "hf", tmp_path / "out")
    for problem in (
        "model.norm.weight is missing",
        "lm_head.weight is (40, 32), expected (40, 16)",
        "score.weight (3,) is unexpected",
    ):
        assert problem in str(caught.value)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), np.dtype(np.float32)])
def test_no_value_that_is_not_finite_gets_through(
    value: float, dtype: np.dtype, tmp_path: Path
) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    write(tmp_path / "hf", LLAMA, cast(poison(value)(TENSORS, name), dtype))
    with pytest.raises(ConvertError, match=f"{name} holds NaN or infinity"):
        convert_target(tmp_path / "hf", tmp_path / "out")


def test_all_tensors_with_nan_are_listed(tmp_path: Path) -> None:
    names = ("model.layers.1.mlp.up_proj.weight", "model.norm.weight")
    tensors = TENSORS
    for name in names:
        tensors = poison(np.nan)(tensors, name)
    write(tmp_path / "hf", LLAMA, tensors)
    with pytest.raises(ConvertError) as caught:
        convert_target(tmp_path / "hf", tmp_path / "out")
    assert all(f"{name} holds NaN or infinity" in str(caught.value) for name in names)


# Dtypes


def cast(tensors: Tensors, dtype: np.dtype) -> Tensors:
    return {n: t.astype(dtype) if t.dtype == np.float32 else t for n, t in tensors.items()}


@pytest.mark.parametrize(
    ("source", "asked", "stored"),
    [
        (BF16, "keep", "bfloat16"),
        (np.dtype(np.float16), "keep", "float32"),
        (np.dtype(np.float32), "keep", "float32"),
        (np.dtype(np.float32), "bfloat16", "bfloat16"),
        (np.dtype(np.float16), "bfloat16", "bfloat16"),
        (BF16, "float32", "float32"),
    ],
)
def test_dtypes(source: np.dtype, asked: str, stored: str, tmp_path: Path) -> None:
    tensors = cast(TENSORS, source)
    write(tmp_path / "hf", LLAMA, tensors)
    done = convert_target(tmp_path / "hf", tmp_path / "out", asked)
    dtype = BF16 if stored == "bfloat16" else np.dtype(np.float32)
    expected = {n: a.astype(dtype) for n, a in expected_target(tensors, 2).items()}
    assert done.dtype == stored
    assert_identical(read_native(tmp_path / "out", TargetConfig)[1], expected)


def test_mixed_dtypes_are_widened_never_narrowed(tmp_path: Path) -> None:
    tensors = cast(TENSORS, BF16) | {"model.norm.weight": TENSORS["model.norm.weight"]}
    write(tmp_path / "hf", LLAMA, tensors)
    convert_target(tmp_path / "hf", tmp_path / "out")
    arrays = read_native(tmp_path / "out", TargetConfig)[1]
    expected = {n: a.astype(np.float32) for n, a in expected_target(tensors, 2).items()}
    assert_identical(arrays, expected)


def test_overflow_of_the_asked_dtype_is_an_error(tmp_path: Path) -> None:
    large = poison(float(np.finfo(np.float32).max))(TENSORS, "lm_head.weight")
    write(tmp_path / "hf", LLAMA, large)
    convert_target(tmp_path / "hf", tmp_path / "out")
    with pytest.raises(ConvertError, match=r"lm_head\.weight holds NaN or infinity"):
        convert_target(tmp_path / "hf", tmp_path / "narrow", "bfloat16")


def test_drafter_in_bfloat16_keeps_its_integer_map(tmp_path: Path) -> None:
    tensors = cast(drafter_tensors(), BF16)
    write(tmp_path / "hf", PEAGLE, tensors)
    convert_drafter(tmp_path / "hf", tmp_path / "out")
    assert_identical(
        read_native(tmp_path / "out", DrafterConfig)[1], expected_drafter(tensors, 2, "midlayer")
    )


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    packed = TENSORS | {"lm_head.weight": np.zeros((40, 16), np.uint8)}
    write(tmp_path / "hf", LLAMA, packed)
    with pytest.raises(ConvertError, match=r"lm_head\.weight is U8"):
        convert_target(tmp_path / "hf", tmp_path / "out")


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "hf", LLAMA, TENSORS)
    with pytest.raises(ConvertError, match="dtype 'float16' is not"):
        convert_target(tmp_path / "hf", tmp_path / "out", "float16")


# Kinds, destinations, tokenizer


def test_kind_is_detected(tmp_path: Path) -> None:
    target = write(tmp_path / "target", LLAMA, TENSORS)
    drafter = write(tmp_path / "drafter", PEAGLE, drafter_tensors())
    to_native(target, tmp_path / "a")
    to_native(str(drafter), str(tmp_path / "b"))
    checkpoint.read_config(tmp_path / "a", TargetConfig)
    checkpoint.read_config(tmp_path / "b", DrafterConfig)
    with pytest.raises(ConvertError, match="holds a drafter"):
        convert_target(drafter, tmp_path / "c")
    with pytest.raises(ConvertError, match="holds no P-EAGLE"):
        convert_drafter(target, tmp_path / "c")
    with pytest.raises(ConvertError, match="is a native checkpoint already"):
        to_native(tmp_path / "a", tmp_path / "c")


def test_destination_is_checked_before_the_source(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for destination in ("full", "full/file"):
        with pytest.raises(ConvertError, match="exists already"):
            to_native(tmp_path / "no-source", tmp_path / destination)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "hf", LLAMA, TENSORS)
    to_native(tmp_path / "hf", tmp_path / "empty")
    assert checkpoint.is_native(tmp_path / "empty")


def test_tokenizer_files_are_copied(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", LLAMA, TENSORS)
    names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt"]
    for name in (*names, "README.md", "training_args.bin"):
        (source / name).write_text(name)
    to_native(source, tmp_path / "out")
    copied = {p.name: p.read_text() for p in (tmp_path / "out" / "tokenizer").iterdir()}
    assert set(copied) == {*names, "config.json"}
    assert all(copied[name] == name for name in names)
    assert json.loads(copied["config.json"]) == LLAMA


def test_without_a_tokenizer_nothing_is_copied(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", LLAMA, TENSORS)
    (source / "tokenizer_config.json").write_text("{}")
    to_native(source, tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer").exists()


@pytest.mark.parametrize("name", ["targets/gpt_oss_mxfp4", "targets/gpt_oss", "drafters/two_aux"])
def test_parameters_are_counted_as_inspect_counts_them(name: str, tmp_path: Path) -> None:
    """Of packed weights not the bytes, and of a head not the ids in d2t."""
    done = to_native(GOLDEN / name, tmp_path / "out")
    for folder in (GOLDEN / name, tmp_path / "out"):
        assert summarise(folder, Given()).facts["parameters"] == done.parameters


# The command


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["to-native", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_command_says_what_it_made(tmp_path: Path) -> None:
    write(tmp_path / "hf", LLAMA, TENSORS)
    code, out, errors = invoke(tmp_path / "hf", tmp_path / "out", "--dtype", "bfloat16")
    size = sum(t.size for t in TENSORS.values())
    assert (code, errors) == (0, "")
    assert out == (
        f"{tmp_path}/out: target, family llama, 2 layers, {size:,} parameters, bfloat16, "
        f"{2 * size:,} bytes\n"
    )


def test_command_converts_a_drafter_without_boundaries(tmp_path: Path) -> None:
    config = {k: v for k, v in PEAGLE.items() if k != "eagle_aux_hidden_state_layer_ids"}
    write(tmp_path / "hf", config, drafter_tensors())
    code, out, errors = invoke(tmp_path / "hf", tmp_path / "out")
    assert (code, out) == (1, "")
    assert errors.startswith("error: ") and "--target-layers" in errors
    code, out, errors = invoke(tmp_path / "hf", tmp_path / "out", "--target-layers", 8)
    assert (code, errors) == (0, "")
    assert "drafter, P-EAGLE head, 2 layers, draft vocabulary 10 of 40" in out
    assert "boundaries 2, 4, 5 (not given: default of a target of 8 layers)" in out


def test_command_reports_errors_in_one_line(tmp_path: Path) -> None:
    code, out, errors = invoke(tmp_path / "nowhere", tmp_path / "out")
    assert (code, out) == (1, "")
    assert errors == f"error: {tmp_path}/nowhere: no such folder\n"
