"""Grouped-query attention of a block of query rows over a KV cache (XLA reference)."""

import functools

import jax
import jax.numpy as jnp

# Query rows per piece of a long prefill: it bounds the scores to [B, N, QUERY_CHUNK, S].
QUERY_CHUNK = 1024


def attention(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    window: int | None = None,
    sinks: jax.Array | None = None,
    prefill: bool = False,
) -> jax.Array:
    """Causal attention over a cache, which is a ring where there is a window.

    A row at position p sees the positions up to p, and with a window only those after
    p - window. Without one, slot s holds position s. With one, position p lies in slot p % S,
    and the newest one written is that of the last row. What lies in slots that a row does not
    see has no influence as long as it is finite.

    Args:
      queries: `[B, T, N, D]`.
      keys: `[B, N_kv, S, D]`; query head n reads KV head `n // (N / N_kv)`.
      values: `[B, N_kv, S, D]`.
      positions: `[B, T]` int32, consecutive in each sequence.
      window: positions that a row sees, itself included; None for all.
      sinks: `[N]`, one logit per query head that takes part in the softmax and has no value.
      prefill: keys and values are those of the rows themselves, which stand at 0..T-1.

    Returns:
      `[B, T, N, D]` in the dtype of `queries`; scores and softmax are float32, scaled by
      `D ** -0.5`.
    """

    def rows(start: int, stop: int) -> jax.Array:
        first, end = 0, keys.shape[2]
        if prefill:  # what no row of the piece sees is not read
            first, end = max(0, start + 1 - window) if window else 0, stop
        held, at = jnp.arange(first, end), positions[:, start:stop, None]  # [S], [B, T, 1]
        if window and not prefill:
            newest = positions[:, -1:, None]  # [B, 1, 1]
            held = newest - (newest - held) % end  # [B, 1, S]
        mask = held <= at  # [B, T, S]
        if window:
            mask &= (held > at - window) & (held >= 0)
        piece = (queries[:, start:stop], keys[:, :, first:end], values[:, :, first:end])
        return masked_attention(*piece, mask, sinks)

    length = queries.shape[1]
    pieces = [rows(i, min(i + QUERY_CHUNK, length)) for i in range(0, length, QUERY_CHUNK)]
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)


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

    # XLA CPU copies keys and values before it multiplies them; one query row is quicker to sum.
    product = functools.partial(jnp.einsum, equation, precision="highest")
    cpu = summed if length == 1 else product
    return jax.lax.platform_dependent(left, right, cpu=cpu, default=product)
