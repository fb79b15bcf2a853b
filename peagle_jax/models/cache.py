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

# On CPU the rows of so many sequences are written one after the other, those of more by a scatter,
# which compiles faster too.
WRITTEN_EACH = 8


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
            belongs; and then some, to a multiple of 8, else GPU kernels would have to copy it.
        """

        def arrays() -> tuple[jax.Array, ...]:
            slots = (
                capacity if w is None else min(-(-(w + block - 1) // 8) * 8, capacity)
                for w in windows
            )
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
    cpu = _write_each if cache.shape[0] <= WRITTEN_EACH else _write_together
    return jax.lax.platform_dependent(
        cache, rows.astype(cache.dtype), start, cpu=cpu, default=_write_together
    )


def _write_together(cache: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    def write(c: jax.Array, r: jax.Array, s: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(c, r, (0, s, 0))

    return jax.vmap(write)(cache, rows, start)  # one scatter


def _write_each(cache: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    """XLA CPU turns a scatter into a dozen small loops, which cost more than a few copies."""
    for row in range(cache.shape[0]):
        at = (row, 0, start[row], 0)
        cache = jax.lax.dynamic_update_slice(cache, rows[row : row + 1], at)
    return cache


def ring_positions(newest: jax.Array, slots: int) -> jax.Array:
    """Returns the position that each slot of a ring holds.

    Args:
      newest: `[B]`, the last position written; -1 for none.
      slots: S.

    Returns:
      `[B, S]` int32, negative where nothing was written.
    """
    last = newest[:, None]
    return last - (last - jnp.arange(slots, dtype=jnp.int32)) % slots


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
    row = ring_positions(start + count - 1, cache.shape[2]) - start[:, None]  # [B, S]
    taken = jnp.take_along_axis(rows, jnp.maximum(row, 0)[:, None, :, None], axis=2)
    return jnp.where((row >= 0)[:, None, :, None], taken.astype(cache.dtype), cache)


def cached(
    cache: KVCache,
    positions: jax.Array,
    counts: jax.Array | None = None,
    empty: bool = False,
) -> Attend:
    """Attention that writes its rows into the cache and sees what is cached, its rows included.

    Args:
      cache: the caches of all layers.
      positions: `[B, T]` int32, consecutive in each sequence.
      counts: `[B]`, in a prefill, how many of each sequence's rows are of its prompt. None in a
        round, where all count and rings have room for them (`KVCache.zeros(block=T)`).
      empty: nothing was cached before (static; it only saves work).
    """
    start, length = positions[:, 0], positions.shape[1]
    written = jnp.full_like(start, length) if counts is None else counts

    def attend(
        layer: int,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        window: int | None,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        def write(cache: jax.Array, rows: jax.Array) -> jax.Array:
            if window is None:
                return write_rows(cache, rows, start)
            return write_ring(cache, rows, start, written)

        def beside(cache: jax.Array, rows: jax.Array) -> jax.Array:
            """Returns the ring in the order of positions, and the rows after it."""
            slots = cache.shape[2]
            at = (start[:, None] + jnp.arange(slots, dtype=jnp.int32)) % slots  # oldest first
            ordered = jnp.take_along_axis(cache, at[:, None, :, None], axis=2)
            return jnp.concatenate([ordered, rows.astype(cache.dtype)], axis=2)

        before = cache.keys[layer], cache.values[layer]
        kept = write(before[0], keys), write(before[1], values)
        slots = before[0].shape[2]
        if empty:
            seen, held = (keys, values), positions
        elif window is None:
            seen, held = kept, jnp.arange(slots, dtype=jnp.int32)
        elif counts is None:
            seen, held = kept, ring_positions(start + length - 1, slots)
        else:  # more rows than a ring has room for beside its window
            seen = beside(before[0], keys), beside(before[1], values)
            held = (start - slots)[:, None] + jnp.arange(slots + length, dtype=jnp.int32)
        out = attention(queries, *seen, positions, held, window, sinks, own=empty, counts=counts)
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


def spread(
    cache: KVCache,
    config: DecoderConfig,
    length: int,
    batch: int,
    capacity: int,
    block: int,
) -> KVCache:
    """Copies what one sequence's cache holds to every sequence of a batch.

    Args:
      cache: of batch 1.
      config: sizes and windows.
      length: positions that it holds, no more than `capacity`.
      batch: as for `KVCache.zeros`.
      capacity: as for `KVCache.zeros`.
      block: as for `KVCache.zeros`.
    """
    empty = KVCache.zeros(config, batch, capacity, cache.keys[0].dtype, block)

    def copied(window: int | None, old: jax.Array, new: jax.Array) -> jax.Array:
        slots = new.shape[2]
        if window is None:
            at = jnp.minimum(jnp.arange(slots), old.shape[2] - 1)
        else:  # positions that the old ring lost are out of every row's window
            at = ring_positions(jnp.array([length - 1]), slots)[0] % old.shape[2]
        return jnp.broadcast_to(jnp.take(old, at, axis=2), new.shape)

    def each(old: tuple[jax.Array, ...], new: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return tuple(map(copied, config.sliding_windows, old, new))

    return KVCache(each(cache.keys, empty.keys), each(cache.values, empty.values))
