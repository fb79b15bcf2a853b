"""Attention against a float64 reference that loops over heads and rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.kernels import attention


def reference(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, window: int | None
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
                weights = np.exp(scores - scores.max())
                out[b, t, n] = weights @ values / weights.sum()
    return out


@pytest.mark.parametrize("group", [1, 2, 3, 8])
@pytest.mark.parametrize("window", [None, 1, 5, 64])
def test_attention_equals_float64(group: int, window: int | None) -> None:
    rng = np.random.default_rng(group)
    q = rng.standard_normal((3, 6, 2 * group, 16), np.float32)
    k, v = (rng.standard_normal((3, 2, 40, 16), np.float32) for _ in range(2))
    positions = np.array([0, 13, 34])[:, None] + np.arange(6)
    out = attention(*map(jnp.asarray, (q, k, v, positions)), window)
    np.testing.assert_allclose(out, reference(q, k, v, positions, window), atol=1e-5)


def test_long_prefill_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import import_module

    monkeypatch.setattr(import_module("peagle_jax.kernels.attention"), "QUERY_CHUNK", 7)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s, np.float32) for s in ((1, 30, 4, 8), *[(1, 2, 30, 8)] * 2))
    positions = np.arange(30)[None]
    for prefill in (False, True):
        out = attention(*map(jnp.asarray, (q, k, v, positions)), prefill=prefill)
        np.testing.assert_allclose(out, reference(q, k, v, positions, None), atol=1e-5)


def test_bfloat16_keeps_float32_softmax() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s, np.float32) for s in ((2, 3, 4, 8), *[(2, 2, 50, 8)] * 2))
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    positions = np.array([[40, 41, 42], [3, 4, 5]])
    out = attention(q, k, v, jnp.asarray(positions))
    assert out.dtype == jnp.bfloat16
    exact = reference(*(np.asarray(x, np.float32) for x in (q, k, v)), positions, None)
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=1e-2)
