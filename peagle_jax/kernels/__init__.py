"""Array kernels: attention and matrix products. They know shapes and platforms, not models."""

from peagle_jax.kernels.attention import attention, masked_attention
from peagle_jax.kernels.experts import Product, mix_experts
from peagle_jax.kernels.linear import linear

__all__ = ["Product", "attention", "linear", "masked_attention", "mix_experts"]
