"""The command `peagle-convert` as it is typed: options, output, errors in one line."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from convert_sources import (
    LLAMA,
    PEAGLE,
    drafter_tensors,
    read_native,
    target_tensors,
    without,
    write,
)

from peagle_jax.config import DrafterConfig
from peagle_jax.convert.cli import _Size, main


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, list(map(str, arguments)))
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def native_head(tmp_path: Path) -> Path:
    write(tmp_path / "source", PEAGLE, drafter_tensors())
    assert invoke("to-native", tmp_path / "source", tmp_path / "head")[0] == 0
    return tmp_path / "head"


def test_to_native_takes_what_a_config_leaves_out(tmp_path: Path) -> None:
    config = without(PEAGLE, "ptd_token_id") | {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    write(tmp_path / "hf", config, drafter_tensors())
    options = ("--mask-token-id", 39, "--aux-convention", "layer_output")
    code, out, errors = invoke("to-native", tmp_path / "hf", tmp_path / "out", *options)
    assert (code, errors) == (0, "")
    assert "boundaries 2, 4, 5 (given as layer outputs" in out
    config_read = read_native(tmp_path / "out", DrafterConfig)[0]
    assert (config_read.mask_token_id, config_read.aux_boundaries) == (39, (2, 4, 5))


def test_to_hf_says_what_it_made(native_head: Path, tmp_path: Path) -> None:
    code, out, errors = invoke("to-hf", native_head, tmp_path / "out", "--format", "vllm")
    size = sum(t.nbytes for t in drafter_tensors().values())
    assert (code, errors) == (0, "")
    count = len(drafter_tensors())
    assert out == f"{tmp_path}/out: vllm, {count} tensors in 1 file, {size:,} bytes\n"
    options = ("--format", "speculators", "--target", "org/model", "--max-shard-size", "4KB")
    code, out, errors = invoke("to-hf", native_head, tmp_path / "sharded", *options)
    assert code == 0 and " files, " in out
    config = json.loads((tmp_path / "sharded" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "org/model"


def test_warnings_go_to_standard_error(tmp_path: Path) -> None:
    source = PEAGLE | {"fc_norm": True}
    write(tmp_path / "hf", source, drafter_tensors(fc_norm=True))
    invoke("to-native", tmp_path / "hf", tmp_path / "head")
    code, out, errors = invoke(
        "to-hf", tmp_path / "head", tmp_path / "out", "--format", "speculators"
    )
    assert code == 0 and out.startswith(f"{tmp_path}/out: speculators")
    assert errors.startswith("warning: the head has fc_norm") and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "options"), [("to-hf", ("--format", "vllm")), ("to-native", ()), ("inspect", ())]
)
def test_errors_are_one_line(command: str, options: tuple[str, ...], tmp_path: Path) -> None:
    to = () if command == "inspect" else (tmp_path / "out",)
    code, out, errors = invoke(command, tmp_path / "nowhere", *to, *options)
    assert (code, out) == (1, "")
    assert errors.startswith("error: ") and errors.count("\n") == 1
    assert str(tmp_path / "nowhere") in errors
    assert not (tmp_path / "out").exists()


def test_damaged_and_unknown_native_checkpoints_are_one_line(
    native_head: Path, tmp_path: Path
) -> None:
    header = json.loads((native_head / "config.json").read_text())
    for change, message in (
        ({"format_version": 0}, "format version 0"),
        ({"kind": "reranker"}, "holds a reranker"),
        ({"config": header["config"] | {"head_dim": 3}}, "head_dim 3 must be even"),
    ):
        (native_head / "config.json").write_text(json.dumps(header | change))
        for arguments in (("inspect", native_head), ("to-hf", native_head, tmp_path / "out")):
            options = ("--format", "vllm") if arguments[0] == "to-hf" else ()
            code, out, errors = invoke(*arguments, *options)
            assert (code, out) == (1, "") and message in errors and errors.count("\n") == 1


def test_format_that_does_not_fit_is_one_line(native_head: Path, tmp_path: Path) -> None:
    code, out, errors = invoke("to-hf", native_head, tmp_path / "out", "--format", "hf")
    assert (code, out) == (1, "")
    expected = "use --format vllm or speculators"
    assert errors == f"error: format hf is not one of a drafter's: {expected}\n"
    write(tmp_path / "target", LLAMA, target_tensors(LLAMA))
    invoke("to-native", tmp_path / "target", tmp_path / "native")
    assert (
        "--format hf" in invoke("to-hf", tmp_path / "native", tmp_path / "out", "--format=vllm")[2]
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500 MB", 5 * 10**8), ("1.5kb", 1500), ("2T", 2 * 10**12), ("7", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert _Size().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "GB", "5GiB", "-1", "0", "5 PB", "0.1"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(click.BadParameter, match="no size such as 5GB"):
        _Size().convert(text, None, None)


@pytest.mark.parametrize("command", ["to-native", "to-hf", "inspect"])
def test_help_names_every_option(command: str) -> None:
    code, out, _ = invoke(command, "--help")
    options = {
        "to-native": ("--dtype", "--aux-convention", "--mask-token-id", "--target-layers"),
        "to-hf": ("--format", "--target", "--max-shard-size", "5GB"),
        "inspect": ("--json", "--tensors", "--aux-convention", "--mask-token-id"),
    }
    assert code == 0
    for option in options[command]:
        assert option in out
