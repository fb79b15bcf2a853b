"""The drafter: a P-EAGLE head (arXiv 2602.01469), which drafts K tokens in one pass.

A row pairs the token at position p + 1 with the target's feature of position p, and its logits
predict position p + 2. Where token and feature do not exist yet, a mask slot takes their place:
the mask token's embedding with one learned shared hidden state, `mask_hidden`, of the feature's
width. An EAGLE-3 head is the same module without `mask_hidden`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.config import DrafterConfig
from peagle_jax.kernels import linear
from peagle_jax.models.block import Block
from peagle_jax.models.cache import KVCache
from peagle_jax.models.layers import (
    Attend,
    Attention,
    GatedMLP,
    RMSNorm,
    parameter,
    rope_rotation,
)
from peagle_jax.models.quantized import Buffer
from peagle_jax.models.target import Target


class FirstBlock(nnx.Module):
    """Block 0: attends over [embedding; feature] (2H wide), with the feature as the residual."""

    def __init__(self, config: DrafterConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        eps, hidden = config.rms_norm_eps, config.hidden_size
        self.attention_norm = RMSNorm(hidden, eps, dtype)
        self.hidden_norm = RMSNorm(hidden, eps, dtype)
        self.attention = Attention(config, 0, 2 * hidden, dtype, rngs)
        self.mlp_norm = RMSNorm(hidden, eps, dtype)
        self.mlp = GatedMLP(config, dtype, rngs)
        self.norm_before_residual = config.norm_before_residual

    def __call__(
        self,
        embedded: jax.Array,
        hidden: jax.Array,
        rotation: tuple[jax.Array, jax.Array],
        attend: Attend,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Takes embeddings and projected features, both `[B, T, H]`; returns as `Block`."""
        normed = self.hidden_norm(hidden)
        both = jnp.concatenate([self.attention_norm(embedded), normed], axis=-1)  # [B, T, 2H]
        out, kept = self.attention(both, rotation, attend)
        x = (normed if self.norm_before_residual else hidden) + out
        return x + self.mlp(self.mlp_norm(x)), kept


class Drafter(nnx.Module):
    """A P-EAGLE or EAGLE-3 head.

    Args:
      config: architecture.
      dtype: of weights and activations.
      rngs: random state of the initialisation.
    """

    def __init__(self, config: DrafterConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        eps, hidden, features = config.rms_norm_eps, config.hidden_size, config.feature_size
        if config.own_embedding:
            self.embedding = parameter((config.vocab_size, hidden), dtype, rngs)
        if config.mask_token_id is not None:
            drawn = jax.random.normal(rngs.params(), (features,))
            self.mask_hidden = nnx.Param(drawn.astype(dtype))
        if config.norm_before_fc:
            self.input_norm = RMSNorm(features, eps, dtype)
        if config.fc_norm:
            self.fc_norm = nnx.List(
                RMSNorm(config.target_hidden_size, eps, dtype) for _ in config.aux_boundaries
            )
        self.fc = parameter((hidden, features), dtype, rngs)
        blocks = [Block(config, i, dtype, rngs) for i in range(1, config.num_layers)]
        self.layers = nnx.List([FirstBlock(config, dtype, rngs), *blocks])
        self.final_norm = RMSNorm(hidden, eps, dtype)
        if config.own_lm_head:
            self.lm_head = parameter((config.draft_vocab_size, hidden), dtype, rngs)
        if config.draft_vocab_size < config.vocab_size:
            self.d2t = Buffer(jnp.zeros((config.draft_vocab_size,), jnp.int32))
        self.config = config

    def project(self, feature: jax.Array) -> jax.Array:
        """Projects target features (or `mask_hidden`) `[..., F]` to `[..., H]`."""
        config = self.config
        if config.norm_before_fc:
            feature = self.input_norm(feature)
        if config.fc_norm:
            parts = jnp.split(feature, len(config.aux_boundaries), axis=-1)
            normed = [norm(p) for norm, p in zip(self.fc_norm, parts, strict=True)]
            feature = jnp.concatenate(normed, axis=-1)
        return linear(feature, self.fc[...])

    def __call__(
        self,
        tokens: jax.Array,
        hidden: jax.Array,
        positions: jax.Array,
        attend: Attend,
        target: Target,
        remat: bool = False,
    ) -> tuple[jax.Array, KVCache]:
        """Runs the decoder blocks.

        Args:
          tokens: `[B, T]` int32, row p holds the token at position p + 1, or the mask token.
          hidden: `[B, T, H]`, what `project` made of the row's feature or of `mask_hidden`.
          positions: `[B, T]` int32, the feature's position.
          attend: where keys and values are kept and read.
          target: whose embedding table a head without its own one shares.
          remat: keep nothing of a block but its inputs for a backward pass (static).

        Returns:
          the residual stream `[B, T, H]` (give it to `logits`), and the keys and values.
        """
        config = self.config
        table = self.embedding if config.own_embedding else target.embedding
        # A table that trains is float32 (`training.step`), whatever the rest is.
        embedded = table[...][tokens].astype(hidden.dtype)  # [B, T, H]
        rotation = rope_rotation(config.rope, config.head_dim, positions, embedded.dtype)
        first, *rest = self.layers

        def run(block: nnx.Module, *inputs: jax.Array) -> tuple[jax.Array, Any]:
            call = functools.partial(block, rotation=rotation, attend=attend)
            return (jax.checkpoint(call) if remat else call)(*inputs)

        x, pair = run(first, embedded, hidden)
        kept = [pair]
        for block in rest:
            x, pair = run(block, x)
            kept.append(pair)
        return x, KVCache(*(tuple(arrays) for arrays in zip(*kept, strict=True)))

    def logits(self, x: jax.Array, target: Target) -> jax.Array:
        """Returns logits over the draft vocabulary `[..., D_V]`, float32, of `x` `[..., H]`."""
        head = self.lm_head[...] if self.config.own_lm_head else target.head
        return linear(self.final_norm(x), head).astype(jnp.float32)

    def fed_back(self, x: jax.Array) -> jax.Array:
        """Returns what an autoregressive step after residual streams `[..., H]` is fed for them."""
        return self.final_norm(x) if self.config.norm_output else x

    def to_target_ids(self, draft_ids: jax.Array) -> jax.Array:
        """Maps ids of the draft vocabulary to the target's: `id + d2t[id]` (offsets)."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            return draft_ids
        return draft_ids + self.d2t[...][draft_ids]

    def over_target_ids(self, law: jax.Array) -> jax.Array:
        """Spreads a law `[..., D_V]` over the target's ids, `[..., V]`."""
        if self.config.draft_vocab_size == self.config.vocab_size:
            return law
        ids = self.to_target_ids(jnp.arange(self.config.draft_vocab_size))
        return jnp.zeros((*law.shape[:-1], self.config.vocab_size), law.dtype).at[..., ids].set(law)
