"""The schedule of a mixture of experts: which expert multiplies which rows when.

`benchmarks/experts.py` measures it against `jax.lax.ragged_dot` and the product with all experts.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from peagle_jax.kernels.linear import linear

# (rows [T, in], weight [out, in]) -> [T, out]
Product = Callable[[jax.Array, jax.Array], jax.Array]
# (index of an expert [], rows [T, H], product) -> the expert's output [T, H]
Expert = Callable[[jax.Array, jax.Array, Product], jax.Array]

# Rows that an expert multiplies at a time: at most these, at least those.
MAX_BLOCK, MIN_BLOCK = 128, 8


def mix_experts(
    rows: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    num_experts: int,
    expert: Expert,
) -> jax.Array:
    """Returns the weighted sum of each row's experts.

    There are two schedules, chosen by platform and by the (static) number of pairs:

    - Blocks, on CPU and for many rows: the pairs of row and expert are sorted by expert and cut
      into blocks of one expert each, and a loop runs over the blocks. Each expert in use is read
      once (or once per block), no other is touched. XLA makes of `ragged_dot` a masked product of
      every row with every expert.
    - Pairs, for few rows on GPU: every pair by itself, as a sum of products that XLA fuses with
      the reading (and unpacking) of its expert's weights. A loop would cost several launches per
      expert there. An expert that several rows chose is read for each of them, which is why more
      pairs than experts take the blocks.

    Args:
      rows: `[R, H]`.
      chosen: `[R, k]` int32, the experts of each row, all different.
      weights: `[R, k]`, in the dtype of `rows`.
      num_experts: E.
      expert: computes one expert for a few rows.

    Returns:
      `[R, H]` in the dtype of `rows`.
    """
    pairs = chosen.shape[0] * chosen.shape[1]
    if pairs > num_experts:
        out = _by_block(rows, chosen, num_experts, expert)  # [R, k, H]
    else:
        out = jax.lax.platform_dependent(
            rows,
            chosen,
            cpu=lambda rows, chosen: _by_block(rows, chosen, num_experts, expert),
            default=lambda rows, chosen: _by_pair(rows, chosen, expert),
        )
    return jnp.einsum("rkh,rk->rh", out, weights, precision="highest")


def _by_pair(rows: jax.Array, chosen: jax.Array, expert: Expert) -> jax.Array:
    """Returns the output of every pair `[R, k, H]`, each computed by itself."""

    def one(row: jax.Array, index: jax.Array) -> jax.Array:  # [H], [] -> [H]
        return expert(index, row[None], _summed)[0]

    of_row = jax.vmap(one, in_axes=(None, 0))
    return jax.vmap(of_row)(rows, chosen)


def _summed(rows: jax.Array, weight: jax.Array) -> jax.Array:
    wide = weight.astype(jnp.float32) * rows.astype(jnp.float32)  # [out, in] for one row
    return jnp.sum(wide, axis=-1)[None].astype(rows.dtype)


def _by_block(rows: jax.Array, chosen: jax.Array, num_experts: int, expert: Expert) -> jax.Array:
    """Returns the output of every pair `[R, k, H]`, block by block of one expert's pairs."""
    (num_rows, hidden), k = rows.shape, chosen.shape[1]
    pairs = num_rows * k
    size = _block_size(num_rows, pairs, num_experts)
    most = min(num_experts, pairs) + pairs // size  # every expert in use may end a block early

    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)  # [P], pairs by expert
    counts = jnp.sum(flat[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)  # [E]
    starts = jnp.cumsum(counts) - counts  # in the order
    ends = jnp.cumsum(-(-counts // size))  # in blocks
    firsts = ends - -(-counts // size)

    block = jnp.arange(most, dtype=jnp.int32)
    expert_of = jnp.searchsorted(ends, block, side="right").astype(jnp.int32)
    expert_of = jnp.minimum(expert_of, jnp.max(flat))  # blocks past the last
    # Places of a block past its expert's pairs repeat some row; nobody reads what comes of it.
    rank = (block - firsts[expert_of])[:, None] * size + jnp.arange(size)  # [most, size]
    row_of = order[jnp.minimum(starts[expert_of][:, None] + rank, pairs - 1)] // k

    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        done = expert(expert_of[i], rows[row_of[i]], linear)  # [size, H]
        return jax.lax.dynamic_update_slice(out, done, (i * size, 0))

    # A count that is known beforehand spares a GPU the wait for it in every step.
    steps = jax.lax.platform_dependent(
        ends[-1], cpu=lambda used: used, default=lambda _: jnp.int32(most)
    )
    # Zeros of its own: else XLA shares one array among all layers, keeps it and copies it in each.
    zero, rows = jax.lax.optimization_barrier((jnp.zeros((), rows.dtype), rows))
    out = jnp.broadcast_to(zero, (most * size, hidden))
    out = jax.lax.fori_loop(0, steps, step, out)
    place = firsts[flat] * size + jnp.argsort(order) - starts[flat]  # [P]
    return out[place].reshape(num_rows, k, hidden)


def _block_size(num_rows: int, pairs: int, num_experts: int) -> int:
    """Returns the pairs of a block: about as many as an expert has, but no tiny products."""
    mean = -(-pairs // num_experts)
    return min(num_rows, MAX_BLOCK, max(MIN_BLOCK, 1 << (mean - 1).bit_length()))
