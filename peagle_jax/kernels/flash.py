"""A warpgroup's attention of its query rows over blocks of slots: the online softmax in kernels.

The keys of a sequence lie in a circle of slots: from slot 0 on the positions `base`, `base + 1`
and so on up to the newest row's, and in the slots after that one the positions from
`base - slots` on, as far as they are older. A cache whose slots are positions (base 0), the keys of
a prompt's own rows, and a ring are such circles.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from peagle_jax.kernels.mosaic import Interpret, filled, mma

ROWS = 64  # of a warpgroup at most: 4 warps with the 16 rows of an `mma.sync` each
LOG2E = math.log2(math.e)
NOTHING = -1e30  # the highest score of a row that has seen no key

Ref = Any  # of Pallas, whose types are private


@dataclasses.dataclass(frozen=True)
class Seen:
    """The slots that rows at some consecutive positions see, as scalars in the kernel.

    Attributes:
      base: position of slot 0.
      top: slot of the newest row.
      oldest: lowest position that any of the rows sees.
      first: no slot before this one is seen.
      end: nor this one or any after it.
      turned: slots behind the newest row's are seen, so some between `first` and `end` may not be.
      slots: S (static).
      window: positions that a row sees, itself included, or None (static).
    """

    base: jax.Array
    top: jax.Array
    oldest: jax.Array
    first: jax.Array
    end: jax.Array
    turned: jax.Array
    slots: int
    window: int | None

    @classmethod
    def by_rows(
        cls,
        low: jax.Array,
        high: jax.Array,
        base: jax.Array,
        newest: jax.Array,
        slots: int,
        window: int | None,
    ) -> "Seen":
        """Returns what rows at positions `low` to `high` see of a circle up to `newest`."""
        top = newest - base
        oldest = jnp.maximum(0, low + 1 - window if window else 0)
        turned = (top < slots - 1) & (oldest < base)
        first = jnp.where(turned, 0, jnp.maximum(oldest - base, 0))
        end = jnp.where(turned, slots, jnp.minimum(high - base + 1, slots))
        return cls(base, top, oldest, first, end, turned, slots, window)

    def mask(self, slots: jax.Array, rows: jax.Array) -> jax.Array:
        """Returns which slots are seen by rows at these positions, elementwise."""
        positions = self._positions(slots)
        mask = self.by_any(slots) & (positions <= rows)
        return mask & (positions > rows - self.window) if self.window else mask

    def by_any(self, slots: jax.Array) -> jax.Array:
        """Returns which slots are seen by any row, elementwise."""
        return (slots < self.end) & (self._positions(slots) >= self.oldest)

    def all_of(self, begin: jax.Array, block: int) -> jax.Array:
        """Returns whether it is certain that each slot of a block is seen by some row."""
        return ~self.turned & (begin >= self.first) & (begin + block <= self.end)

    def _positions(self, slots: jax.Array) -> jax.Array:
        return self.base + slots - jnp.where(slots > self.top, self.slots, 0)


def split(seen: Seen, block: int, part: jax.Array, parts: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first slot and the blocks of one of equal parts of what is seen."""
    size = jnp.int32(block)
    start = lax.div(seen.first, size) * size
    blocks = jnp.maximum(lax.div(seen.end - start + (size - 1), size), 0)
    share = lax.div(blocks + (parts - 1), jnp.int32(parts))
    return start + part * share * size, jnp.clip(blocks - part * share, 0, share)


@dataclasses.dataclass(frozen=True)
class Stream:
    """Keys and values on their way into shared memory: a queue of stages, filled by TMA.

    Attributes:
      keys, values: `[S, D]` in global memory, S a multiple of 8; TMA reads zeros past S.
      key_stages, value_stages: `[stages, block, D]` in shared memory.
      keys_here, values_here, stage_free: barriers, one a stage; on the last all warpgroups
        arrive that have read the stage.
      leader: whether this warpgroup starts the copies.
    """

    keys: Ref
    values: Ref
    key_stages: Ref
    value_stages: Ref
    keys_here: Ref
    values_here: Ref
    stage_free: Ref
    leader: jax.Array | bool

    def fetch(self, slot: jax.Array, stage: jax.Array | int) -> None:
        """Starts to copy the block that begins at `slot`."""
        block = self.key_stages.shape[1]
        rows = pl.ds(pl.multiple_of(slot, block), block)
        for source, target, here in (
            (self.keys, self.key_stages, self.keys_here),
            (self.values, self.value_stages, self.values_here),
        ):
            plgpu.copy_gmem_to_smem(source.at[rows], target.at[stage], here.at[stage])

    def start(self, first: jax.Array, blocks: jax.Array) -> None:
        """Fills the stages."""
        stages, block, _ = self.key_stages.shape
        for stage in range(stages):
            at = functools.partial(self.fetch, first + stage * block, stage)
            pl.when(self.leader & (stage < blocks))(at)


