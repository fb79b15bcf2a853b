"""The draft vocabulary against the published package."""

import numpy as np
import pytest
from conftest import GOLDEN

from peagle_jax.training.vocabulary import choose, count_supervised, coverage


def test_equals_speculators() -> None:
    golden = dict(np.load(GOLDEN / "oracle" / "vocab.npz"))
    counts = np.zeros(160, np.int64)
    counts[golden["freq_ids"]] = golden["freq_counts"]
    d2t, t2d = choose(counts, int(golden["draft_vocab_size"]))
    np.testing.assert_array_equal(d2t, golden["d2t"])
    np.testing.assert_array_equal(t2d, golden["t2d"])
    assert coverage(counts, t2d) == 1


def test_ties_fill_and_coverage() -> None:
    tokens = np.array([[5, 5, 3, 7, 7, 7], [3, 1, 1, 0, 0, 0]])
    counts = count_supervised(tokens, np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]), 9)
    np.testing.assert_array_equal(counts, [0, 2, 0, 2, 0, 2, 0, 3, 0])
    d2t, t2d = choose(counts, 3)  # 7, then the smaller ids of the three that occur twice
    np.testing.assert_array_equal(d2t + np.arange(3), [1, 3, 7])
    np.testing.assert_array_equal(np.flatnonzero(t2d), [1, 3, 7])
    assert coverage(counts, t2d) == 7 / 9
    d2t, _ = choose(counts, 6)  # unseen ones, the smallest first
    np.testing.assert_array_equal(d2t + np.arange(6), [0, 1, 2, 3, 5, 7])
    assert coverage(np.zeros(9), t2d) == 1
    for size in (0, 10):
        with pytest.raises(ValueError, match="draft vocabulary"):
            choose(counts, size)
