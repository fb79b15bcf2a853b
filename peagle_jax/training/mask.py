"""Who sees whom among the elements of a packed row, and attention under that rule."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from peagle_jax.kernels import (
    Implementation,
    cod_attention,
    cod_attention_serves,
    masked_attention,
)
from peagle_jax.models import KVCache
from peagle_jax.models.layers import Attend
from peagle_jax.training.cod import Elements

# Query rows are taken in blocks whose float32 scores [N, rows, keys] take no more than this.
BLOCK_BYTES = 1 << 26


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What says who sees whom, of T rows.

    Attributes:
      anchors: `[T]` int32.
      depths: `[T]` int32.
      documents: `[T]` int32, the anchor's document. A row of padding is a document of its own,
        with a negative number: so it sees itself, which keeps its softmax finite, and no real one.
    """

    anchors: jax.Array
    depths: jax.Array
    documents: jax.Array

    @classmethod
    def of(cls, elements: Elements, document_ids: jax.Array) -> "Rows":
        """Returns the rows of elements `[n]` of a packed row with these documents `[S]`."""
        own = -1 - jnp.arange(elements.anchors.shape[0], dtype=jnp.int32)
        documents = jnp.where(elements.valid, document_ids[elements.anchors], own)
        return cls(elements.anchors, elements.depths, documents)

    def stacked(self) -> jax.Array:
        """Returns anchors, depths and documents, `[3, T]`."""
        return jnp.stack([self.anchors, self.depths, self.documents])


def sees(queries: Rows, keys: Rows, window: int | None = None) -> jax.Array:
    """Returns which of the keys each query sees, `[T, S]` bool.

    A row sees the real rows of its document up to its anchor, and the mask slots of its own chain
    up to itself. A sliding layer drops the real rows that are `window` or more before the row's
    position a + d, but nothing of the own chain, the anchor included (speculators).

    Any block of the mask is that of the block's queries and keys.

    Args:
      queries: T rows.
      keys: S rows.
      window: of the layer, or None.
    """
    query_anchor, query_depth = queries.anchors[:, None], queries.depths[:, None]
    real = (keys.depths == 0) & (keys.anchors <= query_anchor)
    if window is not None:
        real &= keys.anchors > query_anchor + query_depth - window
    chain = (keys.anchors == query_anchor) & (keys.depths <= query_depth)
    return (queries.documents[:, None] == keys.documents) & (real | chain)


def context_table(length: int, num_depths: int, window: int | None = None) -> jax.Array:
    """Returns which real rows each (depth, anchor) sees in one document, `[K, S, S]` bool.

    The rule does not know the row's length, so the table of a shorter row is a slice of each of
    its blocks, `table[:, :n, :n]` (paper, "amortised mask construction"). What depends on the
    sample and on the documents is not in it. Reading it costs twice what `sees` does, which makes
    each entry of three vectors (2117 elements on CPU: 2.1 against 1.1 ms), so nothing does but
    the tests.
    """
    anchors = jnp.arange(length, dtype=jnp.int32)
    each = jnp.zeros((num_depths, length), jnp.int32)
    queries = Rows(
        (each + anchors).reshape(-1),
        (each + jnp.arange(num_depths, dtype=jnp.int32)[:, None]).reshape(-1),
        each.reshape(-1),
    )
    keys = Rows(anchors, jnp.zeros_like(anchors), jnp.zeros_like(anchors))
    return sees(queries, keys, window).reshape(num_depths, length, length)


def sees_by_table(table: jax.Array, queries: Rows, keys: Rows, length: int) -> jax.Array:
    """Returns what `sees` does, with the part of the first `length` keys read from a table.

    Args:
      table: `context_table` of at least this length and these depths, with the layer's window.
      queries: T rows.
      keys: S rows, the first `length` of them a packed row's (depth 0).
      length: of the packed row.
    """
    real = table[queries.depths, queries.anchors, :length]  # [T, length]
    deep_anchors, deep_depths = keys.anchors[length:], keys.depths[length:]
    chain = (deep_anchors == queries.anchors[:, None]) & (deep_depths <= queries.depths[:, None])
    return (queries.documents[:, None] == keys.documents) & jnp.concatenate([real, chain], axis=1)


def among(
    rows: Rows,
    context: tuple[Rows, KVCache] | None = None,
    implementation: Implementation = "auto",
) -> Attend:
    """Attention of rows among themselves, and over keys that were made before.

    XLA makes the scores block by block of query rows, and makes them again in the backward pass.
    "auto" takes the kernels of `cod_attention` instead where a program is lowered for CUDA, they
    take the queries and there are no sinks. "pallas" takes them on any platform, on CPU in
    interpret mode, for tests; "xla" never.

    Args:
      rows: of the queries, T of them, batch 1.
      context: rows and their keys and values, which the queries see beside each other.
      implementation: "auto", "xla" or "pallas".
    """

    def attend(
        layer: int,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        window: int | None,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        all_keys, all_values, all_rows = keys, values, rows
        if context is not None:
            before, cache = context
            all_keys = jnp.concatenate([cache.keys[layer], keys], axis=2)
            all_values = jnp.concatenate([cache.values[layer], values], axis=2)
            all_rows = jax.tree.map(lambda *x: jnp.concatenate(x), before, rows)
        arrays = queries, all_keys, all_values

        def by_xla(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
            return _in_blocks(queries, keys, values, rows, all_rows, window, sinks)

        def by_kernel(
            interpret: bool, queries: jax.Array, keys: jax.Array, values: jax.Array
        ) -> jax.Array:
            of_rows = rows.stacked(), all_rows.stacked()
            return cod_attention(queries[0], keys[0], values[0], *of_rows, window, interpret)[None]

        if implementation == "xla" or sinks is not None:
            out = by_xla(*arrays)
        elif implementation == "pallas":
            out = by_kernel(jax.default_backend() == "cpu", *arrays)
        elif cod_attention_serves(queries):
            kernel = functools.partial(by_kernel, False)
            out = jax.lax.platform_dependent(*arrays, cuda=kernel, default=by_xla)
        else:
            out = by_xla(*arrays)
        return out, (keys, values)

    return attend


def _in_blocks(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    rows: Rows,
    key_rows: Rows,
    window: int | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attention `[1, T, N, D]` of queries `[1, T, N, D]` over `[1, N_kv, S, D]`."""
    _, length, heads, _ = queries.shape
    most = max(1, BLOCK_BYTES // (4 * heads * keys.shape[2]))
    blocks = -(-length // most)
    size = -(-length // blocks)

    @jax.checkpoint
    def block(taken: tuple[jax.Array, Rows]) -> jax.Array:
        some, some_rows = taken
        mask = sees(some_rows, key_rows, window)[None]
        return masked_attention(some[None], keys, values, mask, sinks)[0]

    def cut(x: jax.Array) -> jax.Array:  # [T, ...] -> [blocks, size, ...]
        # The last block is filled up with its last row, which sees something, as every row must.
        filled = jnp.pad(x, ((0, blocks * size - length), *((0, 0),) * (x.ndim - 1)), mode="edge")
        return filled.reshape(blocks, size, *x.shape[1:])

    if blocks == 1:
        return block((queries[0], rows))[None]
    out = jax.lax.map(block, (cut(queries[0]), jax.tree.map(cut, rows)))
    return out.reshape(1, blocks * size, *out.shape[2:])[:, :length]
