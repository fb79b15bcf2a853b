"""KV cache: one pair of fixed arrays per layer, written in place where the positions say.

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

    A layer with a sliding window keeps a ring: position p lies in slot p % S.

    Attributes:
      keys: per layer `[B, N_kv, S, D]`, after RoPE. Head-major, because XLA on GPU otherwise
        copies the caches at the loop's entry.
      values: per layer `[B, N_kv, S, D]`.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]

    @classmethod
    def zeros(
        cls, config: DecoderConfig, batch: int, capacity: int, dtype: jnp.dtype, block: int
    ) -> Self:
        """Returns an empty cache.

        Args:
          config: sizes and windows.
          batch: B.
          capacity: positions that a sequence may reach; S of a layer without a window.
          dtype: of keys and values.
          block: rows that are written at a time at most, after the prefill. A ring has as many
            slots more than its window, so that rejected rows never lie where a visible one
            belongs.
        """

        def arrays() -> tuple[jax.Array, ...]:
            slots = (capacity if w is None else min(w + block - 1, capacity) for w in windows)
            shapes = ((batch, config.num_kv_heads, s, config.head_dim) for s in slots)
            return tuple(jnp.zeros(shape, dtype) for shape in shapes)

        windows = config.sliding_windows
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


def write_ring(cache: jax.Array, rows: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """Writes consecutive rows of each sequence into one layer's ring.

    Args:
      cache: `[B, N_kv, S, D]`.
      rows: `[B, N_kv, T, D]`; of more than S that count, the last S stay.
      start: `[B]`, position of each sequence's first row.
      count: `[B]`, how many of its rows count.

    Returns:
      `[B, N_kv, S, D]`.
    """
    newest = (start + count - 1)[:, None]
    held = newest - (newest - jnp.arange(cache.shape[2])) % cache.shape[2]  # [B, S]
    row = held - start[:, None]
    taken = jnp.take_along_axis(rows, jnp.maximum(row, 0)[:, None, :, None], axis=2)
    return jnp.where((row >= 0)[:, None, :, None], taken.astype(cache.dtype), cache)


def cached(cache: KVCache, positions: jax.Array, prompt_lengths: jax.Array | None = None) -> Attend:
    """Attention that writes its rows into the cache, then reads the cache.

    Args:
      cache: the caches of all layers.
      positions: `[B, T]` int32, consecutive in each sequence.
      prompt_lengths: `[B]` for a prefill: the rows are prompts of these lengths from position 0
        on, padded at their ends, and the cache is empty.
    """
    prefill = prompt_lengths is not None
    start = positions[:, 0]
    count = prompt_lengths if prefill else jnp.full_like(start, positions.shape[1])

    def attend(
        layer: int,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        window: int | None,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        def write(kept: jax.Array, rows: jax.Array) -> jax.Array:
            if window is None:
                return write_rows(kept, rows, start)
            return write_ring(kept, rows, start, count)

        kept = write(cache.keys[layer], keys), write(cache.values[layer], values)
        seen = (keys, values) if prefill else kept
        out = attention(queries, *seen, positions, window, sinks, prefill)
        return out, kept

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
