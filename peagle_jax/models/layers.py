"""The parts of a decoder block that the target and the drafter share.

Modules hold weights in the checkpoint's `[out, in]` order, the query, key and value weights
fused into one, the gate and up weights into another. Attention does not know where keys and values
are kept: it hands its rows to an `Attend` function and gets the attention's output back.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from peagle_jax.config import DecoderConfig, RopeConfig
from peagle_jax.kernels import linear

# (layer, queries [B, T, N, D], keys [B, N_kv, T, D], values [B, N_kv, T, D], window, sinks [N])
#   -> (output [B, T, N, D], that layer's (keys, values) to keep)
Attend = Callable[
    [int, jax.Array, jax.Array, jax.Array, int | None, jax.Array | None],
    tuple[jax.Array, tuple[jax.Array, jax.Array]],
]


def parameter(shape: tuple[int, ...], dtype: jnp.dtype, rngs: nnx.Rngs) -> nnx.Param:
    """Returns a weight drawn from N(0, 0.02), the published models' initialisation.

    It is drawn in float32: bfloat16 would give 128 different numbers, whose mean is not 0.
    """
    return nnx.Param((0.02 * jax.random.normal(rngs.params(), shape)).astype(dtype))


class RMSNorm(nnx.Module):
    """Root mean square normalisation over the last axis.

    The variance is float32. Llama and Qwen3 cast the normalised value back before the weight
    multiplies it, GPT-OSS after that (`weight_in_float32`).
    """

    def __init__(self, size: int, eps: float, dtype: jnp.dtype, weight_in_float32: bool = False):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps
        self.weight_in_float32 = weight_in_float32

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., size]
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if self.weight_in_float32:
            return (self.weight[...].astype(jnp.float32) * (wide * scale)).astype(x.dtype)
        return (wide * scale).astype(x.dtype) * self.weight[...]


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Returns the angle per position of each rotated pair, `[D / 2]` float32, radians.

    All kinds but the default stretch a pair's wavelength by `factor`, or keep it, or something
    between; they differ in which pairs they keep.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    base = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.kind == "default":
        return base
    if rope.kind == "linear":
        keep = np.zeros_like(base)
    elif rope.kind == "llama3":
        turns = rope.original_max_position_embeddings * base / (2 * np.pi)  # in the old context
        ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = np.clip(ramp, 0.0, 1.0)
    else:
        keep = _yarn_keep(rope, head_dim)
    return (keep * base + (1 - keep) * base / rope.factor).astype(np.float32)


def _yarn_keep(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Returns how much of each pair's own frequency YaRN keeps, `[D / 2]` from 1 down to 0."""

    def index(turns: float) -> float:  # of the pair that turns so often in the old context
        wavelength = rope.original_max_position_embeddings / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low or 0.001  # as the published code does where both meet
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / span
    return 1 - np.clip(ramp, 0.0, 1.0)


def rope_rotation(
    rope: RopeConfig, head_dim: int, positions: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin, `[B, T, 1, D / 2]`, of `positions` `[B, T]`; no table to run off."""
    angles = positions[..., None, None].astype(jnp.float32) * rope_frequencies(rope, head_dim)
    rotation = tuple(
        (turn(angles) * rope.attention_factor).astype(dtype) for turn in (jnp.cos, jnp.sin)
    )
    # Else XLA fuses the cosines into every layer and every head, and computes them there again.
    return jax.lax.optimization_barrier(rotation)


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates `[B, T, N, D]` by rotate-half RoPE: pair i is (x[i], x[i + D/2])."""
    cos, sin = rotation
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Attention(nnx.Module):
    """Grouped-query self-attention with RoPE.

    Args:
      config: sizes; the input may be wider than H (a drafter's first block reads 2H).
      layer: index, which picks the window and names the cache's layer.
      input_size: width of the input rows.
      dtype: of the weights.
      rngs: random state of the initialisation.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        input_size: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        q_size, kv_size = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        fused = q_size + 2 * kv_size
        self.qkv = parameter((fused, input_size), dtype, rngs)
        self.out = parameter((config.hidden_size, q_size), dtype, rngs)
        if config.attention_bias:
            self.qkv_bias = nnx.Param(jnp.zeros((fused,), dtype))
        if config.attention_output_bias:
            self.out_bias = nnx.Param(jnp.zeros((config.hidden_size,), dtype))
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
        if config.attention_sinks:
            self.sinks = nnx.Param(jnp.zeros((config.num_heads,), dtype))
        self.config = config
        self.layer = layer

    def __call__(
        self, x: jax.Array, rotation: tuple[jax.Array, jax.Array], attend: Attend
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Returns the block's attention output `[B, T, H]` and the layer's (keys, values)."""
        config = self.config
        batch, length, _ = x.shape
        qkv = linear(x, self.qkv[...], self.qkv_bias[...] if config.attention_bias else None)
        qkv = qkv.reshape(batch, length, -1, config.head_dim)  # [B, T, N + 2 N_kv, D]
        split = (config.num_heads, config.num_heads + config.num_kv_heads)
        queries, keys, values = jnp.split(qkv, split, axis=2)
        if config.qk_norm:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = rotate(queries, rotation), rotate(keys, rotation)
        out, kept = attend(
            self.layer,
            queries,
            keys.swapaxes(1, 2),
            values.swapaxes(1, 2),
            config.sliding_windows[self.layer],
            self.sinks[...] if config.attention_sinks else None,
        )
        out = out.reshape(batch, length, -1)
        bias = self.out_bias[...] if config.attention_output_bias else None
        return linear(out, self.out[...], bias), kept


class GatedMLP(nnx.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`, gate and up fused into one weight `[2I, H]`."""

    def __init__(self, config: DecoderConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = parameter((2 * inner, hidden), dtype, rngs)
        self.down = parameter((hidden, inner), dtype, rngs)
        if config.mlp_bias:
            self.gate_up_bias = nnx.Param(jnp.zeros((2 * inner,), dtype))
            self.down_bias = nnx.Param(jnp.zeros((hidden,), dtype))
        self.bias = config.mlp_bias

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, H] -> [B, T, H]
        fused = linear(x, self.gate_up[...], self.gate_up_bias[...] if self.bias else None)
        gate, up = jnp.split(fused, 2, axis=-1)
        inner = jax.nn.silu(gate) * up  # [B, T, I]
        return linear(inner, self.down[...], self.down_bias[...] if self.bias else None)
