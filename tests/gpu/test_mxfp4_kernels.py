"""What the compilers for H200 and B200 say of MXFP4 products and of layers that use them."""

import pytest
from processes import compiled

EXPERT = 3 * 2880 * 2880 * 17 // 32  # bytes of one of GPT-OSS' experts, packed
REGISTERS, SHARED_BYTES = 65536, 227 * 1024  # of a multiprocessor
FAST = ("gate-up", "down")
SLOW = ("down-120b", "gate-up-16", "gate-up-32", "gate-up-float32", "down-32-float32")


@pytest.mark.parametrize("names", [FAST, pytest.param(SLOW, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("device", ["h200", "b200"])
def test_no_register_is_spilled(device: str, names: tuple[str, ...]) -> None:
    """With blocks of 8 rows three instances fit on a multiprocessor."""
    for name, report in compiled(device, *names, script="mxfp4_and_cod_kernels.py").items():
        assert report["spilled"] == [0], name
        (registers,), (shared,) = report["registers"], report["shared"]
        instances = 1 if "32" in name else 2 if "16" in name else 3
        assert instances * 128 * registers <= REGISTERS, name
        assert instances * (shared + 1024) <= SHARED_BYTES, name
        assert report["temporaries"] < (EXPERT / 4 if instances == 3 else 4 * EXPERT), name


@pytest.mark.slow
@pytest.mark.parametrize("device", ["h200", "b200"])
@pytest.mark.parametrize(
    ("name", "rows"), [("gpt-oss-20b", 4), ("gpt-oss-120b", 4), ("gpt-oss-120b", 64)]
)
def test_a_layer_unpacks_no_weights(device: str, name: str, rows: int) -> None:
    """What is in memory meanwhile are rows, in blocks: for few of them half a packed expert."""
    temporaries = compiled(device, "experts", name, str(rows))["temporaries"]
    assert temporaries < (EXPERT / 2 if rows <= 4 else 3 * EXPERT)
