"""The draft vocabulary: the tokens that a drafter can propose, chosen by how often they occur.

The rules are speculators' (`training.md`, section 7.3). All of it runs on the host.
"""

import numpy as np


def count_supervised(tokens: np.ndarray, loss_mask: np.ndarray, vocab_size: int) -> np.ndarray:
    """Returns how often each token is supervised, `[V]` int64, of tokens and mask of one shape."""
    return np.bincount(tokens[loss_mask.astype(bool)], minlength=vocab_size)


def choose(counts: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Chooses the most frequent tokens.

    Of equally frequent ones, and of those never seen where too few were, the smaller ids come
    first. Draft ids are given in the order of the target's ids.

    Args:
      counts: `[V]`, how often each token is supervised.
      size: D_V.

    Returns:
      d2t `[D_V]` int64, offsets: draft id i is target id i + d2t[i]; and t2d `[V]` bool.
    """
    if not 0 < size <= len(counts):
        raise ValueError(f"a draft vocabulary of {size} of {len(counts)} tokens")
    ids = np.sort(np.argsort(-counts, kind="stable")[:size])
    t2d = np.zeros(len(counts), bool)
    t2d[ids] = True
    return ids - np.arange(size), t2d


def coverage(counts: np.ndarray, t2d: np.ndarray) -> float:
    """Returns which part of the supervised tokens a draft vocabulary holds; 1 of none."""
    total = counts.sum()
    return float(counts[t2d].sum() / total) if total else 1.0
