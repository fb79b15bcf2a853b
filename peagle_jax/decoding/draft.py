"""Where drafts come from: nowhere, a P-EAGLE head's one pass, an EAGLE-3 head's K, or a script.

A proposer is a pytree that goes into the program as an argument. Its `num_drafts` is static, the
K of the program. A negative draft id stands for "no draft" and is never accepted.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from peagle_jax.decoding.sampling import (
    GREEDY_TEMPERATURE,
    Purpose,
    Sampling,
    draw,
    gumbel,
)
from peagle_jax.models import Drafter, Frozen, KVCache, Target, cached


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Committed:
    """What a proposer may look at when it drafts.

    Attributes:
      tokens: `[B, C]` int32, the committed tokens of each sequence.
      length: `[B]` int32, how many they are.
      accepted: `[B]` int32, drafts accepted in the last round (0 after the prefill).
      features: `[B, K + 1, F]`, the target's features at the positions of the last round's
        rows, which begin at `length - accepted - 2`; None if the proposer needs none.
      rounds: `[]` int32, rounds done.
    """

    tokens: jax.Array
    length: jax.Array
    accepted: jax.Array
    features: jax.Array | None
    rounds: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptRows:
    """Rows of the prompts, each the feature at a position with the token after it.

    Attributes:
      tokens: `[B, T]` int32, at `positions + 1`.
      features: `[B, T, F]`.
      positions: `[B, T]` int32, consecutive.
      counts: `[B]`, how many of the rows are of the sequence's prompt.
    """

    tokens: jax.Array
    features: jax.Array
    positions: jax.Array
    counts: jax.Array


# Drafts [B, K] int32 (target ids), the law [B, K, V] that they were drawn from (None where they
# are the most likely ones), and the proposer's new state.
Proposal = tuple[jax.Array, jax.Array | None, Any]


class Proposer(Protocol):
    """Makes K drafts a round for every sequence."""

    @property
    def num_drafts(self) -> int:
        """K, static."""

    @property
    def aux_boundaries(self) -> tuple[int, ...]:
        """Boundaries of the target whose residual streams make the feature."""

    def new_cache(self, batch: int, capacity: int, dtype: jnp.dtype) -> Any:
        """Returns the proposer's empty cache, a pytree that is donated to the program."""

    def start(self, target: Target, cache: Any) -> Any:
        """Returns its state before the prompts, or after those that the cache holds."""

    def read(self, target: Target, rows: PromptRows, state: Any, empty: bool = False) -> Any:
        """Reads rows of the prompts and returns the new state; `empty`: the first ones (static)."""

    def propose(
        self, target: Target, state: Any, seen: Committed, sampling: Sampling | None
    ) -> Proposal:
        """Makes the drafts."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoDraft:
    """Plain decoding.

    Attributes:
      num_drafts: rows of junk verified beside each token. 0 for plain decoding; K for plain
        decoding in the same K + 1 row program as a drafter's, whose rounding it then shares.
    """

    num_drafts: int = dataclasses.field(default=0, metadata={"static": True})
    aux_boundaries: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    def new_cache(self, batch: int, capacity: int, dtype: jnp.dtype) -> tuple[()]:
        """Returns nothing: there is nothing to remember."""
        del batch, capacity, dtype
        return ()

    def start(self, target: Target, cache: tuple[()]) -> tuple[()]:
        """Returns nothing."""
        del target
        return cache

    def read(
        self, target: Target, rows: PromptRows, state: tuple[()], empty: bool = False
    ) -> tuple[()]:
        """Returns nothing."""
        del target, rows, empty
        return state

    def propose(
        self, target: Target, state: tuple[()], seen: Committed, sampling: Sampling | None
    ) -> Proposal:
        """Returns K times "no draft" for each sequence."""
        del target, sampling
        return jnp.full((seen.length.shape[0], self.num_drafts), -1, jnp.int32), None, state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftState:
    """A drafter between rounds.

    Attributes:
      cache: its KV cache.
      mask_row: `[H]`, the projection of `mask_hidden`; None for a head without mask slots.
    """

    cache: KVCache
    mask_row: jax.Array | None


@dataclasses.dataclass(frozen=True)
class _HeadDraft:
    """What the two ways to draft with a head have in common.

    Attributes:
      drafter: the head.
      num_drafts: K.
      aux_boundaries: those of the head's config.
      sample: sampled sequences draw their drafts at their temperature, instead of taking the
        most likely ones.
    """

    drafter: Frozen[Drafter]
    num_drafts: int = dataclasses.field(metadata={"static": True})
    aux_boundaries: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    sample: bool = dataclasses.field(default=False, metadata={"static": True})

    def new_cache(self, batch: int, capacity: int, dtype: jnp.dtype) -> KVCache:
        """Returns the drafter's empty KV cache."""
        config = self.drafter.merge().config
        return KVCache.zeros(config, batch, capacity, dtype, block=2 * self.num_drafts)

    def start(self, target: Target, cache: KVCache) -> DraftState:
        """Returns the state before the prompts, or after those that the cache holds."""
        del target
        drafter = self.drafter.merge()
        has_mask = drafter.config.mask_token_id is not None
        return DraftState(cache, drafter.project(drafter.mask_hidden[...]) if has_mask else None)

    def read(
        self, target: Target, rows: PromptRows, state: DraftState, empty: bool = False
    ) -> DraftState:
        """Runs the drafter over prompt rows.

        The last row of a prompt waits for its token, the first generated one; the first round
        drafts from it.
        """
        drafter = self.drafter.merge()
        attend = cached(state.cache, rows.positions, rows.counts, empty)
        hidden = drafter.project(rows.features)
        _, cache = drafter(rows.tokens, hidden, rows.positions, attend, target)
        return DraftState(cache, state.mask_row)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ParallelDraft(_HeadDraft):
    """P-EAGLE: K drafts from one causal pass of 2K rows per sequence (2602.01469, section 3).

    The rows stand at consecutive positions. The first `accepted + 1` are the tokens accepted in
    the last round with the target's features (they overwrite what mask slots left in the
    cache), the others are mask slots; the K logits are read from row `accepted` on. Causality
    hides the rows after those, and the next pass overwrites every slot that is not a token's.
    """

    def propose(
        self, target: Target, state: DraftState, seen: Committed, sampling: Sampling | None
    ) -> Proposal:
        """Makes the K drafts."""
        assert seen.features is not None and state.mask_row is not None
        drafter, drafts = self.drafter.merge(), self.num_drafts
        offsets = jnp.arange(2 * drafts, dtype=jnp.int32)
        positions = (seen.length - seen.accepted - 2)[:, None] + offsets  # [B, 2K]
        is_real = offsets <= seen.accepted[:, None]  # [B, 2K]
        tokens = jnp.take_along_axis(seen.tokens, positions + 1, axis=1)
        tokens = jnp.where(is_real, tokens, jnp.int32(drafter.config.mask_token_id))
        hidden = drafter.project(seen.features)  # [B, K + 1, H]
        # The K - 1 rows appended here are mask slots whatever was accepted.
        hidden = jnp.pad(hidden, ((0, 0), (0, drafts - 1), (0, 0)))
        hidden = jnp.where(is_real[..., None], hidden, state.mask_row)  # [B, 2K, H]
        x, cache = drafter(tokens, hidden, positions, cached(state.cache, positions), target)
        read = seen.accepted[:, None] + jnp.arange(drafts)  # [B, K]
        x = jnp.take_along_axis(x, read[..., None], axis=1)  # [B, K, H]
        at = seen.length[:, None] + jnp.arange(drafts, dtype=jnp.int32)
        ids, law = _choose(drafter, drafter.logits(x, target), at, sampling, self.sample)
        return ids, law, DraftState(cache, state.mask_row)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AutoregressiveDraft(_HeadDraft):
    """EAGLE-3: K drafts from K passes, each fed the drafter's own last state and draft.

    The first pass reads the tokens accepted in the last round with the target's features, as
    that of `ParallelDraft` does; its rows after those are junk that later rows overwrite.
    """

    def propose(
        self, target: Target, state: DraftState, seen: Committed, sampling: Sampling | None
    ) -> Proposal:
        """Makes the K drafts, one after the other."""
        assert seen.features is not None
        drafter, drafts = self.drafter.merge(), self.num_drafts
        offsets = jnp.arange(drafts + 1, dtype=jnp.int32)
        positions = (seen.length - seen.accepted - 2)[:, None] + offsets  # [B, K + 1]
        tokens = jnp.take_along_axis(seen.tokens, positions + 1, axis=1)
        hidden = drafter.project(seen.features)  # [B, K + 1, H]
        x, cache = drafter(tokens, hidden, positions, cached(state.cache, positions), target)
        x = jnp.take_along_axis(x, seen.accepted[:, None, None], axis=1)  # [B, 1, H]
        ids, laws = [], []
        for step in range(drafts):
            at = seen.length[:, None] + step  # [B, 1], the draft's position
            draft, law = _choose(drafter, drafter.logits(x, target), at, sampling, self.sample)
            ids.append(draft)
            laws.append(law)
            if step < drafts - 1:  # the row of a token stands one place before it
                attend = cached(cache, at - 1)
                x, cache = drafter(draft, drafter.fed_back(x), at - 1, attend, target)
        drawn = [law for law in laws if law is not None]  # all of them or none
        law = jnp.concatenate(drawn, axis=1) if drawn else None
        return jnp.concatenate(ids, axis=1), law, DraftState(cache, state.mask_row)


