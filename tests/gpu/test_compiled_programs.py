"""What the compilers for CPU, H200 and B200 say of programs at the sizes of real models."""

from typing import Any

import pytest
from processes import compiled

# All experts of a layer, unpacked: 3 weights of 2880 x 2880 for each of 32.
GPT_OSS_WEIGHTS = 32 * 3 * 2880 * 2880
QWEN3_EXPERT = 3 * 2048 * 768
BYTES = {"cpu": 4, "h200": 2, "b200": 2}  # float32 on CPU, bfloat16 on GPUs


def slow(device: str) -> Any:
    """Returns a parameter of tests, marked."""
    return pytest.param(device, marks=pytest.mark.slow)


def generated(device: str, name: str, *sizes: str) -> dict[str, int]:
    """Returns the report on a generation, whose arguments are what the plan says, and no copies."""
    report = compiled(device, "generation", name, *sizes)
    kept = report["weights"] + report["caches"]
    assert kept < report["arguments"] < 1.01 * kept + 2**20
    assert report["aliased"] == report["caches"]  # they stay in their place
    assert (report["kernels"] > 0) == (device != "cpu")
    return report


# Sequences, prompt and further tokens, K.
USUAL = ("1", "512", "3500", "3")


@pytest.mark.slow
@pytest.mark.parametrize("device", BYTES)
def test_mxfp4_stays_packed_in_the_whole_program(device: str) -> None:
    """GPT-OSS-20B's widths: no layer's experts are ever unpacked at once, nor all at decode."""
    report = generated(device, "gpt-oss-20b", *USUAL, "sampled")
    assert report["temporaries"] < GPT_OSS_WEIGHTS * BYTES[device] / 8
    assert device == "cpu" or report["estimate"] > 0.85 * report["temporaries"]


@pytest.mark.parametrize("device", ["b200", *map(slow, ["cpu", "h200"])])
def test_the_whole_program_of_plain_experts(device: str) -> None:
    """Qwen3-Coder-30B's widths."""
    report = generated(device, "qwen3-coder-30b-a3b", *USUAL)
    assert report["temporaries"] < 128 * QWEN3_EXPERT * BYTES[device] / 4
    assert device == "cpu" or report["estimate"] > 0.85 * report["temporaries"]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["h200", "b200"])
def test_what_sampling_takes(device: str) -> None:
    """Arrays as large as the logits of a round, `[B, K + 1, V]` in float32: not many."""
    sizes = ("8", "32", "1024", "3")
    greedy, sampled = (
        generated(device, "gpt-oss-20b", *sizes, *options)["temporaries"]
        for options in ((), ("sampled",))
    )
    assert greedy <= sampled < greedy + 2 * (8 * 4 * 201088 * 4)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["h200", "b200"])
@pytest.mark.parametrize("drafts", ["0", "5"])
def test_a_long_prompt_is_read_in_passes(device: str, drafts: str) -> None:
    """32 times 8 x 1024 rows, over caches of 8 x 32896 slots; nor is the plan far off."""
    report = generated(device, "gpt-oss-120b", "8", "32760", "8", drafts)
    assert 0.85 < report["estimate"] / report["temporaries"] < 1.15


@pytest.mark.parametrize("device", BYTES)
@pytest.mark.parametrize("rows", ["1", "4"])
def test_decoding_copies_no_expert(device: str, rows: str) -> None:
    """On GPUs not even one: its weights are read where the products are summed."""
    temporaries = compiled(device, "experts", "qwen3-coder-30b-a3b", rows)["temporaries"]
    expert = QWEN3_EXPERT * BYTES[device]
    assert temporaries < (2 * expert if device == "cpu" else expert / 8)


@pytest.mark.parametrize("device", ["cpu", "b200", slow("h200")])
def test_a_prefill_holds_an_expert_at_a_time(device: str) -> None:
    """Not the rows times all experts, 512 x 32 x 5760 values, that `ragged_dot` makes of it."""
    temporaries = compiled(device, "experts", "gpt-oss-20b", "512")["temporaries"]
    assert temporaries < 4 * 3 * 2880 * 2880 * BYTES[device]
    assert temporaries < 512 * 32 * 5760 * BYTES[device]
