"""Attention in float64 by loops over sequences, heads and rows; and how caches lie."""

from typing import Any

import numpy as np


def reference(
    q: Any,
    k: Any,
    v: Any,
    positions: np.ndarray,
    window: int | None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Rows `[B, T, N, D]` over keys and values `[B, N_kv, L, D]` at the positions 0 to L - 1."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    batch, length, heads, head_dim = q.shape
    group = heads // k.shape[1]
    out = np.zeros_like(q)
    for b in range(batch):
        for t in range(length):
            stop = positions[b, t] + 1
            start = 0 if window is None else max(0, stop - window)
            if stop <= start:
                continue  # sees nothing
            for n in range(heads):
                keys, values = k[b, n // group, start:stop], v[b, n // group, start:stop]
                scores = keys @ q[b, t, n] / np.sqrt(head_dim)
                sink = -np.inf if sinks is None else sinks[n]
                highest = max(scores.max(), sink)
                weights = np.exp(scores - highest)
                out[b, t, n] = weights @ values / (weights.sum() + np.exp(sink - highest))
    return out


def ring(rows: np.ndarray, newest: np.ndarray, slots: int, junk: float = 1e4) -> np.ndarray:
    """Keeps the last positions of `[B, N_kv, L, D]` up to `newest`, each in slot p % slots."""
    kept = np.full((*rows.shape[:2], slots, rows.shape[3]), junk, rows.dtype)
    for b, last in enumerate(newest):
        for position in range(max(0, last - slots + 1), last + 1):
            kept[b, :, position % slots] = rows[b, :, position]
    return kept


def relative_error(out: Any, exact: np.ndarray) -> float:
    """The norm of the difference by that of what is exact; no value may be NaN."""
    difference = np.asarray(out).astype(np.float64) - exact
    return float(np.linalg.norm(difference) / max(np.linalg.norm(exact), 1e-30))
