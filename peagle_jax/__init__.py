"""Lossless P-EAGLE speculative decoding in JAX: the same text, in fewer passes of the target."""

from peagle_jax.generate import Completion, GenerationResult, Metrics, generate
from peagle_jax.load import LoadedDrafter, LoadedTarget, load_drafter, load_target

__all__ = [
    "Completion",
    "GenerationResult",
    "LoadedDrafter",
    "LoadedTarget",
    "Metrics",
    "generate",
    "load_drafter",
    "load_target",
]
