"""The law that tokens are drawn from: logits processors, for all verified rows at once.

Order, as in vLLM: allowed and banned ids, minimum length, bias; penalties; temperature; min-p;
top-k; top-p. Every row sees the drafts before it as emitted.

Randomness is a function of a request's seed, the token's absolute position and what it is for, so
that a request draws the same numbers whatever else is in the batch.
"""

import dataclasses
import math
from collections.abc import Callable
from enum import IntEnum

import jax
import jax.numpy as jnp

# Below this temperature a row is greedy, as in vLLM.
GREEDY_TEMPERATURE = 1e-5


class Purpose(IntEnum):
    """What random numbers are for. Streams of different purposes are independent."""

    DRAFT = 0
    ACCEPT = 1
    TOKEN = 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Penalties:
    """What tokens pay for having occurred.

    Attributes:
      repetition: `[B]` float32, divides positive logits and multiplies negative ones of tokens
        in prompt or output; 1 for none.
      presence: `[B]` float32, subtracted from logits of tokens in the output.
      frequency: `[B]` float32, subtracted once for each occurrence in the output.
    """

    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How each sequence of a batch is sampled. A batch may mix greedy and sampled ones.

    Attributes:
      seeds: `[B, 2]` uint32, high and low half of a 64-bit seed.
      temperature: `[B]` float32, 0 for greedy.
      top_k: `[B]` int32, keeps the k largest logits (and ties with the last); 0 for all.
      top_p: `[B]` float32, keeps the smallest set of this probability (and ties with its last);
        1 for all.
      min_p: `[B]` float32, drops tokens below this share of the largest probability; 0 for none.
      min_new_tokens: `[B]` int32, ids that end a sequence are banned before so many tokens.
      bias: `[B, V]` float32, added to the logits; -inf bans a token. None for no bias anywhere.
      penalties: None where no sequence has any.
    """

    seeds: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    min_new_tokens: jax.Array
    bias: jax.Array | None
    penalties: Penalties | None


def uniform(seeds: jax.Array, positions: jax.Array, purpose: Purpose) -> jax.Array:
    """Returns `[B, R]` float32 in [0, 1) for tokens at absolute `positions` `[B, R]`."""
    return _each(jax.random.uniform, seeds, positions, purpose)


def gumbel(seeds: jax.Array, positions: jax.Array, purpose: Purpose, size: int) -> jax.Array:
    """Returns the noise that `draw` needs to draw one of `size` tokens at each position.

    Args:
      seeds: `[B, 2]` uint32.
      positions: `[B, R]` int32, absolute.
      purpose: what is drawn.
      size: V.

    Returns:
      Gumbel noise `[B, R, 2, W]` float32, W the square root of V rounded up.
    """
    # float32 noise of the usual kind ends at 16: tokens of p < 1e-7 could not be drawn, and those
    # of a large vocabulary together have too much probability for that.
    shape = (2, math.isqrt(size - 1) + 1)
    return _each(lambda key: jax.random.gumbel(key, shape, mode="high"), seeds, positions, purpose)


def _each(
    draw: Callable[[jax.Array], jax.Array],
    seeds: jax.Array,
    positions: jax.Array,
    purpose: Purpose,
) -> jax.Array:
    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return draw(jax.random.fold_in(jax.random.fold_in(key, position), purpose))

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(seeds, positions)


def processed_logits(
    logits: jax.Array,
    sampling: Sampling,
    tokens: jax.Array,
    prompt_lengths: jax.Array,
    lengths: jax.Array,
    drafts: jax.Array,
    stop_ids: jax.Array,
) -> jax.Array:
    """Applies everything that can change which token is the most likely one.

    Args:
      logits: `[B, K + 1, V]` float32; row i scores the token at position `lengths + i`.
      sampling: the settings.
      tokens: `[B, C]` int32, committed tokens.
      prompt_lengths: `[B]` int32.
      lengths: `[B]` int32, how many tokens are committed.
      drafts: `[B, K]` int32; negative for "no draft".
      stop_ids: `[B, E]` int32, ids that end a sequence; -1 for none.

    Returns:
      `[B, K + 1, V]` float32.
    """
    batch, rows, vocab = logits.shape
    emitted = (lengths - prompt_lengths)[:, None] + jnp.arange(rows)  # [B, K + 1]
    is_stop = jnp.any(stop_ids[..., None] == jnp.arange(vocab), axis=1)  # [B, V]
    too_early = emitted < sampling.min_new_tokens[:, None]
    logits = jnp.where(too_early[..., None] & is_stop[:, None], -jnp.inf, logits)
    if sampling.bias is not None:
        logits = logits + sampling.bias[:, None]
    if sampling.penalties is None:
        return logits

    penalties = jax.tree.map(lambda x: x[:, None, None], sampling.penalties)  # [B, 1, 1]
    slots = jnp.arange(tokens.shape[1])
    of_batch = jnp.arange(batch)[:, None]

    def counts(counted: jax.Array) -> jax.Array:  # [B, C] bool -> [B, V]
        return jnp.zeros((batch, vocab), jnp.int32).at[of_batch, tokens].add(counted)

    in_prompt = counts(slots < prompt_lengths[:, None]) > 0
    in_output = counts((slots >= prompt_lengths[:, None]) & (slots < lengths[:, None]))
    # Row i sees drafts 0..i-1; one_hot of a negative id is all zeros.
    drafted = jnp.cumsum(jax.nn.one_hot(drafts, vocab, dtype=jnp.int32), axis=1)  # [B, K, V]
    drafted = jnp.pad(drafted, ((0, 0), (1, 0), (0, 0)))
    occurrences = in_output[:, None] + drafted  # [B, K + 1, V]
    seen = in_prompt[:, None] | (occurrences > 0)
    repeated = jnp.where(logits > 0, logits / penalties.repetition, logits * penalties.repetition)
    logits = jnp.where(seen, repeated, logits)
    logits = logits - penalties.frequency * occurrences
    return logits - penalties.presence * (occurrences > 0)


def probabilities(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Returns the law `[B, R, V]` of `processed_logits` `[B, R, V]`: the whole of what is drawn.

    A greedy row's law is one token's.
    """
    greedy = sampling.temperature < GREEDY_TEMPERATURE  # [B]
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=logits.dtype)
    scaled = logits / jnp.where(greedy, 1.0, sampling.temperature)[:, None, None]
    highest = jnp.max(scaled, axis=-1, keepdims=True)
    # p / p_max is exp of the difference of the logits.
    floor = jnp.log(sampling.min_p)[:, None, None]  # -inf for none
    scaled = jnp.where(scaled - highest < floor, -jnp.inf, scaled)
    cut = jnp.any((sampling.top_k > 0) | (sampling.top_p < 1))
    scaled = jax.lax.cond(cut, lambda x: _top_k_top_p(x, sampling), lambda x: x, scaled)
    law = jax.nn.softmax(scaled, axis=-1)
    return jnp.where(greedy[:, None, None], best, law)


