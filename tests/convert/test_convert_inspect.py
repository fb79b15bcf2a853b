"""`peagle-convert inspect`: what it says, and that it reads no weights for it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import GOLDEN
from convert_sources import PEAGLE, Tensors, drafter_tensors, target_tensors, without, write

from peagle_jax import checkpoint
from peagle_jax.convert import ConvertError, to_native
from peagle_jax.convert.cli import main
from peagle_jax.convert.drafters import Given
from peagle_jax.convert.source import Tensor
from peagle_jax.convert.summary import summarise

AUX = "eagle_aux_hidden_state_layer_ids"


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["inspect", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One head, native and foreign."""
    folder = tmp_path_factory.mktemp("heads")
    write(folder / "hf", PEAGLE, drafter_tensors())
    to_native(folder / "hf", folder / "native")
    return {"vLLM": folder / "hf", "native": folder / "native"}


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes reading tensors of the source, but for the draft vocabulary's map, an error."""

    def fail(*args: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Tensor, "read_into", fail)
    monkeypatch.setattr(Tensor, "chunks", fail)
    monkeypatch.setattr(checkpoint, "load_arrays", fail)
    monkeypatch.setattr(checkpoint, "load", fail)


def test_gpt_oss() -> None:
    facts = summarise(GOLDEN / "targets" / "gpt_oss_mxfp4", Given()).facts
    expected = {
        "format": "Hugging Face",
        "kind": "target",
        "family": "gpt_oss",
        "layers": 2,
        "hidden_size": 64,
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 8,
        "vocabulary": 64,
        "context": 256,
        "rope": "yarn, theta 150, factor 8, original context 32",
        "windows": "16 tokens in 1 of 2 layers",
        "experts": "4, 2 a token, of size 64, mxfp4, in 2 of 2 layers",
        "eos_token_ids": [2, 3, 5],
        "dtype": "bfloat16",
        "tensors": 41,
    }
    assert {key: facts[key] for key in expected} == expected


def test_packed_weights_are_counted_as_weights() -> None:
    """E * (3 I H + 2 I + H) of the experts a layer, however few bytes they take."""
    facts = summarise(GOLDEN / "targets" / "gpt_oss_mxfp4", Given()).facts
    hidden, experts, layers, vocab, queries, keys = 64, 4, 2, 64, 48, 16
    attention = (queries + 2 * keys) * (hidden + 1) + (queries + 1) * hidden + 6
    mixture = experts * (3 * hidden * hidden + 2 * hidden + hidden) + experts * (hidden + 1)
    per_layer = attention + mixture + 2 * hidden
    assert facts["parameters"] == 2 * vocab * hidden + hidden + layers * per_layer
    assert facts["bytes"] < facts["parameters"]


@pytest.mark.parametrize("layout", ["vLLM", "native"])
def test_head(layout: str, heads: dict[str, Path]) -> None:
    facts = summarise(heads[layout], Given()).facts
    assert facts["format"] == layout
    assert (facts["kind"], facts["family"]) == ("drafter", "P-EAGLE")
    assert (facts["trained_depths"], facts["mask_token_id"]) == (5, 39)
    assert facts["aux_boundaries"] == [2, 4, 5]
    assert facts["aux_numbering"].startswith("given as boundaries")
    assert facts["draft_vocabulary"] == 10
    assert facts["vocabulary_coverage"] == "25.0 % of 40 target tokens"
    assert (facts["embedding"], facts["lm_head"], facts["norm_options"]) == ("own", "own", [])
    weights = sum(t.size for n, t in drafter_tensors().items() if n not in ("d2t", "t2d"))
    assert facts["parameters"] == weights


def test_options_say_what_a_config_leaves_out(tmp_path: Path) -> None:
    config = without(PEAGLE, "ptd_token_id") | {AUX: [1, 3, 4]}
    folder = write(tmp_path / "hf", config, drafter_tensors())
    with pytest.raises(ConvertError, match="--mask-token-id"):
        summarise(folder, Given())
    with pytest.raises(ConvertError, match="--aux-convention"):
        summarise(folder, Given(mask_token_id=39))
    code, out, errors = invoke(
        folder, "--mask-token-id", 39, "--aux-convention", "layer_output", "--json"
    )
    assert (code, errors) == (0, "")
    facts = json.loads(out)["facts"]
    assert (facts["mask_token_id"], facts["aux_boundaries"]) == (39, [2, 4, 5])
    code, out, errors = invoke(
        write(tmp_path / "none", without(PEAGLE, AUX), drafter_tensors()), "--target-layers", 8
    )
    assert code == 0 and "default of a target of 8 layers" in out


def test_table_is_plain_and_aligned_when_piped(tmp_path: Path) -> None:
    folder = write(tmp_path / "[bold]hf", PEAGLE, drafter_tensors())
    code, out, errors = invoke(folder)
    assert (code, errors) == (0, "")
    assert "\x1b" not in out and not any(line.endswith(" ") for line in out.splitlines())
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    assert len({len(line) - len(line.split("  ", 1)[1].lstrip()) for line in out.splitlines()}) == 1
    assert lines["path"].strip() == str(folder)
    assert lines["aux boundaries"].strip() == "2, 4, 5"
    assert lines["norm options"].strip() == "none" and lines["qk norm"].strip() == "no"


def test_tensors_are_listed_only_when_asked_for(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", PEAGLE, drafter_tensors())
    assert "mask_hidden" not in invoke(folder)[1]
    listed = invoke(folder, "--tensors")[1].split("\n\n")[1].splitlines()
    assert len(listed) == len(drafter_tensors())
    row = next(line.split() for line in listed if line.startswith("mask_hidden"))
    assert row == ["mask_hidden", "F32", "[1,", "1,", "48]", "192", "bytes"]
    as_json = json.loads(invoke(folder, "--json", "--tensors")[1])
    assert {"name": "d2t", "dtype": "I64", "shape": [10], "nbytes": 80} in as_json["tensors"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: without(t, "norm.weight"), "norm.weight is missing"),
        (lambda t: target_tensors(PEAGLE), "architectures is"),
    ],
)
def test_what_does_not_convert_is_an_error(
    change: Callable[[Tensors], Tensors], message: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "hf", PEAGLE, change(drafter_tensors()))
    code, out, errors = invoke(folder)
    assert (code, out) == (1, "")
    assert errors.startswith("error: ") and message in errors and errors.count("\n") == 1
