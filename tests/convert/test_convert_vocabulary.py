"""The draft vocabulary: d2t and t2d, checked before a wrong token is ever proposed."""

from pathlib import Path

import numpy as np
import pytest
from convert_sources import (
    DRAFT_IDS,
    PEAGLE,
    Tensors,
    drafter_tensors,
    parse_drafter,
    read_native,
    vocabulary,
    without,
    write,
)

from peagle_jax.config import DrafterConfig
from peagle_jax.convert import ConvertError, convert_drafter


def test_full_vocabulary_drops_the_identity_map(tmp_path: Path) -> None:
    config = without(PEAGLE, "draft_vocab_size")
    tensors = drafter_tensors(PEAGLE | {"draft_vocab_size": 40})
    bare = parse_drafter(tmp_path / "bare", config, tensors)
    assert bare.draft_vocab_size == 40
    mapped = tensors | vocabulary(np.arange(40), 40)
    assert parse_drafter(tmp_path / "mapped", config, mapped) == bare
    convert_drafter(tmp_path / "mapped", tmp_path / "out")
    assert "d2t" not in read_native(tmp_path / "out", DrafterConfig)[1]


def test_t2d_alone_means_ascending_order(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    write(tmp_path / "hf", PEAGLE, without(tensors, "d2t"))
    convert_drafter(tmp_path / "hf", tmp_path / "out")
    offsets = read_native(tmp_path / "out", DrafterConfig)[1]["d2t"]
    np.testing.assert_array_equal(offsets + np.arange(10), DRAFT_IDS)


OFFSETS = DRAFT_IDS - np.arange(10)
OTHER = vocabulary(np.arange(10), 40)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"d2t": OFFSETS + 2}, "d2t maps 1 draft ids outside .*9 -> 40"),
        ({"d2t": OFFSETS - 1}, "d2t maps 1 draft ids outside .*0 -> -1"),
        ({"d2t": np.zeros(10, np.int64)}, "d2t and t2d name different"),
        ({"d2t": OFFSETS[:-1]}, r"d2t is I64 \(9,\)"),
        ({"d2t": OFFSETS.astype(np.float32)}, "d2t is F32"),
        ({"t2d": OTHER["t2d"]}, "d2t and t2d name different"),
        ({"t2d": np.ones(40, np.bool_)}, "t2d holds 40 target ids"),
        ({"t2d": np.ones(39, np.bool_)}, r"t2d is BOOL \(39,\)"),
        ({"t2d": np.ones(40, np.int64)}, "t2d is I64"),
    ],
)
def test_bad_vocabulary_maps(change: Tensors, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=named):
        parse_drafter(tmp_path, PEAGLE, drafter_tensors() | change)


def test_reduced_vocabulary_needs_a_map(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"d2t is missing.*10 of 40"):
        parse_drafter(tmp_path, PEAGLE, without(drafter_tensors(), "d2t", "t2d"))


def test_reordered_full_vocabulary_is_refused(tmp_path: Path) -> None:
    tensors = drafter_tensors(PEAGLE | {"draft_vocab_size": 40})
    swapped = {"d2t": np.array([1, -1] + [0] * 38)}
    with pytest.raises(ConvertError, match="d2t reorders a full draft vocabulary"):
        parse_drafter(tmp_path, without(PEAGLE, "draft_vocab_size"), tensors | swapped)
