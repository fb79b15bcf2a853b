"""A whole training step of one packed row, compiled for H200 and B200."""

from typing import Any

import pytest
from processes import compiled

GIB = 2**30


def slow(*values: str) -> Any:
    """Returns parameters of a test, marked."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "device, method", [("h200", "p-eagle"), slow("b200", "p-eagle"), slow("b200", "eagle-3")]
)
def test_a_step_compiles_with_the_kernels(device: str, method: str) -> None:
    """Forward, dQ and dK/dV by kernels; nothing as large as all logits `[n, D_V]`."""
    report = compiled(device, method, "llama-3.1-8b", "2048", "1", script="training_step.py")
    assert report["kernels"] >= 3
    elements = 2048 * 4.16 if method == "p-eagle" else 2048 * 3
    assert report["temporaries"] - report["results"] < elements * 32000 * 4


@pytest.mark.slow
def test_segments_save_memory() -> None:
    """Of a row of 8192 tokens at K = 8."""
    whole, cut = (
        compiled("h200", "p-eagle", "llama-3.1-8b", "8192", count, script="training_step.py")
        for count in ("1", "8")
    )
    assert cut["temporaries"] < whole["temporaries"] / 2
