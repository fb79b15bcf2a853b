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
from peagle_jax.decoding.reading import Prefix, Request, read_prompts
from peagle_jax.decoding.sampling import probabilities, processed_logits
from peagle_jax.decoding.verify import accept_greedy, accept_sampled
from peagle_jax.models import Frozen, KVCache, Target, cached


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

    @property
    def seen(self) -> Committed:
        """What a proposer may look at."""
        past = self.generation
        return Committed(past.tokens, past.lengths, self.accepted, self.features, past.rounds)


def capacity_for(num_tokens: int, num_drafts: int) -> int:
    """Returns the slots that sequences of up to `num_tokens` tokens need.

    A round's rows reach 2K slots past the committed tokens at most. Rounded up to 128, so that
    requests of similar size share a program.
    """
    return -(-(num_tokens + 2 * num_drafts + 1) // 128) * 128


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
    reading = read_prompts(model, proposer, request, target_cache, draft_cache, prefix, prompt_rows)
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


def _round(model: Target, proposer: Proposer, request: Request, state: State) -> State:
    """Draft, verify, accept, commit."""
    past = state.generation
    drafts, draft_law, draft_state = proposer.propose(
        model, state.draft_state, state.seen, request.sampling
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
