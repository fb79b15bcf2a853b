"""Which drafts the target keeps."""

import jax
import jax.numpy as jnp


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
