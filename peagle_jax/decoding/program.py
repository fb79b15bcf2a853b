"""The one XLA program: prompts in, finished sequences out, nothing on the host in between.

After the prefill, every round drafts K tokens, verifies them in one target pass of K + 1 rows,
accepts some, commits them by advancing a length, and tests for the end, for each sequence of the
batch on its own. One `lax.while_loop` runs the rounds until all sequences are done, or as many as
are asked for: `continue_generation` then goes on from the state.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from peagle_jax.decoding.draft import Committed, Proposer
from peagle_jax.decoding.sampling import Sampling, probabilities, processed_logits
from peagle_jax.decoding.verify import accept_greedy, accept_sampled
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
class Logprobs:
    """Log-probabilities under the target's own rows, before any logits processor.

    Attributes:
      chosen: `[B, C]` float32, of the generated token at each place.
      top_ids: `[B, C, n]` int32, the most likely tokens there.
      top: `[B, C, n]` float32, theirs.
    """

    chosen: jax.Array
    top_ids: jax.Array
    top: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generation:
    """Sequences, and how they came about.

    Attributes:
      tokens: `[B, C]` int32, prompt and generated tokens.
      lengths: `[B]` int32, how many of them count.
      rounds: `[]` int32, rounds so far.
      emitted_in: `[B, C]` int32, the round that each generated token comes from, counted from 1;
        0 for the first, which the prefill gives.
      done: `[B]` bool, sequences that are at their end.
      logprobs: None unless asked for.
    """

    tokens: jax.Array
    lengths: jax.Array
    rounds: jax.Array
    emitted_in: jax.Array
    done: jax.Array
    logprobs: Logprobs | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """A generation between two rounds: the sequences so far, caches, the last round's outcome.

    Attributes:
      generation: the sequences.
      accepted: `[B]` int32, drafts accepted in the last round.
      features: `[B, K + 1, F]`, the target's features of its rows; None if nobody reads them.
      target_cache: the target's.
      draft_state: the proposer's.
    """

    generation: Generation
    accepted: jax.Array
    features: jax.Array | None
    target_cache: KVCache
    draft_state: Any


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


def capacity_for(num_tokens: int, num_drafts: int) -> int:
    """Returns the slots that sequences of up to `num_tokens` tokens need.

    A round's rows reach 2K slots past the committed tokens at most. Rounded up to 128, so that
    requests of similar size share a program.
    """
    return -(-(num_tokens + 2 * num_drafts + 1) // 128) * 128


def prefill_rows(batch: int, prompt_rows: int) -> int:
    """Returns the rows of each sequence that one pass of a prefill takes.

    Args:
      batch: B.
      prompt_rows: rows to read, a power of two or fewer than a pass takes.
    """
    return min(prompt_rows, max(1, PREFILL_ROWS // batch))


@functools.partial(
    jax.jit,
    static_argnames=("prompt_rows", "num_logprobs"),
    donate_argnames=("target_cache", "draft_cache"),
)
def generate_tokens(
    target: Frozen[Target],
    proposer: Proposer,
    request: Request,
    target_cache: KVCache,
    draft_cache: Any,
    last_round: jax.Array | int = 2**31 - 1,
    prefix: Prefix | None = None,
    *,
    prompt_rows: int,
    num_logprobs: int | None = None,
) -> State:
    """Generates until every sequence meets a stop id or its budget, or for so many rounds.

    Args:
      target: the model whose text it is.
      proposer: what drafts.
      request: the prompts.
      target_cache: `KVCache.zeros(...)` of capacity C for blocks of K + 1 rows; donated.
      draft_cache: `proposer.new_cache(...)` of capacity C; donated.
      last_round: rounds to run at most.
      prefix: tokens that the caches hold already, the first of every prompt and not all of any.
      prompt_rows: rows to read after the prefix, so that
        `lengths <= prefix.length + prompt_rows <= C`; a multiple of `prefill_rows`. Static.
      num_logprobs: n of `Logprobs`; None for none. Static.

    Returns:
      the state after the last round.
    """
    model = target.merge()
    state = _prefill(
        model, proposer, request, target_cache, draft_cache, prefix, prompt_rows, num_logprobs
    )
    return _run_rounds(model, proposer, request, state, last_round)


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
    reading = _read(target.merge(), proposer, request, target_cache, draft_cache, None, prompt_rows)
    return reading.target_cache, reading.draft_state, Prefix(length, reading.feature)


@functools.partial(jax.jit, donate_argnames="state")
def continue_generation(
    target: Frozen[Target],
    proposer: Proposer,
    request: Request,
    state: State,
    last_round: jax.Array | int,
) -> State:
    """Goes on from a state, which is donated, up to round `last_round`; as `generate_tokens`."""
    return _run_rounds(target.merge(), proposer, request, state, last_round)


def _run_rounds(
    model: Target, proposer: Proposer, request: Request, state: State, last_round: jax.Array | int
) -> State:
    return jax.lax.while_loop(
        lambda s: ~jnp.all(s.generation.done) & (s.generation.rounds < last_round),
        lambda s: _round(model, proposer, request, s),
        state,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Reading:
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


def _prefill(
    model: Target,
    proposer: Proposer,
    request: Request,
    target_cache: KVCache,
    draft_cache: Any,
    prefix: Prefix | None,
    prompt_rows: int,
    num_logprobs: int | None,
) -> State:
    """Reads the prompts and emits the first token of each."""
    batch, capacity = request.tokens.shape
    reading = _read(model, proposer, request, target_cache, draft_cache, prefix, prompt_rows)
    x, feature = reading.last, reading.feature
    nothing = jnp.zeros((batch,), jnp.int32)
    rows = jnp.zeros((batch, capacity), jnp.int32)
    logprobs = None
    if num_logprobs is not None:
        shape = (batch, capacity, num_logprobs)
        logprobs = Logprobs(
            jnp.zeros((batch, capacity)), jnp.zeros(shape, jnp.int32), jnp.zeros(shape)
        )
    generation = Generation(
        request.tokens, request.lengths, jnp.int32(0), rows, request.budgets < 1, logprobs
    )
    no_drafts = jnp.zeros((batch, 0), jnp.int32)
    generation, _ = _verify(request, generation, model.logits(x), no_drafts, None)
    if feature is not None:  # only the last prompt row waits to be drafted from
        feature = jnp.pad(feature, ((0, 0), (0, proposer.num_drafts), (0, 0)))  # [B, K + 1, F]
    return State(generation, nothing, feature, reading.target_cache, reading.draft_state)


def _read(
    model: Target,
    proposer: Proposer,
    request: Request,
    target_cache: KVCache,
    draft_cache: Any,
    prefix: Prefix | None,
    prompt_rows: int,
) -> _Reading:
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
) -> tuple[_Reading, jax.Array]:
    """Returns the reading after the prefix or, without one, after the first pass; and its place."""
    batch = request.tokens.shape[0]
    draft_state = proposer.start(model, draft_cache)
    if prefix is not None:
        x = jnp.zeros((batch, 1, model.config.hidden_size), target_cache.keys[0].dtype)
        reading = _Reading(target_cache, draft_state, x, prefix.feature, prefix.feature)
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
        draft_state = proposer.read(
            model,
            tokens[:, 1:],
            features[:, :-1],
            positions[:, :-1],
            jnp.minimum(request.lengths, size) - 1,
            draft_state,
            empty=True,
        )
    at = jnp.minimum(request.lengths, size)[:, None, None] - 1
    last = jnp.take_along_axis(x, at, axis=1)
    if features is None:
        return _Reading(target_cache, draft_state, last, None, None), jnp.int32(size)
    feature = jnp.take_along_axis(features, at, axis=1)
    reading = _Reading(target_cache, draft_state, last, feature, features[:, -1:])
    return reading, jnp.int32(size)


def _read_pass(
    model: Target,
    proposer: Proposer,
    request: Request,
    start: jax.Array,
    size: int,
    reading: _Reading,
) -> _Reading:
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
        return _Reading(target_cache, draft_state, last, None, None)
    # The drafter's rows stand one place behind: they hold the next token.
    shifted = jnp.concatenate([reading.tail, features[:, :-1]], axis=1)
    draft_state = proposer.read(model, tokens, shifted, positions - 1, counts, draft_state)
    feature = updated(reading.feature, features)
    return _Reading(target_cache, draft_state, last, feature, features[:, -1:])


def _round(model: Target, proposer: Proposer, request: Request, state: State) -> State:
    """Draft, verify, accept, commit."""
    past = state.generation
    seen = Committed(past.tokens, past.lengths, state.accepted, state.features, past.rounds)
    drafts, draft_law, draft_state = proposer.propose(
        model, state.draft_state, seen, request.sampling
    )  # [B, K]

    last = jnp.take_along_axis(past.tokens, past.lengths[:, None] - 1, axis=1)  # [B, 1]
    rows = jnp.concatenate([last, jnp.maximum(drafts, 0)], axis=1)  # [B, K + 1]
    positions = past.lengths[:, None] - 1 + jnp.arange(rows.shape[1], dtype=jnp.int32)
    x, features, target_cache = model(
        rows, positions, cached(state.target_cache, positions), proposer.aux_boundaries
    )
    past = dataclasses.replace(past, rounds=past.rounds + 1)
    generation, accepted = _verify(request, past, model.logits(x), drafts, draft_law)
    return State(generation, accepted, features, target_cache, draft_state)


def _verify(
    request: Request,
    past: Generation,
    logits: jax.Array,
    drafts: jax.Array,
    draft_law: jax.Array | None,
) -> tuple[Generation, jax.Array]:
    """Accepts drafts `[B, K]` by the target's `logits` `[B, K + 1, V]`, and commits."""
    if request.sampling is None:
        accepted, tokens = accept_greedy(drafts, logits)
    else:
        processed = processed_logits(
            logits,
            request.sampling,
            past.tokens,
            request.lengths,
            past.lengths,
            drafts,
            request.stop_ids,
        )
        law = probabilities(processed, request.sampling)
        accepted, tokens = accept_sampled(drafts, draft_law, law, request.sampling, past.lengths)
    logprobs = past.logprobs
    if logprobs is not None:
        every = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(every, tokens[..., None], axis=-1)[..., 0]
        top, top_ids = jax.lax.top_k(every, logprobs.top.shape[-1])
        logprobs = jax.tree.map(
            functools.partial(_append, start=past.lengths),
            logprobs,
            Logprobs(chosen, top_ids, top),
        )
    past = dataclasses.replace(past, logprobs=logprobs)
    return _commit(request, past, accepted, tokens), accepted


