"""Attention of training rows, simulated: values and gradients against float64 and a dense mask."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from peagle_jax.kernels import cod_attention
from peagle_jax.kernels.cod_tiles import NO_KEY, NO_QUERY, ROWS, filled_up, tiles

Arrays = tuple[np.ndarray, ...]
BFLOAT16 = ml_dtypes.bfloat16


def slow(*values: Any) -> Any:
    """Returns a parameter of tests, marked."""
    return pytest.param(*values, marks=pytest.mark.slow)


def packed(length: int, depths: int, documents: int, padding: int, seed: int = 0) -> np.ndarray:
    """Rows `[3, n]` of documents and padding: real ones, then nested random anchors by depth."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.integers(0, documents, length))
    ids[length - padding :] = -1
    anchors, depth = [np.arange(length)], [np.zeros(length, int)]
    for d in range(1, depths):
        left = anchors[-1][: length - d]
        size = max(1, int(0.7 * len(left)))
        anchors.append(np.sort(rng.choice(left, size, replace=False)))
        depth.append(np.full(size, d))
    anchor = np.concatenate(anchors)
    document = np.where(ids[anchor] < 0, -1 - np.arange(len(anchor)), ids[anchor])
    return np.stack([anchor, np.concatenate(depth), document]).astype(np.int32)


def rule(queries: np.ndarray, keys: np.ndarray, window: int | None) -> np.ndarray:
    """Who sees whom, `[T, S]`, as speculators say it, documents and depths written out."""
    (q_anchor, q_depth, q_document), (anchor, depth, document) = queries[:, :, None], keys
    before = anchor <= q_anchor
    near = np.full(before.shape, window is None) | (q_anchor + q_depth - anchor < (window or 0))
    chain = (anchor == q_anchor) & (q_depth - depth >= 0)
    return np.where(
        document == q_document, np.where(depth == 0, before & near, False) | chain, False
    )


def expected(
    mask: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, dy: np.ndarray
) -> Arrays:
    """Output and gradients in float64."""
    q, k, v, dy = (x.astype(np.float64) for x in (q, k, v, dy))
    group, scale = q.shape[1] // k.shape[0], q.shape[2] ** -0.5
    y, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    for n in range(q.shape[1]):
        kv = n // group
        scores = np.where(mask, q[:, n] @ k[kv].T * scale, -np.inf)
        weights = np.exp(scores - np.where(mask.any(1), scores.max(1), 0)[:, None])
        weights /= np.where(mask.any(1), weights.sum(1), 1)[:, None]
        y[:, n] = weights @ v[kv]
        slopes = dy[:, n] @ v[kv].T
        slopes = weights * (slopes - (slopes * weights).sum(1, keepdims=True)) * scale
        dq[:, n] = slopes @ k[kv]
        dk[kv] += slopes.T @ q[:, n]
        dv[kv] += weights.T @ dy[:, n]
    return y, dq, dk, dv


def check(
    queries: np.ndarray,
    keys: np.ndarray,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: np.dtype,
    window: int | None = None,
    interpret: Any = True,
    backward: bool = True,
) -> Arrays:
    """Compares output and gradients with float64; returns them."""
    rng = np.random.default_rng(queries.shape[1])
    of_queries = queries.shape[1], heads, head_dim
    of_keys = kv_heads, keys.shape[1], head_dim
    q, k, v, dy = (
        rng.standard_normal(shape).astype(dtype)
        for shape in (of_queries, of_keys, of_keys, of_queries)
    )

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        def attend(*qkv: jax.Array) -> jax.Array:
            return cod_attention(*qkv, jnp.asarray(queries), jnp.asarray(keys), window, interpret)

        if not backward:
            return (attend(q, k, v),)
        y, pull = jax.vjp(attend, q, k, v)
        return y, *pull(dy)

    got = tuple(map(np.asarray, run(q, k, v, dy)))
    right = expected(rule(queries, keys, window), q, k, v, dy)
    for one, other in zip(got, right, strict=False):
        assert one.dtype == dtype and one.shape == other.shape
        error = np.linalg.norm(one.astype(np.float64) - other)
        accuracy = 1e-5 if dtype == np.float32 else 1e-2
        assert error <= accuracy * max(np.linalg.norm(other), 1e-2 * np.linalg.norm(dy))
    return got


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype", "window"),
    [
        (2, 1, 128, np.float32, 9),
        (1, 1, 64, BFLOAT16, None),
        slow(6, 2, 64, np.float32, None),
        slow(2, 2, 128, BFLOAT16, 30),
        slow(8, 1, 64, BFLOAT16, 1),
    ],
)
def test_output_and_gradients_equal_float64(
    heads: int, kv_heads: int, head_dim: int, dtype: np.dtype, window: int | None
) -> None:
    """Two documents and padding, depths up to 8; more than one tile, the last not full."""
    rows = packed(38, 8, 2, 3)
    assert ROWS < rows.shape[1] < 2 * ROWS
    check(rows, rows, heads, kv_heads, head_dim, np.dtype(dtype), window)


