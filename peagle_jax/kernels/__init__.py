"""Array kernels: attention and matrix products. They know shapes and platforms, not models."""

from peagle_jax.kernels.attention import Implementation, attention, masked_attention
from peagle_jax.kernels.cod_attention import cod_attention, cod_attention_serves
from peagle_jax.kernels.experts import Blocks, Product, mix_experts
from peagle_jax.kernels.linear import linear
from peagle_jax.kernels.mxfp4_experts import mxfp4_product, mxfp4_supports
from peagle_jax.kernels.prefill_attention import prefill_attention
from peagle_jax.kernels.verify_attention import verify_attention

__all__ = [
    "Blocks",
    "Implementation",
    "Product",
    "attention",
    "cod_attention",
    "cod_attention_serves",
    "linear",
    "masked_attention",
    "mix_experts",
    "mxfp4_product",
    "mxfp4_supports",
    "prefill_attention",
    "verify_attention",
]
