"""The prefill: prompts into the caches of target and drafter, in passes of bounded size.

The drafter follows the target one row behind, because its row at a position holds the next token.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from peagle_jax.decoding.draft import PromptRows, Proposer
from peagle_jax.decoding.sampling import Sampling
from peagle_jax.models import Frozen, KVCache, Target, cached

# Prompt rows of all sequences together that one pass of a prefill takes at most.
PREFILL_ROWS = 8192


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
    """A batch of prompts. Nothing here but the shapes makes the program compile again.

    Attributes:
      tokens: `[B, C]` int32, prompts from the left, anything after their ends. C is the capacity,
        `capacity_for(lengths + budgets, K)` or more.
      lengths: `[B]` int32, tokens of each prompt, at least 1.
      budgets: `[B]` int32, tokens to generate at most; 0 for a row that pads the batch.
      stop_ids: `[B, E]` int32, tokens that end a sequence (they are emitted); -1 for none.
      sampling: None where all sequences are greedy and nothing changes their logits.
    """

    tokens: jax.Array
    lengths: jax.Array
    budgets: jax.Array
    stop_ids: jax.Array
    sampling: Sampling | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """What is known of the first tokens of every prompt, with the caches that go with it.

    Attributes:
      length: `[]` int32, tokens read.
      feature: `[B, 1, F]`, the target's at the last of them, for the drafter's row there waits
        for its token; None if nobody reads it.
    """

    length: jax.Array
    feature: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reading:
    """A prefill between two passes.

    Attributes:
      target_cache, draft_state: so far.
      last: `[B, 1, H]`, the residual stream at each prompt's last token.
      feature: `[B, 1, F]`, the feature there; None if nobody reads it.
      tail: `[B, 1, F]`, the feature of the pass's last row; None likewise.
    """

    target_cache: KVCache
    draft_state: Any
    last: jax.Array
    feature: jax.Array | None
    tail: jax.Array | None


def prefill_rows(batch: int, prompt_rows: int) -> int:
    """Returns the rows of each sequence that one pass of a prefill takes.

    Args:
      batch: B.
      prompt_rows: rows to read, a power of two or fewer than a pass takes.
    """
    return min(prompt_rows, max(1, PREFILL_ROWS // batch))


@functools.partial(jax.jit, static_argnames="prompt_rows")
def read_prefix(
    target: Frozen[Target],
    proposer: Proposer,
    tokens: jax.Array,
    length: jax.Array,
    target_cache: KVCache,
    draft_cache: Any,
    *,
    prompt_rows: int,
) -> tuple[KVCache, Any, Prefix]:
    """Reads what prompts begin with, for `generate_tokens` to go on from.

    Args:
      target: the model.
      proposer: what will draft.
      tokens: `[1, C]` int32.
      length: `[]` int32, how many of them count, at least 1.
      target_cache: empty, of capacity C and batch 1.
      draft_cache: empty, of capacity C and batch 1.
      prompt_rows: as for `generate_tokens`.

    Returns:
      the target's cache, the proposer's state, and the prefix.
    """
    none = jnp.zeros((1, 1), jnp.int32)
    request = Request(tokens, length[None], none[0], none - 1, None)
    reading = read_prompts(
        target.merge(), proposer, request, target_cache, draft_cache, None, prompt_rows
    )
    return reading.target_cache, reading.draft_state, Prefix(length, reading.feature)


def read_prompts(
    model: Target,
    proposer: Proposer,
    request: Request,
    target_cache: KVCache,
    draft_cache: Any,
    prefix: Prefix | None,
    prompt_rows: int,
) -> Reading:
    """Reads the prompts, all but what the caches hold of them."""
    size = prefill_rows(request.tokens.shape[0], prompt_rows)
    assert prompt_rows % size == 0, (prompt_rows, size)
    reading, begin = _start_reading(
        model, proposer, request, target_cache, draft_cache, prefix, size
    )
    passes = prompt_rows // size - (prefix is None)
    if passes == 0:
        return reading
    return jax.lax.fori_loop(
        0,
        passes,
        lambda i, r: _read_pass(model, proposer, request, begin + i * size, size, r),
        reading,
    )


def _start_reading(
    model: Target,
    proposer: Proposer,
    request: Request,
    target_cache: KVCache,
    draft_cache: Any,
    prefix: Prefix | None,
    size: int,
) -> tuple[Reading, jax.Array]:
    """Returns the reading after the prefix or, without one, after the first pass; and its place."""
    batch = request.tokens.shape[0]
    draft_state = proposer.start(model, draft_cache)
    if prefix is not None:
        x = jnp.zeros((batch, 1, model.config.hidden_size), target_cache.keys[0].dtype)
        reading = Reading(target_cache, draft_state, x, prefix.feature, prefix.feature)
        return reading, prefix.length
    # From an empty cache, rows see nothing but each other: no slot is read, nothing is masked.
    positions = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
    tokens = request.tokens[:, :size]
    x, features, target_cache = model(
        tokens,
        positions,
        cached(target_cache, positions, jnp.minimum(request.lengths, size), empty=True),
        proposer.aux_boundaries,
    )
    if features is not None and size > 1:
        counts = jnp.minimum(request.lengths, size) - 1
        prompt = PromptRows(tokens[:, 1:], features[:, :-1], positions[:, :-1], counts)
        draft_state = proposer.read(model, prompt, draft_state, empty=True)
    at = jnp.minimum(request.lengths, size)[:, None, None] - 1
    last = jnp.take_along_axis(x, at, axis=1)
    if features is None:
        return Reading(target_cache, draft_state, last, None, None), jnp.int32(size)
    feature = jnp.take_along_axis(features, at, axis=1)
    reading = Reading(target_cache, draft_state, last, feature, features[:, -1:])
    return reading, jnp.int32(size)


def _read_pass(
    model: Target,
    proposer: Proposer,
    request: Request,
    start: jax.Array,
    size: int,
    reading: Reading,
) -> Reading:
    """Reads the rows at `start`, which follow rows that the caches hold."""
    batch = request.tokens.shape[0]
    positions = jnp.broadcast_to(start + jnp.arange(size, dtype=jnp.int32), (batch, size))
    tokens = jax.lax.dynamic_slice_in_dim(request.tokens, start, size, axis=1)
    counts = jnp.clip(request.lengths - start, 0, size)
    x, features, target_cache = model(
        tokens, positions, cached(reading.target_cache, positions, counts), proposer.aux_boundaries
    )
    at = (request.lengths - 1 - start)[:, None, None]  # [B, 1, 1]

    def updated(old: jax.Array, new: jax.Array) -> jax.Array:
        row = jnp.take_along_axis(new, jnp.clip(at, 0, size - 1), axis=1)
        return jnp.where((at >= 0) & (at < size), row, old)

    last, draft_state = updated(reading.last, x), reading.draft_state
    if features is None or reading.feature is None or reading.tail is None:
        return Reading(target_cache, draft_state, last, None, None)
    # The drafter's rows stand one place behind: they hold the next token.
    shifted = jnp.concatenate([reading.tail, features[:, :-1]], axis=1)
    prompt = PromptRows(tokens, shifted, positions - 1, counts)
    draft_state = proposer.read(model, prompt, draft_state)
    feature = updated(reading.feature, features)
    return Reading(target_cache, draft_state, last, feature, features[:, -1:])
