"""The one XLA program: prompts in, finished sequences out, nothing on the host in between.

After the prefill, every round drafts K tokens, verifies them in one target pass of K + 1 rows,
accepts a prefix, commits it by advancing a length, and tests for the end, for each sequence of
the batch on its own. One `lax.while_loop` runs the rounds until all sequences are done.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from peagle_jax.decoding.draft import Committed, Proposer
from peagle_jax.decoding.verify import accept_greedy
from peagle_jax.models import Frozen, KVCache, Target, cached


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
    """A batch of prompts. Nothing here but the shapes makes the program compile again.

    Attributes:
      tokens: `[B, P]` int32, prompts from the left, anything after their ends.
      lengths: `[B]` int32, tokens of each prompt, at least 1.
      budgets: `[B]` int32, tokens to generate at most; 0 for a row that pads the batch.
      eos_ids: `[E]` int32, tokens that end a sequence (they are emitted); -1 for none.
    """

    tokens: jax.Array
    lengths: jax.Array
    budgets: jax.Array
    eos_ids: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generation:
    """Finished sequences, and how they came about.

    Attributes:
      tokens: `[B, C]` int32, prompt and generated tokens.
      lengths: `[B]` int32, how many of them count.
      rounds: `[]` int32, rounds of the program.
      active_rounds: `[B]` int32, rounds that the sequence took part in.
      accepted_per_position: `[B, K]` int32, rounds in which draft i was accepted and emitted.
    """

    tokens: jax.Array
    lengths: jax.Array
    rounds: jax.Array
    active_rounds: jax.Array
    accepted_per_position: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    """The loop's carry: the sequences so far, caches, and the last round's outcome."""

    generation: Generation
    done: jax.Array  # [B] bool
    accepted: jax.Array  # [B] int32, of the last round
    features: jax.Array | None  # [B, K + 1, F], of the last round's rows
    target_cache: KVCache
    draft_state: Any


def capacity_for(num_tokens: int, num_drafts: int) -> int:
    """Returns the slots that sequences of up to `num_tokens` tokens need.

    A round's rows reach 2K slots past the committed tokens at most. Rounded up to 128, so that
    requests of similar size share a program.
    """
    return -(-(num_tokens + 2 * num_drafts + 1) // 128) * 128


@functools.partial(
    jax.jit, static_argnames="capacity", donate_argnames=("target_cache", "draft_cache")
)
def generate_tokens(
    target: Frozen[Target],
    proposer: Proposer,
    request: Request,
    target_cache: KVCache,
    draft_cache: Any,
    capacity: int,
) -> tuple[Generation, KVCache, Any]:
    """Generates greedily until every sequence meets an EOS id or its budget.

    Args:
      target: the model whose text it is.
      proposer: what drafts.
      request: the prompts. `capacity_for(lengths + budgets, K)` must not exceed the capacity
        for any of them.
      target_cache: `KVCache.zeros(...)` of this capacity for blocks of K + 1 rows; donated.
      draft_cache: `proposer.new_cache(...)` of this capacity; donated.
      capacity: C, positions that a sequence may reach; static.

    Returns:
      the sequences, and both caches for their buffers to be used again.
    """
    model = target.merge()
    state = _prefill(model, proposer, request, target_cache, draft_cache, capacity)
    state = jax.lax.while_loop(
        lambda s: ~jnp.all(s.done),
        lambda s: _round(model, proposer, request, s),
        state,
    )
    return state.generation, state.target_cache, proposer.finish(state.draft_state)


def _prefill(
    model: Target,
    proposer: Proposer,
    request: Request,
    target_cache: KVCache,
    draft_cache: Any,
    capacity: int,
) -> _State:
    """Reads the prompts and emits the first token of each."""
    batch, length = request.tokens.shape
    drafts = proposer.num_drafts
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    x, features, target_cache = model(
        request.tokens,
        positions,
        cached(target_cache, positions, request.lengths),
        proposer.aux_boundaries,
    )
    draft_state = proposer.prefill(model, request.tokens, request.lengths, features, draft_cache)
    last = (request.lengths - 1)[:, None, None]  # [B, 1, 1]
    _, first = accept_greedy(
        jnp.zeros((batch, 0), jnp.int32), model.logits(jnp.take_along_axis(x, last, axis=1))
    )  # [B, 1]
    if features is not None:  # only the last prompt row waits to be drafted from
        features = jnp.take_along_axis(features, last, axis=1)
        features = jnp.pad(features, ((0, 0), (0, drafts), (0, 0)))  # [B, K + 1, F]
    tokens = jnp.pad(request.tokens, ((0, 0), (0, capacity - length)))
    generation = Generation(
        tokens=tokens,
        lengths=request.lengths,
        rounds=jnp.int32(0),
        active_rounds=jnp.zeros((batch,), jnp.int32),
        accepted_per_position=jnp.zeros((batch, drafts), jnp.int32),
    )
    none = jnp.zeros((batch,), jnp.int32)
    generation, _, done = _commit(request, generation, none == 1, none, first)
    return _State(generation, done, none, features, target_cache, draft_state)


def _round(model: Target, proposer: Proposer, request: Request, state: _State) -> _State:
    """Draft, verify, accept, commit."""
    past = state.generation
    seen = Committed(past.tokens, past.lengths, state.accepted, state.features, past.rounds)
    drafts, draft_state = proposer.propose(model, state.draft_state, seen)  # [B, K]

    last = jnp.take_along_axis(past.tokens, past.lengths[:, None] - 1, axis=1)  # [B, 1]
    rows = jnp.concatenate([last, jnp.maximum(drafts, 0)], axis=1)  # [B, K + 1]
    positions = past.lengths[:, None] - 1 + jnp.arange(rows.shape[1], dtype=jnp.int32)
    x, features, target_cache = model(
        rows, positions, cached(state.target_cache, positions), proposer.aux_boundaries
    )
    accepted, tokens = accept_greedy(drafts, model.logits(x))

    generation, emitted, done = _commit(request, past, state.done, accepted, tokens)
    kept = jnp.arange(proposer.num_drafts) < emitted[:, None] - 1  # [B, K]
    generation = dataclasses.replace(
        generation,
        rounds=past.rounds + 1,
        active_rounds=past.active_rounds + ~state.done,
        accepted_per_position=past.accepted_per_position + kept,
    )
    return _State(generation, done, accepted, features, target_cache, draft_state)


def _commit(
    request: Request,
    past: Generation,
    done: jax.Array,
    accepted: jax.Array,
    tokens: jax.Array,
) -> tuple[Generation, jax.Array, jax.Array]:
    """Appends a round's tokens up to the first EOS id and the budget.

    Args:
      request: eos ids and budgets.
      past: the sequences before the round.
      done: `[B]` bool, sequences that take no more tokens.
      accepted: `[B]` int32.
      tokens: `[B, R]` int32, of which the first `accepted + 1` are good.

    Returns:
      the sequences, tokens emitted `[B]`, and who is done now `[B]`.
    """
    room = request.lengths + request.budgets - past.lengths  # [B]
    is_eos = jnp.any(tokens[..., None] == request.eos_ids, axis=-1)  # [B, R]
    to_eos = jnp.where(jnp.any(is_eos, axis=1), jnp.argmax(is_eos, axis=1) + 1, tokens.shape[1])
    emitted = jnp.minimum(jnp.minimum(accepted + 1, to_eos), room).astype(jnp.int32)
    emitted = jnp.where(done, 0, emitted)
    hit_eos = emitted == jnp.where(jnp.any(is_eos, axis=1), to_eos, -1)
    done = done | hit_eos | (emitted >= room)

    def append(row: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(row, new, (start,))

    # What lies past the length is written again or never read.
    written = jax.vmap(append)(past.tokens, tokens, past.lengths)
    sequences = dataclasses.replace(past, tokens=written, lengths=past.lengths + emitted)
    return sequences, emitted, done
