"""The target, the drafter and their KV cache, as Flax NNX modules without decoding policy."""

from peagle_jax.models.cache import KVCache, cached, masked, spread
from peagle_jax.models.drafter import Drafter
from peagle_jax.models.frozen import Frozen
from peagle_jax.models.target import Target

__all__ = ["Drafter", "Frozen", "KVCache", "Target", "cached", "masked", "spread"]
