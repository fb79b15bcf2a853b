"""The target: one decoder-only model, its family chosen by `TargetConfig`."""

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.config import TargetConfig
from peagle_jax.kernels import linear
from peagle_jax.models.block import Block, hidden_norm
from peagle_jax.models.cache import KVCache
from peagle_jax.models.layers import Attend, parameter, rope_rotation


class Target(nnx.Module):
    """A Llama, Qwen3, Qwen3-MoE or GPT-OSS language model.

    Args:
      config: architecture.
      dtype: of weights and activations.
      rngs: random state of the initialisation.
    """

    def __init__(self, config: TargetConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        table = (config.vocab_size, config.hidden_size)
        self.embedding = parameter(table, dtype, rngs)
        self.layers = nnx.List(
            Block(config, layer, dtype, rngs) for layer in range(config.num_layers)
        )
        self.final_norm = hidden_norm(config, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = parameter(table, dtype, rngs)
        self.config = config

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        attend: Attend,
        aux_boundaries: tuple[int, ...] = (),
    ) -> tuple[jax.Array, jax.Array | None, KVCache]:
        """Runs the decoder blocks.

        Args:
          tokens: `[B, T]` int32.
          positions: `[B, T]` int32, absolute.
          attend: where keys and values are kept and read (`cached` or `masked`).
          aux_boundaries: boundaries whose residual streams make the feature; 0 is the
            embedding's output, i the stream entering layer i, L the stream after the last
            layer, before the final norm.

        Returns:
          the residual stream after the last block `[B, T, H]` (give it to `logits`), the
          feature `[B, T, F]` or None without boundaries, and the layers' keys and values.
        """
        config = self.config
        x = self.embedding[...][tokens]  # [B, T, H]
        rotation = rope_rotation(config.rope, config.head_dim, positions, x.dtype)
        boundaries = [x]
        kept = []
        for block in self.layers:
            x, pair = block(x, rotation, attend)
            boundaries.append(x)
            kept.append(pair)
        feature = None
        if aux_boundaries:
            feature = jnp.concatenate([boundaries[b] for b in aux_boundaries], axis=-1)
        return x, feature, KVCache(*(tuple(arrays) for arrays in zip(*kept, strict=True)))

    def logits(self, x: jax.Array) -> jax.Array:
        """Returns the logits `[..., V]`, float32, of residual streams `[..., H]`."""
        return linear(self.final_norm(x), self.head).astype(jnp.float32)

    @property
    def head(self) -> jax.Array:
        """The matrix `[V, H]` that makes logits: `lm_head`, or the tied embedding."""
        return (self.embedding if self.config.tie_word_embeddings else self.lm_head)[...]
