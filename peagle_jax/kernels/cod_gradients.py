"""The gradients of `cod_attention`: one kernel for dQ, one for dK and dV.

Both make a tile's scores again and from them, with the rows' log-sum-exps, the weights of the
softmax. `cod_attention` says how they are tiled and what bounds them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from peagle_jax.kernels.cod_tiles import (
    LOG2E,
    ROWS,
    Layouts,
    Ref,
    seen_scores,
    streamed,
    through,
    tile_size,
    tiles,
)
from peagle_jax.kernels.mosaic import Interpret, filled, interpreter, matrices, mma

STAGES = 2
# Queries that are streamed for dK and dV, whose sums leave no registers for more.
QUERY_TILE = 32


def query_slope(
    window: int | None,
    interpret: Interpret,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    query_rows: jax.Array,
    key_rows: jax.Array,
    slopes: jax.Array,
    stats: jax.Array,
) -> jax.Array:
    """Returns dQ `[T, N, D]`.

    Args:
      window: of the layer, or None.
      interpret: run on a CPU.
      queries: `[T, N, D]`, T a multiple of `ROWS`.
      keys: `[N_kv, S, D]`, S a multiple of `ROWS`.
      values: `[N_kv, S, D]`.
      query_rows: `[3, T]` int32: anchors, depths, documents.
      key_rows: `[3, S]` int32.
      slopes: `[T, N, D]`, of the output.
      stats: `[N, 2, T]` float32, the log-sum-exps and the sums of output times slope.
    """
    length, heads, head_dim = queries.shape
    group, dtype = heads // keys.shape[0], queries.dtype
    layouts, size = Layouts(dtype), tile_size(head_dim)
    listed, counts = tiles(query_rows, key_rows, size, window, of_queries=False)

    def kernel(
        q_ref: Ref,
        k_ref: Ref,
        v_ref: Ref,
        slope_ref: Ref,
        stats_ref: Ref,
        q_rows_ref: Ref,
        k_rows_ref: Ref,
        listed_ref: Ref,
        counts_ref: Ref,
        out_ref: Ref,
        q_smem: Ref,
        slope_smem: Ref,
        k_smem: Ref,
        v_smem: Ref,
        rows_smem: Ref,
        scratch: Ref,
        own_here: Ref,
        here: Ref,
    ) -> None:
        tile, head = lax.axis_index("tile"), lax.axis_index("head")
        rows = pl.ds(pl.multiple_of(tile * ROWS, ROWS), ROWS)
        kv = lax.div(head, jnp.int32(group))
        plgpu.copy_gmem_to_smem(q_ref.at[rows, head], q_smem, own_here)
        plgpu.copy_gmem_to_smem(slope_ref.at[rows, head], slope_smem, own_here)

        def fetch(i: jax.Array, slot: jax.Array | int) -> None:
            some = pl.ds(pl.multiple_of((listed_ref[tile, i] >> 1) * size, size), size)
            plgpu.copy_gmem_to_smem(k_ref.at[kv, some], k_smem.at[slot], here.at[slot])
            plgpu.copy_gmem_to_smem(v_ref.at[kv, some], v_smem.at[slot], here.at[slot])
            plgpu.copy_gmem_to_smem(k_rows_ref.at[:, some], rows_smem.at[slot], here.at[slot])

        own = [layouts.rows(q_rows_ref.at[i, rows]) for i in range(3)]
        log_sums, shares = (layouts.rows(stats_ref.at[head, i, rows]) for i in range(2))
        plgpu.barrier_wait(own_here)

        def step(i: jax.Array, slot: jax.Array, acc: jax.Array) -> jax.Array:
            zeros = filled((ROWS, size), 0, layouts.acc)
            left, right = layouts.lefts(q_smem), layouts.rights(k_smem.at[slot].T)
            scores = mma(zeros, left, right, interpret) * (head_dim**-0.5 * LOG2E)
            others = [layouts.columns(rows_smem.at[slot, i]) for i in range(3)]
            whole = (listed_ref[tile, i] & 1) == 1
            scores = seen_scores(scores, own, others, 0, window, whole, layouts)
            weights = jnp.exp2(scores - layouts.spread(log_sums, scores.shape, 0))
            left, right = layouts.lefts(slope_smem), layouts.rights(v_smem.at[slot].T)
            of_weights = mma(zeros, left, right, interpret)
            of_scores = weights * (of_weights - layouts.spread(shares, scores.shape, 0))
            left = through(scratch, of_scores, layouts)
            return mma(acc, left, layouts.rights(k_smem.at[slot]), interpret)

        start = filled((ROWS, head_dim), 0, layouts.acc)
        acc = streamed(counts_ref[tile], STAGES, fetch, here, step, start)
        plgpu.commit_smem()
        q_smem[...] = (acc * head_dim**-0.5).astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem, out_ref.at[rows, head])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(queries.shape, dtype),
        scratch_types=[
            matrices((ROWS, head_dim), dtype),
            matrices((ROWS, head_dim), dtype),
            matrices((STAGES, size, head_dim), dtype),
            matrices((STAGES, size, head_dim), dtype),
            plgpu.SMEM((STAGES, 3, size), jnp.int32),
            matrices((ROWS, size), dtype),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_barriers=STAGES, num_arrivals=3),
        ],
        grid=(length // ROWS, heads),
        grid_names=("tile", "head"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpreter(interpret),
    )(queries, keys, values, slopes, stats, query_rows, key_rows, listed, counts)


def key_slopes(
    window: int | None,
    interpret: Interpret,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    query_rows: jax.Array,
    key_rows: jax.Array,
    slopes: jax.Array,
    stats: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns dK and dV `[N_kv, S, D]`; the arguments are those of `query_slope`."""
    heads, (kv_heads, slots, head_dim) = queries.shape[1], keys.shape
    group, dtype = heads // kv_heads, queries.dtype
    layouts, size = Layouts(dtype), QUERY_TILE
    listed, counts = tiles(query_rows, key_rows, size, window, of_queries=True)

    def kernel(
        q_ref: Ref,
        k_ref: Ref,
        v_ref: Ref,
        slope_ref: Ref,
        stats_ref: Ref,
        q_rows_ref: Ref,
        k_rows_ref: Ref,
        listed_ref: Ref,
        counts_ref: Ref,
        k_out: Ref,
        v_out: Ref,
        k_smem: Ref,
        v_smem: Ref,
        q_smem: Ref,
        slope_smem: Ref,
        stats_smem: Ref,
        rows_smem: Ref,
        scratch: Ref,
        own_here: Ref,
        here: Ref,
    ) -> None:
        tile, kv = lax.axis_index("tile"), lax.axis_index("head")
        rows = pl.ds(pl.multiple_of(tile * ROWS, ROWS), ROWS)
        plgpu.copy_gmem_to_smem(k_ref.at[kv, rows], k_smem, own_here)
        plgpu.copy_gmem_to_smem(v_ref.at[kv, rows], v_smem, own_here)

        def fetch(i: jax.Array, slot: jax.Array | int) -> None:
            index, head = listed_ref[tile, lax.div(i, jnp.int32(group))] >> 1, kv * group
            head = head + lax.rem(i, jnp.int32(group))
            some = pl.ds(pl.multiple_of(index * size, size), size)
            plgpu.copy_gmem_to_smem(q_ref.at[some, head], q_smem.at[slot], here.at[slot])
            plgpu.copy_gmem_to_smem(slope_ref.at[some, head], slope_smem.at[slot], here.at[slot])
            plgpu.copy_gmem_to_smem(stats_ref.at[head, :, some], stats_smem.at[slot], here.at[slot])
            plgpu.copy_gmem_to_smem(q_rows_ref.at[:, some], rows_smem.at[slot], here.at[slot])

        own = [layouts.rows(k_rows_ref.at[i, rows]) for i in range(3)]
        plgpu.barrier_wait(own_here)

        def step(i: jax.Array, slot: jax.Array, carry: tuple[jax.Array, jax.Array]) -> Any:
            of_keys, of_values = carry
            zeros = filled((ROWS, size), 0, layouts.acc)
            left, right = layouts.lefts(k_smem), layouts.rights(q_smem.at[slot].T)
            scores = mma(zeros, left, right, interpret) * (head_dim**-0.5 * LOG2E)
            others = [layouts.columns(rows_smem.at[slot, i]) for i in range(3)]
            whole = (listed_ref[tile, lax.div(i, jnp.int32(group))] & 1) == 1
            scores = seen_scores(scores, others, own, 1, window, whole, layouts)
            log_sums, shares = (
                layouts.spread(layouts.columns(stats_smem.at[slot, i]), scores.shape, 1)
                for i in range(2)
            )
            weights = jnp.exp2(scores - log_sums)
            left = through(scratch, weights, layouts)
            of_values = mma(of_values, left, layouts.rights(slope_smem.at[slot]), interpret)
            left, right = layouts.lefts(v_smem), layouts.rights(slope_smem.at[slot].T)
            of_scores = weights * (mma(zeros, left, right, interpret) - shares)
            left = through(scratch, of_scores, layouts)
            return mma(of_keys, left, layouts.rights(q_smem.at[slot]), interpret), of_values

        start = filled((ROWS, head_dim), 0, layouts.acc)
        steps = counts_ref[tile] * group
        of_keys, of_values = streamed(steps, STAGES, fetch, here, step, (start, start))
        plgpu.commit_smem()
        k_smem[...] = (of_keys * head_dim**-0.5).astype(dtype)
        v_smem[...] = of_values.astype(dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k_smem, k_out.at[kv, rows])
        plgpu.copy_smem_to_gmem(v_smem, v_out.at[kv, rows])
        plgpu.wait_smem_to_gmem(0)

    of_keys, of_values = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(keys.shape, dtype)] * 2,
        scratch_types=[
            matrices((ROWS, head_dim), dtype),
            matrices((ROWS, head_dim), dtype),
            matrices((STAGES, size, head_dim), dtype),
            matrices((STAGES, size, head_dim), dtype),
            plgpu.SMEM((STAGES, 2, size), jnp.float32),
            plgpu.SMEM((STAGES, 3, size), jnp.int32),
            matrices((ROWS, size), dtype),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_barriers=STAGES, num_arrivals=4),
        ],
        grid=(slots // ROWS, kv_heads),
        grid_names=("tile", "head"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpreter(interpret),
    )(queries, keys, values, slopes, stats, query_rows, key_rows, listed, counts)
    return of_keys, of_values
