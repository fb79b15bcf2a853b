"""`peagle-jax plan`: what it prints, and one line for every error."""

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result
from conftest import GOLDEN

from peagle_jax.cli import main
from peagle_jax.plan import plan_memory
from peagle_jax.presets import DEVICES, TARGETS, with_expert_weights

GOOD = ("--target", "gpt-oss-20b", "--device", "h200", "--context", 4096)


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def test_json() -> None:
    result = invoke(*GOOD, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    expected = plan_memory(
        TARGETS["gpt-oss-20b"],
        device_bytes=DEVICES["h200"],
        batch_size=8,
        context=4096,
        drafter_layers=4,
        num_speculative_tokens=5,
    )
    assert json.loads(result.stdout) == expected.to_json()


def test_options_reach_the_plan() -> None:
    result = invoke(
        *("--target", "GPT-OSS-20B", "--device-memory", "40GiB", "--context", 4096, "--batch", 2),
        *("--prompt-tokens", 100, "--drafter-layers", 1, "--draft-vocab-size", 32000, "-k", 3),
        *("--dtype", "float32", "--expert-weights", "plain", "--json"),
    )
    expected = plan_memory(
        with_expert_weights(TARGETS["gpt-oss-20b"], "plain"),
        device_bytes=40 * 2**30,
        batch_size=2,
        context=4096,
        prompt_tokens=100,
        drafter_layers=1,
        draft_vocab_size=32000,
        num_speculative_tokens=3,
        dtype="float32",
    )
    assert json.loads(result.stdout) == expected.to_json()
    assert not expected.fits and result.exit_code == 0


def test_table() -> None:
    result = invoke(*GOOD)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[:3] == [
        "target   gpt-oss-20b, bfloat16",
        "drafter  P-EAGLE head of 4 layers, K = 5",
        "shapes   8 sequences, prompts of 4,096 rows, 4,224 slots",
    ]
    table = {line[:21].strip(): line[21:].split(maxsplit=2) for line in lines[4:13]}
    assert table["target weights"] == ["13,761,264,768", "12.82", "20,914,757,184 parameters"]
    assert table["target KV cache"][2] == "24,576 B per token + 3,342,336 B per sequence"
    assert table["drafter KV cache"][2] == "8,192 B per token"
    assert table["device"] == ["141,000,000,000", "131.32"]
    assert {"drafter weights", "prefill, in between", "round, in between", "peak"} < set(table)
    assert lines[13] == "" and lines[14].startswith("fits: ") and lines[14].endswith(" to spare")
    assert len(lines) == 15
    assert max(map(len, lines)) <= 100


def test_table_of_plain_decoding() -> None:
    result = invoke(*GOOD, "--drafter-layers", 0, "--target", GOLDEN / "targets" / "llama_gqa")
    assert result.exit_code == 1  # the tiny target's context is shorter
    result = invoke(
        *("--target", GOLDEN / "targets" / "llama_gqa", "--device", "l4", "--context", 200),
        *("--drafter-layers", 0),
    )
    assert result.exit_code == 0
    assert "drafter" not in result.stdout and "fits: " in result.stdout
    assert "XLA_PYTHON" not in result.stdout


def test_what_does_not_fit_and_what_hardly_fits() -> None:
    peak = json.loads(invoke(*GOOD, "--json").stdout)["peak_bytes"]
    result = invoke(*GOOD, "--device-memory", peak + 2**30)
    assert "fits: 1.00 GiB to spare\nJAX takes 75 %" in result.stdout
    result = invoke(*GOOD, "--device-memory", peak - 2**30)
    assert result.exit_code == 0
    assert result.stdout.endswith("\n\ndoes not fit: 1.00 GiB too much\n")


def test_help() -> None:
    result = invoke("--help")
    assert (result.exit_code, result.stderr) == (0, "")
    for word in ("--target", "--device-memory", "--json", "rtx-4090", "qwen3-coder-480b-a35b"):
        assert word in result.stdout
    assert "plan" in CliRunner().invoke(main, ["--help"]).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "gpt-oss"], "gpt-oss is no folder and no known target; known are gpt-oss-1"),
        (["--device", "b100"], "'b100' is no known device; known are a100-40gb, a100-80gb, b200"),
        (["--device-memory", "141"], "device memory '141' is no size of at least 100 MB"),
        (["--context", 131073], "a context of 131073 is more than the 131072 tokens"),
        (["--context", 0], "the context must be at least 1, got 0"),
        (["--batch", 0], "the batch size must be at least 1, got 0"),
        (["--drafter-layers", -1], "the number of drafter layers must be at least 0, got -1"),
        (["-k", 0], "num_speculative_tokens must be at least 1"),
        (["--draft-vocab-size", 300000], "the draft vocabulary must be in 1..201088"),
        (["--target", "qwen3-8b", "--expert-weights", "mxfp4"], "the target has no experts"),
        (["--target", str(GOLDEN)], "cannot read"),
    ],
)
def test_wrong_input(arguments: list[Any], message: str) -> None:
    """Later options take the place of the good ones before them."""
    result = invoke(*GOOD, *arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ") and message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "h200", "--context", 9], "Missing option '--target'"),
        (["--target", "qwen3-8b", "--device", "h200"], "Missing option '--context'"),
        ([*GOOD, "--dtype", "float16"], "'float16' is not one of"),
        ([*GOOD, "--batch", "few"], "'few' is not a valid integer"),
    ],
)
def test_wrong_usage(arguments: list[Any], message: str) -> None:
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
