"""Where drafts come from: nowhere, a P-EAGLE head's one parallel pass, or a script.

A proposer is a pytree that goes into the program as an argument. Its `num_drafts` is static, the
K of the program. A negative draft id stands for "no draft" and is never accepted.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

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

    def prefill(
        self,
        target: Target,
        tokens: jax.Array,
        lengths: jax.Array,
        features: jax.Array | None,
        cache: Any,
    ) -> Any:
        """Reads prompts `[B, P]` of lengths `[B]` and features `[B, P, F]`; returns its state."""

    def propose(self, target: Target, state: Any, seen: Committed) -> tuple[jax.Array, Any]:
        """Returns drafts `[B, K]` int32 (target ids) and the new state."""

    def finish(self, state: Any) -> Any:
        """Returns the cache out of the state, for the buffers to be handed back."""


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

    def prefill(
        self,
        target: Target,
        tokens: jax.Array,
        lengths: jax.Array,
        features: jax.Array | None,
        cache: tuple[()],
    ) -> tuple[()]:
        """Returns nothing."""
        del target, tokens, lengths, features
        return cache

    def propose(
        self, target: Target, state: tuple[()], seen: Committed
    ) -> tuple[jax.Array, tuple[()]]:
        """Returns K times "no draft" for each sequence."""
        del target
        return jnp.full((seen.length.shape[0], self.num_drafts), -1, jnp.int32), state

    def finish(self, state: tuple[()]) -> tuple[()]:
        """Returns nothing."""
        return state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftState:
    """A drafter between rounds.

    Attributes:
      cache: its KV cache.
      mask_row: `[H]`, the projection of `mask_hidden`; None without mask slots (K = 1).
    """

    cache: KVCache
    mask_row: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ParallelDraft:
    """P-EAGLE: K drafts from one causal pass of 2K rows per sequence (2602.01469, section 3).

    The rows stand at consecutive positions. The first `accepted + 1` are the tokens accepted in
    the last round with the target's features (they overwrite what mask slots left in the
    cache), the others are mask slots; the K logits are read from row `accepted` on. Causality
    hides the rows after those, and the next pass overwrites every slot that is not a token's.

    Attributes:
      drafter: the head.
      num_drafts: K.
      aux_boundaries: those of the head's config.
    """

    drafter: Frozen[Drafter]
    num_drafts: int = dataclasses.field(metadata={"static": True})
    aux_boundaries: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def new_cache(self, batch: int, capacity: int, dtype: jnp.dtype) -> KVCache:
        """Returns the drafter's empty KV cache."""
        config = self.drafter.merge().config
        return KVCache.zeros(config, batch, capacity, dtype, block=2 * self.num_drafts)

    def prefill(
        self,
        target: Target,
        tokens: jax.Array,
        lengths: jax.Array,
        features: jax.Array | None,
        cache: KVCache,
    ) -> DraftState:
        """Runs the drafter over the prompt rows.

        The last row of each prompt lacks its token, the first generated one; the first round
        feeds it again, complete, as it does every row past the prompt's end.
        """
        assert features is not None
        drafter = self.drafter.merge()
        batch, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        following = jnp.roll(tokens, -1, axis=1)  # [B, P]
        _, cache = drafter(
            following,
            drafter.project(features),
            positions,
            cached(cache, positions, lengths),
            target,
        )
        mask_row = drafter.project(drafter.mask_hidden[...]) if self.num_drafts > 1 else None
        return DraftState(cache, mask_row)

    def propose(
        self, target: Target, state: DraftState, seen: Committed
    ) -> tuple[jax.Array, DraftState]:
        """Makes the K drafts."""
        assert seen.features is not None
        drafter, drafts = self.drafter.merge(), self.num_drafts
        batch = seen.length.shape[0]
        offsets = jnp.arange(2 * drafts, dtype=jnp.int32)
        positions = (seen.length - seen.accepted - 2)[:, None] + offsets  # [B, 2K]
        hidden = drafter.project(seen.features)  # [B, K + 1, H]
        tokens = jnp.take_along_axis(seen.tokens, positions + 1, axis=1)  # [B, 2K]
        if state.mask_row is not None:
            mask_token = jnp.int32(drafter.config.mask_token_id)
            is_real = offsets <= seen.accepted[:, None]  # [B, 2K]
            tokens = jnp.where(is_real, tokens, mask_token)
            # The K - 1 rows appended here are mask slots whatever was accepted.
            hidden = jnp.pad(hidden, ((0, 0), (0, drafts - 1), (0, 0)))
            hidden = jnp.where(is_real[..., None], hidden, state.mask_row)  # [B, 2K, H]
        x, cache = drafter(tokens, hidden, positions, cached(state.cache, positions), target)
        read = seen.accepted[:, None] + jnp.arange(drafts)  # [B, K]
        x = jnp.take_along_axis(x, read[..., None], axis=1)  # [B, K, H]
        ids = jnp.argmax(drafter.logits(x, target), axis=-1).astype(jnp.int32)
        ids = drafter.to_target_ids(ids)
        return ids.reshape(batch, drafts), DraftState(cache, state.mask_row)

    def finish(self, state: DraftState) -> KVCache:
        """Returns the KV cache."""
        return state.cache


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
    beside: NoDraft | ParallelDraft

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

    def prefill(
        self,
        target: Target,
        tokens: jax.Array,
        lengths: jax.Array,
        features: jax.Array | None,
        cache: Any,
    ) -> Any:
        """Prefills the proposer run beside the script."""
        return self.beside.prefill(target, tokens, lengths, features, cache)

    def propose(self, target: Target, state: Any, seen: Committed) -> tuple[jax.Array, Any]:
        """Returns the continuation's next K tokens, wrong from the set number on."""
        fallback, state = self.beside.propose(target, state, seen)
        ahead = jnp.arange(self.num_drafts, dtype=jnp.int32)
        right = jnp.take_along_axis(self.continuation, seen.length[:, None] + ahead, axis=1)
        accepts = self.accepts[seen.rounds % self.accepts.shape[0]]
        wrong = (right + 1) % target.config.vocab_size
        drafts = jnp.where(ahead < accepts, right, wrong)
        return jnp.where(right < 0, fallback, drafts), state

    def finish(self, state: Any) -> Any:
        """Returns the cache of the proposer run beside the script."""
        return self.beside.finish(state)