def _choose(
    drafter: Drafter,
    logits: jax.Array,
    at: jax.Array,
    sampling: Sampling | None,
    sample: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Picks drafts from logits over the draft vocabulary.

    Args:
      drafter: knows the draft vocabulary.
      logits: `[B, T, D_V]` float32.
      at: `[B, T]` int32, absolute positions of the drafts.
      sampling: how sequences are sampled.
      sample: draw the drafts of sampled sequences.

    Returns:
      drafts `[B, T]` int32, target ids; and the law `[B, T, V]` over target ids that they were
      drawn from, None where none was drawn.
    """
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if sampling is None or not sample:
        return drafter.to_target_ids(best), None
    greedy = sampling.temperature < GREEDY_TEMPERATURE  # [B]
    scaled = logits / jnp.where(greedy, 1.0, sampling.temperature)[:, None, None]
    one = jax.nn.one_hot(best, logits.shape[-1], dtype=logits.dtype)
    law = jnp.where(greedy[:, None, None], one, jax.nn.softmax(scaled, axis=-1))
    drawn = draw(law, gumbel(sampling.seeds, at, Purpose.DRAFT, logits.shape[-1]))
    return drafter.to_target_ids(drawn), drafter.over_target_ids(law)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScriptedDraft:
    """Drafts known beforehand, with a set acceptance: for tests and benchmarks of the engine.

    Attributes:
      continuation: `[B, C]` int32, the tokens that plain decoding gives, at their places.
      accepts: `[R]` int32, drafts that are right in round r, counted modulo R.
      beside: the proposer that is run beside the script, so that a round costs what it costs
        with it; its drafts are used where `continuation` is negative.
    """

    continuation: jax.Array
    accepts: jax.Array
    beside: NoDraft | ParallelDraft | AutoregressiveDraft

    @property
    def num_drafts(self) -> int:
        """K of the proposer run beside the script."""
        return self.beside.num_drafts

    @property
    def aux_boundaries(self) -> tuple[int, ...]:
        """Those of the proposer run beside the script."""
        return self.beside.aux_boundaries

    def new_cache(self, batch: int, capacity: int, dtype: jnp.dtype) -> Any:
        """Returns the cache of the proposer run beside the script."""
        return self.beside.new_cache(batch, capacity, dtype)

    def start(self, target: Target, cache: Any) -> Any:
        """Starts the proposer run beside the script."""
        return self.beside.start(target, cache)

    def read(self, target: Target, rows: PromptRows, state: Any, empty: bool = False) -> Any:
        """Has the proposer run beside the script read the rows."""
        return self.beside.read(target, rows, state, empty)

    def propose(
        self, target: Target, state: Any, seen: Committed, sampling: Sampling | None
    ) -> Proposal:
        """Returns the continuation's next K tokens, wrong from the set number on."""
        fallback, law, state = self.beside.propose(target, state, seen, sampling)
        ahead = jnp.arange(self.num_drafts, dtype=jnp.int32)
        right = jnp.take_along_axis(self.continuation, seen.length[:, None] + ahead, axis=1)
        accepts = self.accepts[seen.rounds % self.accepts.shape[0]]
        wrong = (right + 1) % target.config.vocab_size
        drafts = jnp.where(ahead < accepts, right, wrong)
        drafts = jnp.where(right < 0, fallback, drafts)
        if law is not None:  # what the script says was not drawn
            sure = jax.nn.one_hot(drafts, law.shape[-1], dtype=law.dtype)
            law = jnp.where((right < 0)[..., None], law, sure)
        return drafts, law, state
