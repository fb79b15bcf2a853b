"""The decoding program: token ids and arrays in, token ids and arrays out."""

from peagle_jax.decoding.draft import (
    AutoregressiveDraft,
    NoDraft,
    ParallelDraft,
    Proposer,
    ScriptedDraft,
)
from peagle_jax.decoding.program import (
    Generation,
    Logprobs,
    State,
    capacity_for,
    continue_generation,
    generate_tokens,
)
from peagle_jax.decoding.reading import Prefix, Request, prefill_rows, read_prefix
from peagle_jax.decoding.sampling import Penalties, Sampling

__all__ = [
    "AutoregressiveDraft",
    "Generation",
    "Logprobs",
    "NoDraft",
    "ParallelDraft",
    "Penalties",
    "Prefix",
    "Proposer",
    "Request",
    "Sampling",
    "ScriptedDraft",
    "State",
    "capacity_for",
    "continue_generation",
    "generate_tokens",
    "prefill_rows",
    "read_prefix",
]
