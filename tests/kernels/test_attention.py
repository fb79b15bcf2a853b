"""Attention against a float64 reference that loops over heads and rows."""

import importlib

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.kernels import attention
from peagle_jax.kernels.attention import block_rows
from peagle_jax.models.cache import ring_positions


def reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    positions: np.ndarray,
    window: int | None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    batch, length, heads, head_dim = q.shape
    group = heads // k.shape[1]
    out = np.zeros_like(q)
    for b in range(batch):
        for t in range(length):
            stop = positions[b, t] + 1
            start = 0 if window is None else max(0, stop - window)
            for n in range(heads):
                keys, values = k[b, n // group, start:stop], v[b, n // group, start:stop]
                scores = keys @ q[b, t, n] / np.sqrt(head_dim)
                sink = -np.inf if sinks is None else sinks[n]
                highest = max(scores.max(), sink)
                weights = np.exp(scores - highest)
                out[b, t, n] = weights @ values / (weights.sum() + np.exp(sink - highest))
    return out


def ring(rows: np.ndarray, newest: np.ndarray, slots: int) -> np.ndarray:
    """Keeps the last positions of `[B, N_kv, S, D]` up to `newest`, each in slot p % slots."""
    kept = np.full((*rows.shape[:2], slots, rows.shape[3]), 1e4, np.float32)  # finite junk
    for b, last in enumerate(newest):
        for position in range(max(0, last - slots + 1), last + 1):
            kept[b, :, position % slots] = rows[b, :, position]
    return kept


@pytest.mark.parametrize("group", [1, 2, 3, 8])
@pytest.mark.parametrize("sinks", [None, 1.0, 30.0])
@pytest.mark.parametrize(("window", "slots"), [(None, 40), (1, 6), (5, 10), (5, 17), (64, 40)])
def test_attention_equals_float64(
    group: int, sinks: float | None, window: int | None, slots: int
) -> None:
    """Rings of just window + T - 1 slots, larger ones, and ones that never turn."""
    rng = np.random.default_rng(group)
    q = rng.standard_normal((3, 6, 2 * group, 16), np.float32)
    k, v = (rng.standard_normal((3, 2, 40, 16), np.float32) for _ in range(2))
    positions = np.array([0, 13, 34])[:, None] + np.arange(6)
    logits = None if sinks is None else sinks * rng.standard_normal(2 * group).astype(np.float32)
    newest = positions[:, -1]
    kept = (ring(x, newest, slots) for x in (k, v))
    held = jnp.arange(slots) if window is None else ring_positions(jnp.asarray(newest), slots)
    out = attention(*map(jnp.asarray, (q, *kept, positions)), held, window, logits)
    np.testing.assert_allclose(out, reference(q, k, v, positions, window, logits), atol=1e-5)


def test_a_sink_takes_its_share() -> None:
    """Scores 1, 2, 0.5 and a sink of 1.5, as worked out by hand."""
    scores = np.array([1.0, 2.0, 0.5], np.float32)
    keys = jnp.asarray(scores)[None, None, :, None].repeat(2, axis=3) / 2**0.5  # q = (1, 1), D = 2
    values = jnp.eye(3)[None, None, :, :2]  # shows the first two weights
    args = jnp.ones((1, 1, 1, 2)), keys, values, jnp.array([[2]]), jnp.arange(3)
    out = attention(*args, sinks=jnp.array([1.5]))
    np.testing.assert_allclose(out[0, 0, 0], [0.167405097, 0.455054234], rtol=1e-6)


@pytest.mark.parametrize("score_bytes", [1 << 28, 1000, 1])
def test_long_prefill_is_the_same_in_pieces(
    score_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of 8 rows, whole and in blocks of one row or a few."""
    module = importlib.import_module("peagle_jax.kernels.attention")
    monkeypatch.setattr(module, "PIECE_ROWS", 8)
    monkeypatch.setattr(module, "SCORE_BYTES", score_bytes)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s, np.float32) for s in ((1, 30, 4, 8), *[(1, 2, 30, 8)] * 2))
    positions = np.arange(30)[None]
    for own, window in ((False, None), (True, None), (True, 1), (True, 5), (True, 30)):
        arrays = map(jnp.asarray, (q, k, v, positions, positions))
        out = attention(*arrays, window, own=own)
        np.testing.assert_allclose(out, reference(q, k, v, positions, window), atol=1e-5)


def test_bfloat16_keeps_float32_softmax() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s, np.float32) for s in ((2, 3, 4, 8), *[(2, 2, 50, 8)] * 2))
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    positions = np.array([[40, 41, 42], [3, 4, 5]])
    out = attention(q, k, v, jnp.asarray(positions), jnp.arange(50))
    assert out.dtype == jnp.bfloat16
    exact = reference(*(np.asarray(x, np.float32) for x in (q, k, v)), positions, None)
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=1e-2)


def test_blocks_keep_the_scores_small() -> None:
    """GPT-OSS, 8 prompts of 32k: 4 rows a block; what fits is not cut."""
    assert block_rows(1024, 8 * 64 * 32768) == 4
    assert block_rows(1024, 9 * 1024) == 1024
    assert block_rows(30, 1 << 24) == 2  # the largest power of two that divides it
    assert block_rows(7, 1 << 30) == 1
