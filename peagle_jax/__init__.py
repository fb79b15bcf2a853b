"""Lossless P-EAGLE speculative decoding in JAX: the same text, in fewer passes of the target."""

from peagle_jax.batch import PromptPrefix
from peagle_jax.generate import generate, prefill, stream
from peagle_jax.load import LoadedDrafter, LoadedTarget, load_drafter, load_target
from peagle_jax.results import (
    Acceptance,
    Completion,
    GenerationResult,
    Metrics,
    Piece,
    TokenLogprobs,
)
from peagle_jax.sampling_params import SamplingParams

__all__ = [
    "Acceptance",
    "Completion",
    "GenerationResult",
    "LoadedDrafter",
    "LoadedTarget",
    "Metrics",
    "Piece",
    "PromptPrefix",
    "SamplingParams",
    "TokenLogprobs",
    "generate",
    "load_drafter",
    "load_target",
    "prefill",
    "stream",
]
