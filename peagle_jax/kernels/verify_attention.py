"""Attention of a few query rows per sequence over a long KV cache: a Mosaic GPU kernel.

It serves a verification (K + 1 rows), plain decoding (one row), and the draft pass. That is 2K rows
at consecutive positions, of which each sees all that came before it: what is a token's row and what
a mask slot makes no difference here, so the draft pass needs no kernel of its own.

**Tiling.** The G = N / N_kv heads of a group and the T tokens are the rows of one product with
their KV head, so that keys and values are read once for all of them. T x G rows make tiles of 16,
32 or 64, filled evenly. A kernel instance, one warpgroup, takes one tile and one of P parts of the
slots that the sequence's rows see: the parts are equal whatever its length, and a window's are
within it. Blocks of 32 slots come by TMA, three at a time under way. The parts' sums are put
together in float32 outside, where the sinks join; with the products' operands in bfloat16, this
is what loses least.

**What bounds it.** Memory. With s slots seen in each sequence and r = T G rows, per call

    bytes = B N_kv (2 s D itemsize + P r (D + 2) 4 * 2) + 2 B T N D itemsize
    FLOPs = 4 B N_kv R s D, R = r filled up to the tiles

which is 2 R / itemsize FLOPs per byte of the cache, 16 to 64 in bfloat16 for one tile; an H200
can do 206 (989 TFLOP/s, 4.8 TB/s) and `mma.sync` somewhat more than half of that, a B200 290. More
than 64 rows are more tiles, which find keys and values in the L2 cache. Time is at least
`bytes / bandwidth`. Nothing here has been timed on a GPU.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from peagle_jax.kernels.flash import LOG2E, ROWS, Ref, Seen, Stream, attend, split
from peagle_jax.kernels.mosaic import Interpret, interpreter, matrices

BLOCK = 32  # slots
STAGES = 3
# Kernel instances that fill a device: two and more fit on each of its 132 (H200) or 148 (B200)
# multiprocessors.
INSTANCES = 264
SHORTEST_PART = 256  # slots; a shorter part would spend more on its partial sums than it saves


def verify_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    first: jax.Array,
    base: jax.Array,
    window: int | None = None,
    sinks: jax.Array | None = None,
    *,
    parts: int | None = None,
    interpret: Interpret = False,
) -> jax.Array:
    """Returns what `attention` does, of a block of rows whose keys the cache holds.

    Args:
      queries: `[B, T, N, D]` bfloat16 or float16; D is 64 or 128. (Interpret mode takes float32 and
        other multiples of 16 too.)
      keys: `[B, N_kv, S, D]` in the same dtype, a circle of slots (`flash`) that ends with the last
        row's. An S that is no multiple of 8 costs a copy.
      values: `[B, N_kv, S, D]`, likewise. What lies in slots that no row sees has no influence.
      first: `[B]` int32, position of each sequence's first row; the others follow it.
      base: `[B]` int32, position of slot 0: 0 in a cache whose slots are positions.
      window: positions that a row sees, itself included; None for all.
      sinks: `[N]`, one logit per query head that takes part in the softmax and has no value.
      parts: P; None for as many as fill a device.
      interpret: run on a CPU.

    Returns:
      `[B, T, N, D]` in the dtype of `queries`; zeros for a row that sees nothing.
    """
    batch, length, heads, head_dim = queries.shape
    kv_heads, slots = keys.shape[1:3]
    group = heads // kv_heads
    keys, values = (jnp.pad(x, ((0, 0), (0, 0), (0, -slots % 8), (0, 0))) for x in (keys, values))

    # The heads of a group are rows of tiles of 64, filled evenly.
    rows = length * group
    tiles = -(-rows // ROWS)
    live = -(-rows // (8 * tiles)) * 8
    height = next(h for h in (16, 32, 64) if h >= live)
    folded = queries.reshape(batch, length, kv_heads, group, head_dim).swapaxes(1, 2)
    folded = folded.reshape(batch, kv_heads, rows, head_dim)
    folded = jnp.pad(folded, ((0, 0), (0, 0), (0, tiles * live - rows), (0, 0)))
    folded = folded.reshape(batch, kv_heads, tiles, live, head_dim)
    folded = jnp.pad(folded, ((0, 0), (0, 0), (0, 0), (0, height - live), (0, 0)))

    if parts is None:
        wanted = INSTANCES // (batch * kv_heads * tiles)  # rounded down: no second wave of few
        parts = max(1, min(wanted, slots // SHORTEST_PART))

    def kernel(
        q_ref: Ref,
        k_ref: Ref,
        v_ref: Ref,
        first_ref: Ref,
        base_ref: Ref,
        sums_ref: Ref,
        highest_ref: Ref,
        totals_ref: Ref,
        q_smem: Ref,
        k_smem: Ref,
        v_smem: Ref,
        weights_smem: Ref,
        sums_smem: Ref,
        highest_smem: Ref,
        totals_smem: Ref,
        q_here: Ref,
        k_here: Ref,
        v_here: Ref,
        free: Ref,
    ) -> None:
        b, n, cell = (lax.axis_index(name) for name in ("batch", "head", "cell"))
        tile, part = lax.div(cell, jnp.int32(parts)), lax.rem(cell, jnp.int32(parts))
        low = first_ref[b]
        high = low + (length - 1)
        seen = Seen.by_rows(low, high, base_ref[b], high, slots, window)
        begin, blocks = split(seen, BLOCK, part, parts)
        stream = Stream(k_ref.at[b, n], v_ref.at[b, n], k_smem, v_smem, k_here, v_here, free, True)
        plgpu.copy_gmem_to_smem(q_ref.at[b, n, tile], q_smem, q_here)
        stream.start(begin, blocks)
        plgpu.barrier_wait(q_here)

        def positions(row: jax.Array) -> jax.Array:  # rows past the last one are like it
            token = lax.div(row + tile * live, jnp.int32(group))
            return low + jnp.minimum(token, length - 1)

        sums, highest, totals = attend(
            q_smem, weights_smem, stream, seen, positions, begin, blocks, interpret
        )
        sums_smem[...] = sums
        highest_smem[...] = highest
        totals_smem[...] = totals
        plgpu.commit_smem()
        lived = pl.ds(0, live)
        at = b, n, tile, part
        plgpu.copy_smem_to_gmem(sums_smem.at[lived], sums_ref.at[at])
        plgpu.copy_smem_to_gmem(highest_smem.at[lived], highest_ref.at[at])
        plgpu.copy_smem_to_gmem(totals_smem.at[lived], totals_ref.at[at])
        plgpu.wait_smem_to_gmem(0)

    partial = (batch, kv_heads, tiles, parts, live)
    sums, highest, totals = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in ((*partial, head_dim), partial, partial)
        ],
        scratch_types=[
            matrices((height, head_dim), queries.dtype),
            matrices((STAGES, BLOCK, head_dim), queries.dtype),
            matrices((STAGES, BLOCK, head_dim), queries.dtype),
            matrices((height, BLOCK), queries.dtype),
            plgpu.SMEM((height, head_dim), jnp.float32),
            plgpu.SMEM((height,), jnp.float32),
            plgpu.SMEM((height,), jnp.float32),
            plgpu.Barrier(),
            *(plgpu.Barrier(num_barriers=STAGES) for _ in range(3)),
        ],
        grid=(batch, kv_heads, tiles * parts),
        grid_names=("batch", "head", "cell"),
        interpret=interpreter(interpret),
    )(folded, keys, values, first, base)
    out = _combine(sums, highest, totals, _sink_rows(sinks, length, kv_heads, tiles, live))
    out = out.reshape(batch, kv_heads, tiles * live, head_dim)[:, :, :rows]
    out = out.reshape(batch, kv_heads, length, group, head_dim).swapaxes(1, 2)
    return out.reshape(queries.shape).astype(queries.dtype)


def _sink_rows(
    sinks: jax.Array | None, length: int, kv_heads: int, tiles: int, live: int
) -> jax.Array | None:
    """Returns the sink of each row's head, `[N_kv, tiles, live]` in units of ln 2."""
    if sinks is None:
        return None
    logits = LOG2E * sinks.astype(jnp.float32).reshape(kv_heads, 1, -1)  # [N_kv, 1, G]
    logits = jnp.tile(logits, (1, length, 1)).reshape(kv_heads, -1)  # [N_kv, T G]
    logits = jnp.pad(logits, ((0, 0), (0, tiles * live - logits.shape[1])))
    return logits.reshape(kv_heads, tiles, live)


def _combine(
    sums: jax.Array, highest: jax.Array, totals: jax.Array, sinks: jax.Array | None
) -> jax.Array:
    """Returns the attention `[..., live, D]` of the parts' sums `[..., P, live, D]`.

    The parts' highest scores and denominators are `[..., P, live]`. The sink joins here, once.
    """
    top = highest.max(axis=-2)  # [..., live]
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    weights = jnp.exp2(highest - top[..., None, :])
    total = (totals * weights).sum(axis=-2)
    if sinks is not None:
        total = total + jnp.exp2(sinks - top)
    out = (sums * weights[..., None]).sum(axis=-3)
    return out / jnp.where(total > 0, total, 1.0)[..., None]
