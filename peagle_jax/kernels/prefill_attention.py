"""Attention of many query rows per sequence, a prompt's: a Mosaic GPU kernel.

It serves a prompt's first pass, whose keys are those of its rows, and the passes after it, whose
rows see what is cached too.

**Tiling.** A kernel instance takes 128 rows of one query head, 64 for each of two warpgroups, which
share the blocks of 32 keys and values that TMA brings, three at a time under way. Blocks that no
row of the tile sees, by causality, its window or its sequence's end, are not read; others are
masked value by value, which costs little beside the products. Queries and outputs keep their
layout `[B, T, N, D]`; neighbouring instances are heads of the same rows and so of the same keys.

**What bounds it.** The tensor cores' instruction. With v_t keys visible to row t, per call

    FLOPs = 4 N D sum over sequences and rows of v_t (2 N D T^2 per sequence without a window)
    bytes = 2 B T N D itemsize + 2 B N_kv S D itemsize from memory, and
            2 N D itemsize (sum of v_t) / 128 through the L2 cache

or 128 FLOPs per byte from L2 in bfloat16. Time is at least `FLOPs / peak`; `mma.sync`, the one
instruction that Hopper and Blackwell share, reaches somewhat more than half of the peak of `wgmma`
on Hopper and less of that of `tcgen05` on Blackwell, and the weights' way through shared memory
costs some more. A body for each of the two would remove that; nothing here has been timed on a GPU.

cuDNN's attention (`jax.nn.dot_product_attention(implementation="cudnn")`) has those bodies, and
could take the first pass of models without sinks. It is not used yet: whether it wins is not
decided until `benchmarks/gpu.py`, which times it beside this kernel, has run on a card. It has
neither sinks nor a circle of slots, so GPT-OSS and every later pass would need this kernel anyway.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from peagle_jax.kernels.flash import LOG2E, ROWS, Ref, Seen, Stream, attend, split
from peagle_jax.kernels.mosaic import Interpret, interpreter, matrices

WARPGROUPS = 2  # of 64 rows each, which share what is read of keys and values
BLOCK = 32  # slots
STAGES = 3


def prefill_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    first: jax.Array,
    base: jax.Array,
    counts: jax.Array | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
    *,
    interpret: Interpret = False,
) -> jax.Array:
    """Returns what `attention` does, of a block of a prompt's rows.

    Args:
      queries: `[B, T, N, D]` bfloat16 or float16; D is 64 or 128. (Interpret mode takes float32 and
        other multiples of 16 too.)
      keys: `[B, N_kv, S, D]` in the same dtype, a circle of slots (`flash`) that ends with the last
        row's: those of the rows alone (S = T), or with what was cached before them. A T or an S
        that is no multiple of 8 costs a copy.
      values: `[B, N_kv, S, D]`, likewise. What lies in slots that no row sees has no influence.
      first: `[B]` int32, position of each sequence's first row; the others follow it.
      base: `[B]` int32, position of slot 0: `first` where the keys are those of the rows, 0 in a
        cache whose slots are positions.
      counts: `[B]` int32, rows of each sequence that are its prompt's; None for all T. The keys of
        other rows are not read; what comes of these rows is finite, and not specified.
      window: positions that a row sees, itself included; None for all.
      sinks: `[N]`, one logit per query head that takes part in the softmax and has no value.
      interpret: run on a CPU.

    Returns:
      `[B, T, N, D]` in the dtype of `queries`; zeros for a row that sees nothing.
    """
    batch, length, heads, head_dim = queries.shape
    kv_heads, slots = keys.shape[1:3]
    group = heads // kv_heads
    queries = jnp.pad(queries, ((0, 0), (0, -length % 8), (0, 0), (0, 0)))
    keys, values = (jnp.pad(x, ((0, 0), (0, 0), (0, -slots % 8), (0, 0))) for x in (keys, values))
    if counts is None:
        counts = jnp.full((batch,), length, jnp.int32)
    if sinks is None:
        sinks = jnp.full((heads,), -jnp.inf)
    tile_rows = WARPGROUPS * ROWS
    tiles = -(-length // tile_rows)

    def kernel(
        q_ref: Ref,
        k_ref: Ref,
        v_ref: Ref,
        first_ref: Ref,
        base_ref: Ref,
        counts_ref: Ref,
        sinks_ref: Ref,
        out_ref: Ref,
        q_smem: Ref,
        k_smem: Ref,
        v_smem: Ref,
        weights_smem: Ref,
        q_here: Ref,
        k_here: Ref,
        v_here: Ref,
        free: Ref,
    ) -> None:
        b, cell, n = (lax.axis_index(name) for name in ("batch", "tile", "head"))
        warpgroup = lax.axis_index("warpgroup")
        start = (tiles - 1 - cell) * tile_rows  # tiles that see much come first
        position = first_ref[b]
        newest = position + (length - 1)
        low = position + start
        high = position + jnp.minimum(start + tile_rows, counts_ref[b]) - 1
        seen = Seen.by_rows(low, high, base_ref[b], newest, slots, window)
        begin, blocks = split(seen, BLOCK, jnp.int32(0), 1)
        blocks = jnp.where(high < low, 0, blocks)
        kv = lax.div(n, jnp.int32(group))
        stream = Stream(
            k_ref.at[b, kv], v_ref.at[b, kv], k_smem, v_smem, k_here, v_here, free, warpgroup == 0
        )
        begin_row = start + warpgroup * ROWS
        rows = pl.ds(pl.multiple_of(begin_row, ROWS), ROWS)
        own, own_here = q_smem.at[warpgroup], q_here.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[b, rows, n], own, own_here)
        stream.start(begin, blocks)
        plgpu.barrier_wait(own_here)

        def positions(row: jax.Array) -> jax.Array:
            return position + begin_row + row

        weights = weights_smem.at[warpgroup]
        sums, highest, totals = attend(
            own, weights, stream, seen, positions, begin, blocks, interpret
        )
        sink = sinks_ref[n] * LOG2E
        top = jnp.maximum(highest, sink)
        shrink = jnp.exp2(highest - top)
        total = totals * shrink + jnp.exp2(sink - top)
        scale = shrink / jnp.where(total > 0, total, 1.0)
        out = sums * lax.broadcast_in_dim(scale, sums.shape, [0])
        own[...] = out.astype(own.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own, out_ref.at[b, rows, n])
        plgpu.wait_smem_to_gmem(0)

    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        scratch_types=[
            matrices((WARPGROUPS, ROWS, head_dim), queries.dtype),
            matrices((STAGES, BLOCK, head_dim), queries.dtype),
            matrices((STAGES, BLOCK, head_dim), queries.dtype),
            matrices((WARPGROUPS, ROWS, BLOCK), queries.dtype),
            plgpu.Barrier(num_barriers=WARPGROUPS),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES, num_arrivals=WARPGROUPS),
        ],
        grid=(batch, tiles, heads),
        grid_names=("batch", "tile", "head"),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        interpret=interpreter(interpret),
    )(queries, keys, values, first, base, counts, sinks.astype(jnp.float32))
    return out[:, :length]
