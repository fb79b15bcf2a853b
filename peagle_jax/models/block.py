"""The decoder block: attention, then a dense MLP or a mixture of experts."""

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.config import DecoderConfig
from peagle_jax.models.layers import Attend, Attention, GatedMLP, RMSNorm
from peagle_jax.models.moe import MoE


def hidden_norm(config: DecoderConfig, dtype: jnp.dtype) -> RMSNorm:
    """Returns a norm over the residual stream."""
    return RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, config.norm_weight_in_float32)


class Block(nnx.Module):
    """Pre-norm decoder block: `x += attention(norm(x)); x += mlp(norm(x))`."""

    def __init__(self, config: DecoderConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.attention_norm = hidden_norm(config, dtype)
        self.attention = Attention(config, layer, config.hidden_size, dtype, rngs)
        self.mlp_norm = hidden_norm(config, dtype)
        sparse = config.moe is not None and config.moe.layers[layer]
        self.mlp = (MoE if sparse else GatedMLP)(config, dtype, rngs)

    def __call__(
        self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], attend: Attend
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Returns the residual stream after the block `[B, T, H]` and its (keys, values)."""
        out, kept = self.attention(self.attention_norm(x), rotation, attend)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), kept