def attend(
    queries: Ref,
    weights: Ref,
    stream: Stream,
    seen: Seen,
    row_positions: Callable[[jax.Array], jax.Array],
    first: jax.Array,
    blocks: jax.Array,
    interpret: Interpret,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums values by the softmax of scores, without its denominator.

    Values of slots that no row sees are taken as zeros, whatever they are.

    Args:
      queries: `[R, D]` in shared memory, arrived. R is 64, or 32 or 16: then two or four warps
        share the rows, and each takes its part of the slots and of D.
      weights: `[R, block]` in shared memory, scratch: the weights leave the accumulator's layout
        for the left operand's through it.
      stream: started at `first`, for so many blocks.
      seen: what is visible.
      row_positions: from row numbers `[R, block]` to the rows' positions.
      first: the first block's slot, a multiple of the block.
      blocks: how many to read.
      interpret: in interpret mode.

    Returns:
      the sums `[R, D]` float32 in `Layout.MMA_ACC`; each row's highest score `[R]` in units of
      ln 2, `NOTHING` if it saw none; and the denominators `[R]`.
    """
    rows, head_dim = queries.shape
    stages, block, _ = stream.key_stages.shape
    dtype = jnp.dtype(queries.dtype)
    warps = rows // 16  # of the 4, along the rows; the others lie along the columns
    left, right, acc_layout = (
        layout(dtype, m_warps=warps)
        for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
    )
    row_layout = acc_layout.reduce(1)
    scale = head_dim**-0.5 * LOG2E
    shape = (rows, block)
    at = row_positions(plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=acc_layout))

    def body(step: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc, highest, total = carry
        stage = lax.rem(step, jnp.int32(stages))
        begin = first + step * block
        plgpu.barrier_wait(stream.keys_here.at[stage])
        q = plgpu.load(queries, layout=left, optimized=False)
        keys = plgpu.load(stream.key_stages.at[stage].T, layout=right, optimized=False)
        scores = mma(filled(shape, 0.0, acc_layout), q, keys, interpret) * scale
        slots = begin + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=acc_layout)
        mask = seen.mask(slots, at)
        scores = jnp.where(mask, scores, NOTHING)
        higher = jnp.maximum(highest, scores.max(axis=1))
        shrink = jnp.exp2(highest - higher)
        exps = jnp.exp2(scores - lax.broadcast_in_dim(higher, shape, [0]))
        exps = jnp.where(mask, exps, 0.0)
        total = total * shrink + exps.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])

        # Where warps share rows, the sums across them above had all of them wait for each other:
        # so all have read the weights of the block before.
        weights[...] = exps.astype(dtype)
        plgpu.barrier_wait(stream.values_here.at[stage])
        values = plgpu.load(stream.value_stages.at[stage], layout=right, optimized=False)
        whole = seen.all_of(begin, block)
        values = lax.cond(whole, lambda v: v, lambda v: cleared(v, begin), values)
        plgpu.commit_smem()  # weights are written, keys and values read
        plgpu.barrier_arrive(stream.stage_free.at[stage])
        acc = mma(acc, plgpu.load(weights, layout=left, optimized=False), values, interpret)

        @pl.when(stream.leader & (step + stages < blocks))
        def _refill() -> None:
            plgpu.barrier_wait(stream.stage_free.at[stage])
            stream.fetch(begin + stages * block, stage)

        return acc, higher, total

    def cleared(values: jax.Array, begin: jax.Array) -> jax.Array:
        slots = begin + plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=right)
        return jnp.where(seen.by_any(slots), values, jnp.zeros((), values.dtype))

    empty = (
        filled((rows, head_dim), 0.0, acc_layout),
        filled((rows,), NOTHING, row_layout),
        filled((rows,), 0.0, row_layout),
    )
    return lax.fori_loop(0, blocks, body, empty)