def _top_k_top_p(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Masks what is not among the top k, then what is not in the nucleus of those."""
    vocab = logits.shape[-1]
    descending = -jnp.sort(-logits, axis=-1)
    k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, vocab), vocab)
    last = jnp.broadcast_to((k - 1)[:, None, None], (*logits.shape[:-1], 1))
    least = jnp.take_along_axis(descending, last, axis=-1)  # [B, R, 1]
    shares = jax.nn.softmax(jnp.where(descending < least, -jnp.inf, descending), axis=-1)
    before = jnp.cumsum(shares, axis=-1) - shares  # probability of the more likely ones
    top_p = sampling.top_p[:, None, None]
    # The most likely one stays, and with 1 all do, though sums of shares round.
    kept = (before < top_p) | (jnp.arange(vocab) == 0) | (top_p >= 1)
    edge = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < jnp.maximum(least, edge), -jnp.inf, logits)


def draw(law: jax.Array, noise: jax.Array) -> jax.Array:
    """Draws from laws `[..., V]`, which need not be normalised, with `gumbel` noise for V.

    First one of W groups of W tokens and then one of its tokens: the largest of `log p + noise` is
    a draw from p, and random numbers for each token of a vocabulary cost more than all else here.
    """
    width = noise.shape[-1]
    padding = [(0, 0)] * (law.ndim - 1) + [(0, width * width - law.shape[-1])]
    groups = jnp.pad(law, padding).reshape(*law.shape[:-1], width, width)
    group = jnp.argmax(jnp.log(groups.sum(axis=-1)) + noise[..., 0, :], axis=-1)
    members = jnp.take_along_axis(groups, group[..., None, None], axis=-2)[..., 0, :]
    member = jnp.argmax(jnp.log(members) + noise[..., 1, :], axis=-1)
    return (group * width + member).astype(jnp.int32)
