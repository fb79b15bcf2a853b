"""What the compilers for H200 and B200 say of the attention kernels."""

import pytest
from processes import compiled

FAST = ("verify-llama-8b", "verify-gpt-oss-window", "prefill-llama-8b", "prefill-gpt-oss-window")
SLOW = (
    "verify-llama-70b",
    "verify-qwen3-14b",
    "verify-qwen3-0.6b",
    "verify-gpt-oss",
    "verify-smollm",
    "draft-gpt-oss",
    "draft-70b",
    "prefill-gpt-oss",
    "prefill-short",
)
# What a multiprocessor has for the threads of all instances, and for their shared memory.
REGISTERS, SHARED_BYTES = 65536, 227 * 1024


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FAST, id="usual"),
        pytest.param(SLOW, id="others", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("device", ["h200", "b200"])
def test_no_register_is_spilled(device: str, names: tuple[str, ...]) -> None:
    """Two instances fit on a multiprocessor, of the prefill's, which has two warpgroups, one."""
    for name, report in compiled(device, *names, script="attention_kernels.py").items():
        assert report["spilled"] == [0], name
        (registers,), (shared,) = report["registers"], report["shared"]
        instances = 1 if name.startswith("prefill") else 2
        threads = 256 if name.startswith("prefill") else 128
        assert instances * threads * registers <= REGISTERS, name
        assert instances * (shared + 1024) <= SHARED_BYTES, name
