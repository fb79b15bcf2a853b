"""What the compilers for H200 and B200 say of attention in training, forward and backward."""

import pytest
from processes import compiled

SHARED_BYTES = 227 * 1024  # of a multiprocessor
FAST = ("cod-llama-8b",)
SLOW = ("cod-qwen3-window", "cod-gpt-oss", "cod-gpt-oss-window", "cod-odd")


@pytest.mark.parametrize("names", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("device", ["h200", "b200"])
def test_three_kernels_and_no_scores(device: str, names: tuple[str, ...]) -> None:
    """Training takes them, nothing is spilled, and no mask `[n, n]` nor anything of XLA's is kept.

    Rows that fill no tile cost copies of queries, keys, values, output and gradients.
    """
    for name, report in compiled(device, *names, script="mxfp4_and_cod_kernels.py").items():
        assert report["spilled"] == [0, 0, 0], name
        assert 2 * (max(report["shared"]) + 1024) <= SHARED_BYTES, name
        array = 8192 * 4096 * 2  # of queries; a bit for each score would take as much
        assert report["temporaries"] < (5 * array if "odd" in name else array / 4), name
