"""Mixture of experts: a router chooses k of E gated MLPs for every row (Qwen3-MoE, GPT-OSS)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.config import DecoderConfig
from peagle_jax.kernels import Blocks, Product, linear, mix_experts
from peagle_jax.kernels.mosaic import Interpret
from peagle_jax.models.layers import parameter
from peagle_jax.models.quantized import MXFP4


class MoE(nnx.Module):
    """The experts of one layer, each `down(activation(gate(x), up(x)))`.

    Gate and up are fused into one weight `[E, 2I, H]`, gate first, whatever the checkpoint did.
    """

    def __init__(self, config: DecoderConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        moe, hidden = config.moe, config.hidden_size
        assert moe is not None
        experts, inner = moe.num_experts, moe.intermediate_size
        self.router = parameter((experts, hidden), dtype, rngs)
        if moe.router_bias:
            self.router_bias = nnx.Param(jnp.zeros((experts,), dtype))
        shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
        self.gate_up, self.down = (
            MXFP4(shape) if moe.weights == "mxfp4" else parameter(shape, dtype, rngs)
            for shape in shapes
        )
        if moe.expert_bias:
            self.gate_up_bias = nnx.Param(jnp.zeros((experts, 2 * inner), dtype))
            self.down_bias = nnx.Param(jnp.zeros((experts, hidden), dtype))
        self.config = moe

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, H] -> [B, T, H]
        rows = x.reshape(-1, x.shape[-1])  # [R, H]
        chosen, weights = self.route(rows)
        experts = self.config.num_experts, self.expert, self.packed_experts if self.packed else None
        return mix_experts(rows, chosen, weights, *experts).reshape(x.shape)

    @property
    def packed(self) -> bool:
        """Whether a kernel takes the weights as they are packed."""
        return all(isinstance(w, MXFP4) and w.has_kernel for w in (self.gate_up, self.down))

    def route(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Chooses each row's experts.

        Args:
          rows: `[R, H]`.

        Returns:
          experts `[R, k]` int32, and their weights `[R, k]` in the dtype of `rows`.
        """
        moe = self.config
        logits = linear(rows, self.router[...], self.router_bias[...] if moe.router_bias else None)
        logits = logits.astype(jnp.float32)  # [R, E]
        if moe.router == "top_k_softmax":
            top, chosen = jax.lax.top_k(logits, moe.num_experts_per_token)
            weights = jax.nn.softmax(top, axis=-1)
        else:
            shares = jax.nn.softmax(logits, axis=-1)
            weights, chosen = jax.lax.top_k(shares, moe.num_experts_per_token)
            if moe.norm_topk_prob:
                weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return chosen, weights.astype(rows.dtype)

    def expert(self, index: jax.Array, rows: jax.Array, product: Product) -> jax.Array:
        """Computes the expert at `index` for rows `[T, H]`; returns `[T, H]`."""

        def of_one(rows: jax.Array, weights: nnx.Param | MXFP4) -> jax.Array:
            return product(rows, _weight(weights, index, rows.dtype))

        return self._gated(index, rows, of_one)

    def packed_experts(self, blocks: Blocks, rows: jax.Array, interpret: Interpret) -> jax.Array:
        """Computes each block's expert for its rows `[B, size, H]`, by a kernel."""

        def of_all(rows: jax.Array, weights: nnx.Param | MXFP4) -> jax.Array:
            assert isinstance(weights, MXFP4)
            return weights.product(rows, blocks, interpret)

        return self._gated(blocks.experts, rows, of_all)

    def _gated(
        self,
        index: jax.Array,
        rows: jax.Array,
        product: Callable[[jax.Array, nnx.Param | MXFP4], jax.Array],
    ) -> jax.Array:
        """Computes experts `[...]` for rows `[..., T, H]`, given their product with weights."""
        moe = self.config
        fused = product(rows, self.gate_up)
        if moe.expert_bias:
            fused = fused + self.gate_up_bias[...][index][..., None, :]
        gate, up = jnp.split(fused, 2, axis=-1)
        if moe.swiglu_limit is None:
            inner = jax.nn.silu(gate) * up  # [..., T, I]
        else:
            gate = jnp.minimum(gate, moe.swiglu_limit)
            up = jnp.clip(up, -moe.swiglu_limit, moe.swiglu_limit)
            inner = gate * jax.nn.sigmoid(moe.swiglu_alpha * gate) * (up + 1)
        out = product(inner, self.down)
        return out + self.down_bias[...][index][..., None, :] if moe.expert_bias else out


def _weight(weights: nnx.Param | MXFP4, index: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns one expert's weight `[out, in]`."""
    if isinstance(weights, MXFP4):
        return weights.unpack(index, dtype)
    return weights[...][index]