def test_rows_that_see_nothing_give_zeros() -> None:
    """In a tile with others, and in a tile of their own, which has no tile to read."""
    queries, keys = packed(2 * ROWS, 1, 1, 0), packed(ROWS, 1, 1, 0)
    queries[2, 5:9] = queries[2, ROWS:] = 7
    y, dq, *_ = check(queries, keys, 1, 1, 16, np.dtype(np.float32))
    for x in (y, dq):
        assert not x[5:9].any() and not x[ROWS:].any()
    assert y[:5].any(axis=-1).all()


# Shrinking a failure would take minutes.
@pytest.mark.slow
@settings(max_examples=3, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    st.sampled_from([1, 7, 40, 63]),
    st.integers(1, 8),
    st.integers(1, 3),
    st.sampled_from([None, 1, 2, 11]),
    st.integers(0, 99),
)
def test_any_rows(length: int, depths: int, documents: int, window: int | None, seed: int) -> None:
    """Queries are the last ones, as in a segment, or all."""
    rows = packed(length, min(depths, length), documents, length // 5, seed)
    queries = rows[:, -1 - seed % rows.shape[1] :]
    check(queries, rows, 1, 1, 16, np.dtype(np.float32), window, backward=seed % 4 == 0)


def test_no_races() -> None:
    """More tiles than slots, so that slots are filled again, forward and backward."""
    rows = packed(2 * ROWS + 1, 1, 1, 0)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    check(rows, rows, 1, 1, 16, np.dtype(np.float32), None, interpret)


def dense(mask: np.ndarray, q_size: int, k_size: int, every: bool) -> np.ndarray:
    """Tiles in which anybody, or everybody, sees."""
    cut = mask.reshape(mask.shape[0] // q_size, q_size, mask.shape[1] // k_size, k_size)
    return cut.all(axis=(1, 3)) if every else cut.any(axis=(1, 3))


@pytest.mark.parametrize("of_queries", [False, True])
@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("window", [None, 50])
def test_tiles_hold_all_that_is_seen(size: int, window: int | None, of_queries: bool) -> None:
    """None is missing, those said to be whole are, and no more than a third is listed in vain."""
    rows = packed(600, 8, 2, 20)
    end = -rows.shape[1] % ROWS
    queries, keys = (np.asarray(filled_up(jnp.asarray(rows), end, d)) for d in (NO_QUERY, NO_KEY))
    assert not rule(queries, keys, window)[rows.shape[1] :].any()
    q_size, k_size = (size, ROWS) if of_queries else (ROWS, size)
    mask = rule(queries, keys, window)
    seen, whole = (dense(mask, q_size, k_size, every) for every in (False, True))
    if of_queries:
        seen, whole = seen.T, whole.T
    listed, counts = map(np.asarray, tiles(queries, keys, size, window, of_queries))
    needed, called_whole = np.zeros_like(seen), np.zeros_like(seen)
    for tile, (some, count) in enumerate(zip(listed, counts, strict=True)):
        assert len(set(some[:count])) == count
        needed[tile, some[:count] // 2] = True
        called_whole[tile, some[:count] // 2] = some[:count] % 2
    assert not (seen & ~needed).any() and not (called_whole & ~whole).any()
    assert needed.sum() < 1.5 * seen.sum() < needed.size
    assert window is not None or called_whole.sum() == whole.sum() > 0