def _commit(
    request: Request, past: Generation, accepted: jax.Array, tokens: jax.Array
) -> Generation:
    """Appends a round's tokens up to the first stop id and the budget.

    Args:
      request: stop ids and budgets.
      past: the sequences before the round.
      accepted: `[B]` int32.
      tokens: `[B, R]` int32, of which the first `accepted + 1` are good.
    """
    room = request.lengths + request.budgets - past.lengths  # [B]
    is_stop = jnp.any(tokens[..., None] == request.stop_ids[:, None], axis=-1)  # [B, R]
    any_stop = jnp.any(is_stop, axis=1)
    to_stop = jnp.where(any_stop, jnp.argmax(is_stop, axis=1) + 1, tokens.shape[1])
    emitted = jnp.minimum(jnp.minimum(accepted + 1, to_stop), room).astype(jnp.int32)
    emitted = jnp.where(past.done, 0, emitted)
    stopped = any_stop & (emitted == to_stop)
    return dataclasses.replace(
        past,
        # What lies past the length is written again or never read.
        tokens=_append(past.tokens, tokens, start=past.lengths),
        emitted_in=_append(
            past.emitted_in, jnp.broadcast_to(past.rounds, tokens.shape), start=past.lengths
        ),
        lengths=past.lengths + emitted,
        done=past.done | stopped | (emitted >= room),
    )


def _append(rows: jax.Array, new: jax.Array, *, start: jax.Array) -> jax.Array:
    """Writes `new` `[B, R, ...]` into `rows` `[B, C, ...]` from each sequence's `start` on."""

    def write(row: jax.Array, values: jax.Array, at: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(row, values.astype(row.dtype), at, axis=0)

    return jax.vmap(write)(rows, new, start)
