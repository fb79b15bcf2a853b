"""Which drafts the target keeps, and the token that it adds itself."""

import jax
import jax.numpy as jnp

from peagle_jax.decoding.sampling import Purpose, Sampling, draw, gumbel, uniform


def accept_greedy(drafts: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Accepts the longest prefix of drafts that the target would have chosen itself.

    The emitted tokens are a function of the target alone: whatever the drafts are, they are
    its argmax chain.

    Args:
      drafts: `[B, K]` int32; negative for "no draft".
      logits: `[B, K + 1, V]`, the target's rows over [last token, drafts].

    Returns:
      accepted `[B]` int32 in 0..K, and tokens `[B, K + 1]` int32, of which the first
      `accepted + 1` are the accepted drafts and the target's own next token.
    """
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)  # [B, K + 1]
    agrees = (drafts == tokens[:, :-1]).astype(jnp.int32)  # [B, K]
    return jnp.cumprod(agrees, axis=1).sum(axis=1, dtype=jnp.int32), tokens


def accept_sampled(
    drafts: jax.Array,
    draft_law: jax.Array | None,
    law: jax.Array,
    sampling: Sampling,
    lengths: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Accepts drafts so that what is emitted has the target's law (speculative sampling).

    A draft x is accepted with probability min(1, p(x) / q(x)); the first rejected one is
    replaced by a draw from max(p - q, 0), and if all are accepted a token is drawn from the last
    row's p (arXiv 2211.17192, appendix A.1). A greedy row's p is one token's, which makes this
    the rule of `accept_greedy`.

    Args:
      drafts: `[B, K]` int32; negative for "no draft".
      draft_law: q, `[B, K, V]` float32, what the drafts were drawn from; None where they were
        not drawn (argmax), so that q is one token's.
      law: p, `[B, K + 1, V]` float32.
      sampling: the seeds.
      lengths: `[B]` int32, absolute position of row 0's token.

    Returns:
      as `accept_greedy`.
    """
    num_drafts = drafts.shape[1]
    positions = lengths[:, None] + jnp.arange(num_drafts)  # [B, K]
    index = jnp.maximum(drafts, 0)[..., None]
    p = jnp.take_along_axis(law[:, :num_drafts], index, axis=-1)[..., 0]  # [B, K]
    q = 1.0 if draft_law is None else jnp.take_along_axis(draft_law, index, axis=-1)[..., 0]
    chance = uniform(sampling.seeds, positions, Purpose.ACCEPT)
    keeps = (drafts >= 0) & (chance * q < p)  # never where p is 0
    accepted = jnp.cumprod(keeps.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)

    at = accepted[:, None, None]
    own = jnp.take_along_axis(law, at, axis=1)  # [B, 1, V]
    if num_drafts > 0:
        if draft_law is None:  # a negative id gives all zeros
            draft_law = jax.nn.one_hot(drafts, law.shape[-1], dtype=law.dtype)
        rejected = jnp.take_along_axis(draft_law, jnp.minimum(at, num_drafts - 1), axis=1)
        rest = jnp.maximum(own - jnp.where(at < num_drafts, rejected, 0), 0)
        # Rounding can leave nothing where p and q are all but equal.
        own = jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, own)
    noise = gumbel(sampling.seeds, (lengths + accepted)[:, None], Purpose.TOKEN, law.shape[-1])
    token = draw(own, noise)  # [B, 1]
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    return accepted, jnp.where(jnp.arange(num_drafts + 1) < accepted[:, None], padded, token)
