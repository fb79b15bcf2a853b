"""The decoding program: token ids and arrays in, token ids and arrays out."""

from peagle_jax.decoding.draft import NoDraft, ParallelDraft, Proposer, ScriptedDraft
from peagle_jax.decoding.program import Generation, Request, capacity_for, generate_tokens

__all__ = [
    "Generation",
    "NoDraft",
    "ParallelDraft",
    "Proposer",
    "Request",
    "ScriptedDraft",
    "capacity_for",
    "generate_tokens",
]
