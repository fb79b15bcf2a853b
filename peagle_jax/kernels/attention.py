"""Grouped-query attention of a block of query rows: the entry point, and the XLA reference."""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp

from peagle_jax.kernels.mosaic import devices_serve
from peagle_jax.kernels.prefill_attention import prefill_attention
from peagle_jax.kernels.verify_attention import verify_attention

# A long prefill is cut into pieces of query rows, so that each reads only the keys that it sees,
PIECE_ROWS = 1024
# and a piece into blocks whose float32 scores [B, N, T, S] take no more than this.
SCORE_BYTES = 1 << 28
# On CPU so many products of one query row (sequences times KV heads) are sums, more are products.
SUMMED_PRODUCTS = 32

Implementation = Literal["auto", "xla", "pallas"]
# What `attention` does when it is not told. Read when a program is traced: jitted programs keep
# what they were traced with until `jax.clear_caches()`.
IMPLEMENTATION: Implementation = "auto"
# Rows of a sequence up to which the Pallas kernel is that for verification, else that for prefills.
VERIFIED_ROWS = 64


def attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    held: jax.Array,
    window: int | None = None,
    sinks: jax.Array | None = None,
    own: bool = False,
    counts: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Causal attention, where positions say which row sees which key.

    A row at position p sees the keys at positions 0..p, and with a window only those after
    p - window. A key that no row sees has no influence as long as it is finite.

    A sequence's rows and keys stand in order: its rows at consecutive positions, and its keys in a
    circle of slots that ends with the last row's, `held[s] = p - (t - s) % S` where that row has
    position p and lies in slot t. So it is in a cache whose slots are positions, in a ring, and
    among the rows themselves.

    What "auto" takes:

    - XLA on every platform but CUDA, so on CPU; for float32, which the tensor cores would round to
      less; for head sizes other than 64 and 128; and for GPUs that are neither Hoppers nor
      data-centre Blackwells (9.x, 10.x), where this process has one.
    - Elsewhere the Pallas kernels: `verify_attention` for up to `VERIFIED_ROWS` rows of a sequence,
      `prefill_attention` for more. They are chosen when the program is lowered for CUDA, also
      without a GPU at hand. They have no derivative, and what holds them has none on any
      platform: ask for "xla" where gradients are wanted.

    "pallas" takes them always: in a process without a GPU in interpret mode (also in programs that
    are lowered for CUDA there), for tests, where float32 is as exact as with XLA and any head size
    of a multiple of 32 bytes will do.

    Args:
      queries: `[B, T, N, D]`.
      keys: `[B, N_kv, S, D]`; query head n reads KV head `n // (N / N_kv)`.
      values: `[B, N_kv, S, D]`.
      positions: `[B, T]` int32.
      held: `[S]` or `[B, S]` int32, the keys' positions; negative for an empty slot.
      window: positions that a row sees, itself included; None for all.
      sinks: `[N]`, one logit per query head that takes part in the softmax and has no value.
      own: the keys are those of the rows, in their order (S = T).
      counts: `[B]` int32, rows of each sequence whose output is wanted, the first ones; None for
        all.
      implementation: None for the module's `IMPLEMENTATION`.

    Returns:
      `[B, T, N, D]` in the dtype of `queries`; scores and softmax are float32, scaled by
      `D ** -0.5`.
    """
    chosen = implementation or IMPLEMENTATION
    arrays = queries, keys, values, positions, held, sinks, counts

    if chosen == "pallas":
        return _by_kernel(window, jax.default_backend() == "cpu", *arrays)
    xla = functools.partial(_by_xla, window, own)
    if chosen == "xla" or not _kernels_serve(queries, keys, values):
        return xla(*arrays)
    kernel = functools.partial(_by_kernel, window, False)
    return jax.lax.platform_dependent(*arrays, cuda=kernel, default=xla)


def _kernels_serve(*arrays: jax.Array) -> bool:
    """Returns whether the kernels take these arrays, and the GPUs that are there the kernels."""
    dtypes = {x.dtype for x in arrays}
    half = dtypes in ({jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float16)})
    return half and arrays[0].shape[-1] in (64, 128) and devices_serve()


def _by_kernel(
    window: int | None,
    interpret: bool,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    held: jax.Array,
    sinks: jax.Array | None,
    counts: jax.Array | None,
) -> jax.Array:
    """Attention by a Pallas kernel."""
    batch, length = positions.shape
    first, base = positions[:, 0], jnp.broadcast_to(held[..., 0], (batch,))
    if length <= VERIFIED_ROWS:
        return verify_attention(
            queries, keys, values, first, base, window, sinks, interpret=interpret
        )
    return prefill_attention(
        queries, keys, values, first, base, counts, window, sinks, interpret=interpret
    )


def _by_xla(
    window: int | None,
    own: bool,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    held: jax.Array,
    sinks: jax.Array | None,
    counts: jax.Array | None,
) -> jax.Array:
    """Attention by XLA, which computes all rows."""
    del counts
    return xla_attention(queries, keys, values, positions, held, window, sinks, own)


def xla_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    held: jax.Array,
    window: int | None = None,
    sinks: jax.Array | None = None,
    own: bool = False,
) -> jax.Array:
    """Returns what `attention` does, by XLA; here `held` may be in any order."""
    length = queries.shape[1]
    out: list[jax.Array] = []
    for start in range(0, length, PIECE_ROWS):
        stop = min(start + PIECE_ROWS, length)
        first, end = 0, keys.shape[2]
        if own:  # what no row of the piece sees is not read
            first, end = max(0, start + 1 - window) if window else 0, stop
        if out:  # one after the other, else XLA keeps the scores of all
            out[-1], queries = jax.lax.optimization_barrier((out[-1], queries))
        rows = queries[:, start:stop], positions[:, start:stop]
        seen = keys[:, :, first:end], values[:, :, first:end], held[..., first:end]
        out.append(_in_blocks(*rows, *seen, window, sinks))
    return out[0] if len(out) == 1 else jnp.concatenate(out, axis=1)


def _in_blocks(
    queries: jax.Array,
    positions: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    held: jax.Array,
    window: int | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attention of one piece, in blocks of rows whose scores are not too large."""

    def block(queries: jax.Array, positions: jax.Array) -> jax.Array:
        key, row = held[..., None, :], positions[..., None]  # [1 or B, 1, S], [B, T, 1]
        mask = (key >= 0) & (key <= row)  # [B, T, S]
        if window:
            mask &= key > row - window
        return masked_attention(queries, keys, values, mask, sinks)

    batch, length, heads, _ = queries.shape
    size = block_rows(length, batch * heads * keys.shape[2])
    if size == length:
        return block(queries, positions)

    def cut(x: jax.Array) -> jax.Array:  # [B, T, ...] -> [blocks, B, size, ...]
        return x.reshape(batch, -1, size, *x.shape[2:]).swapaxes(0, 1)

    out = jax.lax.map(lambda rows: block(*rows), (cut(queries), cut(positions)))
    return out.swapaxes(0, 1).reshape(queries.shape)


