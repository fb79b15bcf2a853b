"""What the compilers for CPU, H200 and B200 say of programs at the sizes of real models."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

COMPILER = ROOT / ".cache" / "cuda"
# All experts of a layer, unpacked: 3 weights of 2880 x 2880 for each of 32.
GPT_OSS_WEIGHTS = 32 * 3 * 2880 * 2880
QWEN3_EXPERT = 3 * 2048 * 768
BYTES = {"cpu": 4, "h200": 2, "b200": 2}  # float32 on CPU, bfloat16 on GPUs


def compiled(device: str, *program: str) -> dict[str, int]:
    """Returns the compiler's report, made in a process of its own."""
    found = COMPILER.is_dir() or importlib.util.find_spec("jax_cuda13_plugin")
    if device != "cpu" and not found:
        pytest.skip("JAX's CUDA plugin and ptxas are not there: make compiler")
    path = os.pathsep.join([str(COMPILER), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "programs.py"), device, *program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("device", BYTES)
def test_mxfp4_stays_packed_in_the_whole_program(device: str) -> None:
    """GPT-OSS-20B's widths: no layer's experts are ever unpacked at once, nor all at decode."""
    report = compiled(device, "generation", "gpt_oss")
    unpacked = GPT_OSS_WEIGHTS * BYTES[device]
    dense = 201088 * 2880 * 2 * BYTES[device]  # embedding and head
    assert dense < report["arguments"] < dense + 2 * unpacked
    assert report["temporaries"] < unpacked / 8
    assert report["aliased"] > 2 * (4096 + 131) * 8 * 64 * BYTES[device]  # caches in their place


@pytest.mark.slow
@pytest.mark.parametrize("device", BYTES)
def test_the_whole_program_of_plain_experts(device: str) -> None:
    """Qwen3-Coder-30B's widths."""
    report = compiled(device, "generation", "qwen3_moe")
    assert report["temporaries"] < 128 * QWEN3_EXPERT * BYTES[device] / 4


@pytest.mark.parametrize("device", BYTES)
@pytest.mark.parametrize("rows", ["1", "4"])
def test_decoding_copies_no_expert(device: str, rows: str) -> None:
    """On GPUs not even one: its weights are read where the products are summed."""
    temporaries = compiled(device, "experts", "qwen3_moe", rows)["temporaries"]
    expert = QWEN3_EXPERT * BYTES[device]
    assert temporaries < (2 * expert if device == "cpu" else expert / 8)


@pytest.mark.parametrize("device", BYTES)
def test_a_prefill_holds_an_expert_at_a_time(device: str) -> None:
    """Not the rows times all experts, 512 x 32 x 5760 values, that `ragged_dot` makes of it."""
    temporaries = compiled(device, "experts", "gpt_oss", "512")["temporaries"]
    assert temporaries < 4 * 3 * 2880 * 2880 * BYTES[device]
    assert temporaries < 512 * 32 * 5760 * BYTES[device]
