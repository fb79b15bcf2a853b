"""Attention among the elements of a packed row, for training: forward and backward in Pallas.

Who sees whom follows from three numbers of a row, its anchor, depth and document: the rule is
`peagle_jax.training.mask.sees`, and the kernels apply it to the scores in registers. No mask is
ever in memory.

Tiling. A warpgroup keeps 64 rows (queries for the output and for dQ, keys for dK and dV) and
streams tiles of the others through a ring of slots in shared memory by TMA, of 32 rows, or 64 keys
of head size 64. Which tiles it needs is worked out beforehand, by XLA, from the bounds of every
tile's anchors, depths and documents: tiles in which nobody sees anybody are not read, and where
everybody sees everybody no score is masked. The elements come by depth and then by anchor, so most
tiles of the deeper rows are among the former. Warpgroups: `N T / 64` for the output and for dQ,
`N_kv S / 64` for dK and dV, each of which goes through all query heads of its group, so that
nothing is added in memory.

Backward. The probabilities are made again from the scores and the rows' log-sum-exp, `[N, T]`
float32, as in FlashAttention-2: five products in two kernels that make the scores twice.

Bound. With A pairs of rows in the tiles that are read (about `T S / 2` of the real rows of a single
document; deeper rows see their context and few rows more) FLOPs are `4 N A D` forward and
`14 N A D` backward. Bytes from memory are those of queries, keys, values, output and gradients;
from the L2 cache a tile of 64 rows reads its keys and values, `4 N A D / 64` bytes forward, or 64
FLOPs per byte. So the tensor cores bound it, at what `mma.sync` reaches of their peak (on Hopper up
to two thirds, on Blackwell less), and in masked tiles the integer units: the rule takes about 8
instructions for a score, as long as the two products of head size 64. None of this was measured.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from peagle_jax.kernels.cod_gradients import key_slopes, query_slope
from peagle_jax.kernels.cod_tiles import (
    LOG2E,
    LOWEST,
    NO_KEY,
    NO_QUERY,
    ROWS,
    Layouts,
    Ref,
    filled_up,
    seen_scores,
    streamed,
    through,
    tile_size,
    tiles,
)
from peagle_jax.kernels.mosaic import Interpret, devices_serve, filled, interpreter, matrices, mma

STAGES = 2


def cod_attention_serves(queries: jax.Array) -> bool:
    """Returns whether GPUs take the kernels for such queries, and those that are there can."""
    fits = queries.shape[-1] in (64, 128) and queries.dtype in (jnp.bfloat16, jnp.float16)
    return fits and devices_serve()


def cod_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    query_rows: jax.Array,
    key_rows: jax.Array,
    window: int | None = None,
    interpret: Interpret = False,
) -> jax.Array:
    """Attention where a row sees its document's real rows up to its anchor, and its own chain.

    Args:
      queries: `[T, N, D]`, bfloat16 or float16; D is 64 or 128. Interpret mode takes float32 too,
        and any D that is a multiple of 16.
      keys: `[N_kv, S, D]`; query head n reads head `n // (N / N_kv)`.
      values: `[N_kv, S, D]`.
      query_rows: `[3, T]` int32: anchors, depths, documents.
      key_rows: `[3, S]` int32.
      window: of the layer, or None.
      interpret: run on a CPU.

    Returns:
      `[T, N, D]` in the dtype of `queries`; zeros for rows that see nothing. It has a derivative
      with respect to queries, keys and values.
    """
    length, (_, slots, _) = queries.shape[0], keys.shape
    ends = -length % ROWS, -slots % ROWS
    queries = jnp.pad(queries, ((0, ends[0]), (0, 0), (0, 0)))
    keys, values = (jnp.pad(x, ((0, 0), (0, ends[1]), (0, 0))) for x in (keys, values))
    query_rows = filled_up(query_rows, ends[0], NO_QUERY)
    key_rows = filled_up(key_rows, ends[1], NO_KEY)
    return _attention(window, interpret, queries, keys, values, query_rows, key_rows)[:length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(window: int | None, interpret: Interpret, *arrays: jax.Array) -> jax.Array:
    return _forward(window, interpret, *arrays)[0]


def _attention_forward(
    window: int | None, interpret: Interpret, *arrays: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    out, log_sums = _forward(window, interpret, *arrays)
    return out, (*arrays, out, log_sums)


def _attention_backward(
    window: int | None, interpret: Interpret, kept: tuple[jax.Array, ...], slope: jax.Array
) -> tuple[jax.Array | None, ...]:
    queries, keys, values, query_rows, key_rows, out, log_sums = kept
    shares = jnp.sum(slope.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)  # [T, N]
    stats = jnp.stack([log_sums, shares.T], axis=1)  # [N, 2, T]
    arrays = queries, keys, values, query_rows, key_rows, slope, stats
    of_queries = query_slope(window, interpret, *arrays)
    return of_queries, *key_slopes(window, interpret, *arrays), None, None


_attention.defvjp(_attention_forward, _attention_backward)


def _forward(
    window: int | None,
    interpret: Interpret,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    query_rows: jax.Array,
    key_rows: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the output `[T, N, D]` and the log-sum-exps `[N, T]` in units of ln 2."""
    length, heads, head_dim = queries.shape
    group, dtype = heads // keys.shape[0], queries.dtype
    layouts, size = Layouts(dtype), tile_size(head_dim)
    listed, counts = tiles(query_rows, key_rows, size, window, of_queries=False)

    def kernel(
        q_ref: Ref,
        k_ref: Ref,
        v_ref: Ref,
        q_rows_ref: Ref,
        k_rows_ref: Ref,
        listed_ref: Ref,
        counts_ref: Ref,
        out_ref: Ref,
        highest_ref: Ref,
        total_ref: Ref,
        q_smem: Ref,
        k_smem: Ref,
        v_smem: Ref,
        rows_smem: Ref,
        weights_smem: Ref,
        highest_smem: Ref,
        total_smem: Ref,
        q_here: Ref,
        here: Ref,
    ) -> None:
        tile, head = lax.axis_index("tile"), lax.axis_index("head")
        rows = pl.ds(pl.multiple_of(tile * ROWS, ROWS), ROWS)
        kv = lax.div(head, jnp.int32(group))
        plgpu.copy_gmem_to_smem(q_ref.at[rows, head], q_smem, q_here)

        def fetch(i: jax.Array, slot: jax.Array | int) -> None:
            some = pl.ds(pl.multiple_of((listed_ref[tile, i] >> 1) * size, size), size)
            plgpu.copy_gmem_to_smem(k_ref.at[kv, some], k_smem.at[slot], here.at[slot])
            plgpu.copy_gmem_to_smem(v_ref.at[kv, some], v_smem.at[slot], here.at[slot])
            plgpu.copy_gmem_to_smem(k_rows_ref.at[:, some], rows_smem.at[slot], here.at[slot])

        own = [layouts.rows(q_rows_ref.at[i, rows]) for i in range(3)]
        plgpu.barrier_wait(q_here)

        def step(i: jax.Array, slot: jax.Array, carry: tuple[jax.Array, ...]) -> Any:
            acc, highest, total = carry
            scores = filled((ROWS, size), 0, layouts.acc)
            left, right = layouts.lefts(q_smem), layouts.rights(k_smem.at[slot].T)
            scores = mma(scores, left, right, interpret) * (head_dim**-0.5 * LOG2E)
            others = [layouts.columns(rows_smem.at[slot, i]) for i in range(3)]
            whole = (listed_ref[tile, i] & 1) == 1
            scores = seen_scores(scores, own, others, 0, window, whole, layouts)
            higher = jnp.maximum(highest, scores.max(axis=1))
            weights = jnp.exp2(scores - layouts.spread(higher, scores.shape, 0))
            shrink = jnp.exp2(highest - higher)
            acc = acc * layouts.spread(shrink, acc.shape, 0)
            left = through(weights_smem, weights, layouts)
            acc = mma(acc, left, layouts.rights(v_smem.at[slot]), interpret)
            return acc, higher, total * shrink + weights.sum(axis=1)

        start = (
            filled((ROWS, head_dim), 0, layouts.acc),
            filled((ROWS,), LOWEST, layouts.row),
            filled((ROWS,), 0, layouts.row),
        )
        acc, highest, total = streamed(counts_ref[tile], STAGES, fetch, here, step, start)
        scale = 1 / jnp.where(total > 0, total, 1.0)
        plgpu.commit_smem()
        q_smem[...] = (acc * layouts.spread(scale, acc.shape, 0)).astype(dtype)
        highest_smem[...] = highest
        total_smem[...] = total
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_smem, out_ref.at[rows, head])
        plgpu.copy_smem_to_gmem(highest_smem, highest_ref.at[head, rows])
        plgpu.copy_smem_to_gmem(total_smem, total_ref.at[head, rows])
        plgpu.wait_smem_to_gmem(0)

    sums = jax.ShapeDtypeStruct((heads, length), jnp.float32)
    out, highest, total = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(queries.shape, dtype), sums, sums],
        scratch_types=[
            matrices((ROWS, head_dim), dtype),
            matrices((STAGES, size, head_dim), dtype),
            matrices((STAGES, size, head_dim), dtype),
            plgpu.SMEM((STAGES, 3, size), jnp.int32),
            matrices((ROWS, size), dtype),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=STAGES, num_arrivals=3),
        ],
        grid=(length // ROWS, heads),
        grid_names=("tile", "head"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpreter(interpret),
    )(queries, keys, values, query_rows, key_rows, listed, counts)
    return out, jnp.where(total > 0, highest + jnp.log2(total), 0)