def block_rows(length: int, scores_per_row: int) -> int:
    """Returns the query rows of a block, a divisor of the piece's `length`."""
    most = max(1, SCORE_BYTES // 4 // scores_per_row)
    return length if length <= most else math.gcd(length, 1 << (most.bit_length() - 1))


def masked_attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention where each query row names the keys it sees.

    Args:
      queries: `[B, T, N, D]`.
      keys: `[B, N_kv, S, D]`.
      values: `[B, N_kv, S, D]`.
      mask: `[B, T, S]` bool, True where the row sees the key. Every row must see one.
      sinks: `[N]` or None, as for `attention`.

    Returns:
      `[B, T, N, D]` in the dtype of `queries`.
    """
    batch, length, heads, head_dim = queries.shape
    kv_heads, slots = keys.shape[1:3]
    group = heads // kv_heads
    # The heads of a group are rows of one product with their KV head: [B N_kv, G T, D].
    rows = queries.reshape(batch, length, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    rows = rows.reshape(batch * kv_heads, group * length, head_dim)
    # Upcast first: XLA CPU has no bfloat16 x bfloat16 -> float32 product for every contraction.
    keys, values, rows = (
        x.reshape(batch * kv_heads, -1, head_dim).astype(jnp.float32) for x in (keys, values, rows)
    )
    scores = _product("nrd,nsd->nrs", rows, keys, length)  # [B N_kv, G T, S]
    scores = scores.reshape(batch, kv_heads, group, length, slots) * head_dim**-0.5
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    highest = jnp.max(scores, axis=-1, keepdims=True)  # [B, N_kv, G, T, 1]
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(kv_heads, group, 1, 1)
        highest = jnp.maximum(highest, sink)
    weights = jnp.exp(scores - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - highest)
    weights = weights / total
    weights = weights.reshape(batch * kv_heads, -1, slots)
    out = _product("nrs,nsd->nrd", weights, values, length)
    out = out.reshape(batch, kv_heads, group, length, head_dim).transpose(0, 3, 1, 2, 4)
    return out.reshape(batch, length, heads, head_dim).astype(queries.dtype)


def _product(equation: str, left: jax.Array, right: jax.Array, length: int) -> jax.Array:
    """Returns a batched product of `[n, R, ...]` and `[n, S, D]`."""

    def summed(left: jax.Array, right: jax.Array) -> jax.Array:
        if equation == "nrd,nsd->nrs":
            return jnp.sum(left[:, :, None] * right[:, None], axis=-1)
        return jnp.sum(left[..., None] * right[:, None], axis=2)

    # XLA CPU copies keys and values before it multiplies them; one query row of few sequences is
    # quicker to sum.
    product = functools.partial(jnp.einsum, equation, precision="highest")
    cpu = summed if length == 1 and left.shape[0] <= SUMMED_PRODUCTS else product
    return jax.lax.platform_dependent(left, right, cpu=cpu, default=product)
