"""KV cache: one pair of fixed arrays per layer, written in place at absolute positions.

There is no rollback. A slot is visible to a row only if its position is not after the row's own,
and every slot past the committed tokens is written again before a row can see it; so committing
tokens is nothing but advancing a length that the caller keeps (one per sequence).
"""

import dataclasses
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp

from peagle_jax.config import DecoderConfig
from peagle_jax.kernels import attention, masked_attention
from peagle_jax.models.layers import Attend


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer.

    Attributes:
      keys: per layer `[B, N_kv, S, D]`, after RoPE. Head-major, because XLA on GPU otherwise
        copies the caches at the loop's entry.
      values: per layer `[B, N_kv, S, D]`.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @classmethod
    def zeros(cls, config: DecoderConfig, batch: int, capacity: int, dtype: jnp.dtype) -> Self:
        """Returns an empty cache of `capacity` slots for each of `batch` sequences."""
        shape = (batch, config.num_kv_heads, capacity, config.head_dim)

        def arrays() -> tuple[jax.Array, ...]:
            return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

        return cls(arrays(), arrays())


def write_rows(cache: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    """Writes consecutive rows of each sequence into one layer's keys or values.

    The caller guarantees `start + T <= S`: `dynamic_update_slice` would move an overhanging
    block back over live slots.

    Args:
      cache: `[B, N_kv, S, D]`.
      rows: `[B, N_kv, T, D]`.
      start: `[B]`, slot of each sequence's first row.

    Returns:
      `[B, N_kv, S, D]`, updated in place where the buffer is donated.
    """
    return jax.lax.platform_dependent(
        cache, rows.astype(cache.dtype), start, cpu=_write_each, default=_write_together
    )


def _write_together(cache: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    def write(c: jax.Array, r: jax.Array, s: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(c, r, (0, s, 0))

    return jax.vmap(write)(cache, rows, start)  # one scatter


def _write_each(cache: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    """XLA CPU turns a scatter into a dozen small loops, which cost more than the copies."""
    for row in range(cache.shape[0]):
        at = (row, 0, start[row], 0)
        cache = jax.lax.dynamic_update_slice(cache, rows[row : row + 1], at)
    return cache


def cached(cache: KVCache, positions: jax.Array, prefill: bool = False) -> Attend:
    """Attention that writes its rows into the cache, then reads the cache.

    Args:
      cache: the caches of all layers.
      positions: `[B, T]` int32, consecutive in each sequence; also the slots written.
      prefill: row t stands at position t in every sequence, so that later slots are not read.
    """

    def attend(
        layer: int,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        window: int | None,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        kept_keys = write_rows(cache.keys[layer], keys, positions[:, 0])
        kept_values = write_rows(cache.values[layer], values, positions[:, 0])
        out = attention(queries, kept_keys, kept_values, positions, window, sinks, prefill)
        return out, (kept_keys, kept_values)

    return attend


def masked(masks: Sequence[jax.Array]) -> Attend:
    """Attention of rows among themselves, without a cache, under one given mask per layer.

    Args:
      masks: per layer `[B, T, T]` bool, True where the row sees the other; windows of the
        config are not applied on top.
    """

    def attend(
        layer: int,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        window: int | None,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        del window
        return masked_attention(queries, keys, values, masks[layer], sinks), (keys, values)

    return attend
