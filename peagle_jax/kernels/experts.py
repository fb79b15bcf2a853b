"""The schedule of a mixture of experts: which expert multiplies which rows when.

`benchmarks/experts.py` measures it against `jax.lax.ragged_dot` and the product with all experts.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from peagle_jax.kernels.attention import Implementation
from peagle_jax.kernels.linear import linear
from peagle_jax.kernels.mosaic import Interpret, devices_serve

# (rows [T, in], weight [out, in]) -> [T, out]
Product = Callable[[jax.Array, jax.Array], jax.Array]
# (index of an expert [], rows [T, H], product) -> the expert's output [T, H]
Expert = Callable[[jax.Array, jax.Array, Product], jax.Array]

# (blocks, their rows [B, size, H], interpret) -> what the blocks' experts make of them [B, size, H]
PackedExperts = Callable[["Blocks", jax.Array, Interpret], jax.Array]

# Rows that an expert multiplies at a time: at most these, at least those.
MAX_BLOCK, MIN_BLOCK = 128, 8
# The same for a kernel that takes all blocks at once, and the rows for which it is used.
MAX_PACKED_BLOCK, PACKED_ROWS = 32, 64


def mix_experts(
    rows: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    num_experts: int,
    expert: Expert,
    packed: PackedExperts | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """Returns the weighted sum of each row's experts.

    There are three schedules, chosen by platform and by the (static) number of pairs:

    - Blocks, on CPU and for many rows: the pairs of row and expert are sorted by expert and cut
      into blocks of one expert each, and a loop runs over the blocks. Each expert in use is read
      once (or once per block), no other is touched. XLA makes of `ragged_dot` a masked product of
      every row with every expert.
    - Pairs, for few rows on GPU: every pair by itself, as a sum of products that XLA fuses with
      the reading (and unpacking) of its expert's weights. A loop would cost several launches per
      expert there. An expert that several rows chose is read for each of them, which is why more
      pairs than experts take the blocks.
    - All blocks at once, by a Pallas kernel, for up to `PACKED_ROWS` rows on GPU where there is one
      (`packed`). Every expert in use is read once, or by as many neighbours as it has blocks.

    "auto" takes the last where the program is lowered for CUDA and the GPUs that are there are
    Hoppers or data-centre Blackwells. "pallas" takes it on any platform and for any number of rows,
    on CPU in interpret mode, for tests; "xla" never.

    Args:
      rows: `[R, H]`.
      chosen: `[R, k]` int32, the experts of each row, all different.
      weights: `[R, k]`, in the dtype of `rows`.
      num_experts: E.
      expert: computes one expert for a few rows.
      packed: computes the experts of all blocks, by a kernel.
      implementation: "auto", "xla" or "pallas".

    Returns:
      `[R, H]` in the dtype of `rows`.

    Raises:
      ValueError: "pallas" without `packed`.
    """
    if implementation == "pallas" and packed is None:
        raise ValueError("no kernel computes these experts: only MXFP4 weights have one")
    by_block = functools.partial(_by_block, num_experts=num_experts, expert=expert)
    by_pair = functools.partial(_by_pair, expert=expert)

    def by_xla(rows: jax.Array, chosen: jax.Array) -> jax.Array:
        if chosen.size > num_experts:
            return by_block(rows, chosen)
        return jax.lax.platform_dependent(rows, chosen, cpu=by_block, default=by_pair)

    def by_kernel(interpret: bool) -> Callable[[jax.Array, jax.Array], jax.Array]:
        assert packed is not None
        return functools.partial(_at_once, num_experts, packed, interpret)

    few = rows.shape[0] <= PACKED_ROWS and devices_serve()
    if packed is None or implementation == "xla" or (implementation == "auto" and not few):
        out = by_xla(rows, chosen)  # [R, k, H]
    elif implementation == "auto":
        out = jax.lax.platform_dependent(rows, chosen, cuda=by_kernel(False), default=by_xla)
    else:
        out = by_kernel(jax.default_backend() == "cpu")(rows, chosen)
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


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Pairs of row and expert, sorted by expert and cut into blocks of one expert each.

    Attributes:
      experts: `[B]` int32, in rising order.
      rows: `[B, size]` int32, index of each place's row. Places past the pairs of a block's expert
        repeat some row; nobody reads what comes of it.
      used: `[]` int32, blocks that hold pairs, the first ones.
      places: `[R, k]` int32, the place of each pair among all `B size`.
    """

    experts: jax.Array
    rows: jax.Array
    used: jax.Array
    places: jax.Array

    @classmethod
    def of(cls, chosen: jax.Array, num_experts: int, size: int) -> "Blocks":
        """Returns the blocks of so many pairs for routes `[R, k]`."""
        pairs, k = chosen.size, chosen.shape[1]
        most = min(num_experts, pairs) + pairs // size  # every expert in use may end a block early

        flat = chosen.reshape(-1)
        order = jnp.argsort(flat, stable=True)  # [P], pairs by expert
        counts = jnp.sum(flat[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)  # [E]
        starts = jnp.cumsum(counts) - counts  # in the order
        ends = jnp.cumsum(-(-counts // size))  # in blocks
        firsts = ends - -(-counts // size)

        block = jnp.arange(most, dtype=jnp.int32)
        experts = jnp.searchsorted(ends, block, side="right").astype(jnp.int32)
        experts = jnp.minimum(experts, jnp.max(flat))  # blocks past the last
        rank = (block - firsts[experts])[:, None] * size + jnp.arange(size)  # [B, size]
        rows = order[jnp.minimum(starts[experts][:, None] + rank, pairs - 1)] // k
        places = firsts[flat] * size + jnp.argsort(order) - starts[flat]  # [P]
        return cls(experts, rows, ends[-1], places.reshape(chosen.shape))


def _by_block(rows: jax.Array, chosen: jax.Array, num_experts: int, expert: Expert) -> jax.Array:
    """Returns the output of every pair `[R, k, H]`, block by block of one expert's pairs."""
    size = _block_size(rows.shape[0], chosen.size, num_experts)
    blocks = Blocks.of(chosen, num_experts, size)
    most = blocks.experts.shape[0]

    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        done = expert(blocks.experts[i], rows[blocks.rows[i]], linear)  # [size, H]
        return jax.lax.dynamic_update_slice(out, done, (i * size, 0))

    # A count that is known beforehand spares a GPU the wait for it in every step.
    steps = jax.lax.platform_dependent(
        blocks.used, cpu=lambda used: used, default=lambda _: jnp.int32(most)
    )
    # Zeros of its own: else XLA shares one array among all layers, keeps it and copies it in each.
    zero, rows = jax.lax.optimization_barrier((jnp.zeros((), rows.dtype), rows))
    out = jnp.broadcast_to(zero, (most * size, rows.shape[1]))
    out = jax.lax.fori_loop(0, steps, step, out)
    return out[blocks.places]


def _at_once(
    num_experts: int,
    packed: PackedExperts,
    interpret: Interpret,
    rows: jax.Array,
    chosen: jax.Array,
) -> jax.Array:
    """Returns the output of every pair `[R, k, H]`, all blocks together."""
    blocks = Blocks.of(chosen, num_experts, _packed_size(rows.shape[0], chosen.size, num_experts))
    out = packed(blocks, rows[blocks.rows], interpret)  # [B, size, H]
    return out.reshape(-1, out.shape[-1])[blocks.places]


def _block_size(num_rows: int, pairs: int, num_experts: int) -> int:
    """Returns the pairs of a block: about as many as an expert has, but no tiny products."""
    mean = -(-pairs // num_experts)
    return min(num_rows, MAX_BLOCK, max(MIN_BLOCK, 1 << (mean - 1).bit_length()))


def _packed_size(num_rows: int, pairs: int, num_experts: int) -> int:
    """Returns the same for a kernel, a multiple of 8 and twice the mean: most experts need one."""
    mean = -(-pairs // num_experts)
    return min(-(-num_rows // 8) * 8, MAX_PACKED_BLOCK, max(8, 2 << (mean - 1).bit_length()))
