"""Tiles of rows and their scores, inside the kernels of `cod_attention`: who sees whom.

The rule is that of `peagle_jax.training.mask.sees`. It is applied twice: to the bounds of whole
tiles, by XLA, which says what tiles the kernels need, and to single scores, in the kernels.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # of a warpgroup's own tile
LOG2E = math.log2(math.e)
# Scores of rows that are not seen, and where a running maximum begins: 2**(UNSEEN - LOWEST) is 0.
UNSEEN, LOWEST = -1e30, -1e20
# Documents of rows that fill up the last tiles: of queries, of keys.
NO_QUERY, NO_KEY = -(1 << 31), 1 - (1 << 31)
FAR = 1 << 30  # beyond all anchors, and documents of rows

Ref = Any  # of Pallas, whose types are private


def filled_up(rows: jax.Array, count: int, document: int) -> jax.Array:
    """Appends to `[3, T]` so many rows like the last, in a document of their own."""
    rows = jnp.pad(rows, ((0, 0), (0, count)), mode="edge")
    return rows.at[2, rows.shape[1] - count :].set(document)


def tiles(
    queries: jax.Array, keys: jax.Array, size: int, window: int | None, of_queries: bool
) -> tuple[jax.Array, jax.Array]:
    """Lists the tiles in which somebody may see somebody.

    Args:
      queries: `[3, T]`.
      keys: `[3, S]`.
      size: rows of the tiles that are listed; those of the others are `ROWS`.
      window: of the layer, or None.
      of_queries: list the tiles of queries for each tile of keys, and not the other way round.

    Returns:
      `[tiles, most]` int32, twice the index of a tile, plus one if everybody sees everybody in it,
      and their numbers `[tiles]`.
    """
    q_size, k_size = (size, ROWS) if of_queries else (ROWS, size)
    q_anchor, q_depth, q_document = queries.reshape(3, -1, 1, q_size)
    anchor, depth, document = keys.reshape(3, 1, -1, k_size)
    low, high = (functools.partial(bound, axis=-1) for bound in (jnp.min, jnp.max))

    real = low(jnp.where(depth == 0, anchor, FAR)) <= high(q_anchor)
    whole = (high(depth) == 0) & (high(anchor) <= low(q_anchor))  # [tiles of queries, of keys]
    if window is not None:
        passed = q_anchor + q_depth - window
        real &= high(jnp.where(depth == 0, anchor, -FAR)) > low(passed)
        whole &= low(anchor) > high(passed)
    chain = (low(anchor) <= high(q_anchor)) & (high(anchor) >= low(q_anchor))
    chain &= low(depth) <= high(q_depth)

    def shared(*counted: jax.Array) -> jax.Array:
        lows = [low(jnp.where(c, x, FAR)) for c, x in zip(counted, documents, strict=True)]
        highs = [high(jnp.where(c, x, -FAR)) for c, x in zip(counted, documents, strict=True)]
        return (lows[0] <= highs[1]) & (lows[1] <= highs[0])

    documents = q_document, document
    # Rows of padding have negative documents: between these and others there is nothing to share.
    needed = shared(q_document >= 0, document >= 0)
    needed |= shared(*((x < 0) & (x > NO_KEY) for x in documents))
    needed &= real | chain
    whole &= (low(q_document) == high(document)) & (high(q_document) == low(document))
    if of_queries:
        needed, whole = needed.T, whole.T
    order = jnp.argsort(~needed, axis=1, stable=True)
    listed = 2 * order + jnp.take_along_axis(whole, order, axis=1)
    return listed.astype(jnp.int32), jnp.sum(needed, axis=1, dtype=jnp.int32)


class Layouts:
    """Where a warpgroup's registers hold what."""

    def __init__(self, dtype: jnp.dtype):
        self.left: Any = plgpu.Layout.MMA_LHS(dtype)
        self.right: Any = plgpu.Layout.MMA_RHS(dtype)
        self.acc: Any = plgpu.Layout.MMA_ACC(dtype)
        self.row: Any = self.acc.reduce(1)
        self.column: Any = self.acc.reduce(0)

    def spread(self, vector: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
        """Repeats a vector along the other axis."""
        return plgpu.layout_cast(lax.broadcast_in_dim(vector, shape, [axis]), self.acc)

    def lefts(self, ref: Ref) -> jax.Array:
        return plgpu.load(ref, layout=self.left, optimized=False)

    def rights(self, ref: Ref) -> jax.Array:
        return plgpu.load(ref, layout=self.right, optimized=False)

    def rows(self, ref: Ref) -> jax.Array:
        return plgpu.load(ref, layout=self.row, optimized=False)

    def columns(self, ref: Ref) -> jax.Array:
        return plgpu.load(ref, layout=self.column, optimized=False)


def seen_scores(
    scores: jax.Array,
    queries: list[jax.Array],
    keys: list[jax.Array],
    query_axis: int,
    window: int | None,
    whole: jax.Array,
    layouts: Layouts,
) -> jax.Array:
    """Returns the scores `[ROWS, size]` in units of ln 2, `UNSEEN` where the rule says so."""

    def masked(scores: jax.Array) -> jax.Array:
        def spread(vector: jax.Array, axis: int) -> jax.Array:
            return layouts.spread(vector, scores.shape, axis)

        q_anchor, q_depth, q_document = (spread(x, query_axis) for x in queries)
        anchor, depth, document = (spread(x, 1 - query_axis) for x in keys)
        real = (depth == 0) & (anchor <= q_anchor)
        if window is not None:
            real &= anchor > spread(queries[0] + queries[1] - window, query_axis)
        chain = (anchor == q_anchor) & (depth <= q_depth)
        seen = (q_document == document) & (real | chain)
        return jnp.where(seen, scores, UNSEEN)

    return lax.cond(whole, lambda scores: scores, masked, scores)


def through(scratch: Ref, values: jax.Array, layouts: Layouts) -> jax.Array:
    """Moves a result of products to where their left operand is, through shared memory."""
    plgpu.commit_smem()  # every warp has read what was there
    scratch[...] = values.astype(scratch.dtype)
    plgpu.commit_smem()
    return layouts.lefts(scratch)


def tile_size(head_dim: int) -> int:
    """Returns the rows of a tile that is streamed: as many as registers allow."""
    return 64 if head_dim <= 64 else 32


def streamed(steps: jax.Array, stages: int, fetch: Any, arrived: Ref, step: Any, start: Any) -> Any:
    """Runs `step(i, slot, carry)` over tiles that `fetch(i, slot)` brings, some ahead."""
    for i in range(stages):
        pl.when(i < steps)(functools.partial(fetch, jnp.int32(i), i))

    def body(i: jax.Array, carry: Any) -> Any:
        slot = lax.rem(i, jnp.int32(stages))
        plgpu.barrier_wait(arrived.at[slot])
        carry = step(i, slot, carry)
        plgpu.commit_smem()  # every warp has read the slot
        pl.when(i + stages < steps)(functools.partial(fetch, i + stages, slot))
        return carry

    return lax.fori_loop(0, steps, body, start)
