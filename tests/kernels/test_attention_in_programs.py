"""The whole generation program with the Pallas kernels in interpret mode, against XLA's attention.

Prompts are read in two passes, one by the prefill's kernel without a cache, one beside it; the
rounds are the verification's kernel's: target and drafter, rings that turn, and sinks; and experts
in MXFP4 are their kernel's.
"""

import dataclasses
import functools
import importlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DRAFTER, FAMILIES, random_drafter, random_target

from peagle_jax.config import DecoderConfig, TargetConfig
from peagle_jax.decoding import ParallelDraft, Request, generate_tokens, reading
from peagle_jax.kernels import mix_experts
from peagle_jax.models import KVCache
from peagle_jax.models import moe as mixtures

entry = importlib.import_module("peagle_jax.kernels.attention")
prefill = importlib.import_module("peagle_jax.kernels.prefill_attention")

CAPACITY, ROWS, DRAFTS = 128, 24, 3
PROMPTS = [list(range(20, 39)), [5, 60, 33]]  # one of two passes, longer than the windows of 8
BUDGET = 6


@pytest.fixture(autouse=True)
def small_passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Passes of 12 rows, which are already many; programs are traced anew, and forgotten.

    One warpgroup, for interpret mode compiles what several do each time it is done.
    """
    monkeypatch.setattr(entry, "VERIFIED_ROWS", 2 * DRAFTS)
    monkeypatch.setattr(prefill, "WARPGROUPS", 1)
    monkeypatch.setattr(reading, "PREFILL_ROWS", ROWS // 2 * len(PROMPTS))
    yield
    generate_tokens.clear_cache()


def generated(target: TargetConfig, windows: tuple[int | None, ...]) -> tuple[np.ndarray, int]:
    """Returns the new tokens and the number of rounds."""
    loaded = random_target(target, seed=3)
    config = dataclasses.replace(
        DRAFTER,
        sliding_windows=windows,
        aux_boundaries=(0, 1, 2),
        target_hidden_size=target.hidden_size,
    )
    head = random_drafter(config)
    batch = len(PROMPTS)
    tokens = np.zeros((batch, CAPACITY), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in PROMPTS], np.int32)

    def cache(config: DecoderConfig, block: int) -> KVCache:
        empty = KVCache.zeros(config, batch, CAPACITY, jnp.float32, block)
        return jax.tree.map(lambda x: x + 100.0, empty)

    request = Request(
        jnp.asarray(tokens),
        jnp.asarray(lengths),
        jnp.full((batch,), BUDGET, jnp.int32),
        jnp.full((batch, 1), -1, jnp.int32),
        sampling=None,
    )
    generation = generate_tokens(
        loaded.weights,
        ParallelDraft(head.weights, DRAFTS, head.config.aux_boundaries),
        request,
        cache(loaded.config, DRAFTS + 1),
        cache(head.config, 2 * DRAFTS),
        prompt_rows=ROWS,
    ).generation
    at = lengths[:, None] + np.arange(BUDGET)
    return np.take_along_axis(np.asarray(generation.tokens), at, axis=1), int(generation.rounds)


def slow(*values: Any) -> Any:
    """Returns a parameter of tests, marked."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("family", "moe"), [("gpt_oss", False), slow("gpt_oss", True), slow("llama", False)]
)
def test_tokens_are_those_of_xla(family: str, moe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = (8, None) if family == "gpt_oss" else (None, None)
    config = FAMILIES[family]
    target = dataclasses.replace(config, num_layers=2, sliding_windows=windows, moe=None)
    if moe:  # at widths that their kernel takes
        assert config.moe is not None
        experts = dataclasses.replace(config.moe, layers=(True,) * 2, intermediate_size=64)
        target = dataclasses.replace(target, hidden_size=64, moe=experts)
    kernel, calls = entry._by_kernel, []

    def counted(window: int | None, interpret: bool, queries: jax.Array, *rest: Any) -> jax.Array:
        calls.append(queries.shape[1])
        return kernel(window, interpret, queries, *rest)

    monkeypatch.setattr(entry, "_by_kernel", counted)
    results = []
    for implementation in ("xla", "pallas"):
        monkeypatch.setattr(entry, "IMPLEMENTATION", implementation)
        by = functools.partial(mix_experts, implementation=implementation)
        monkeypatch.setattr(mixtures, "mix_experts", by)
        generate_tokens.clear_cache()
        results.append(generated(target, windows[::-1]))
    (expected, rounds), (tokens, pallas_rounds) = results
    np.testing.assert_array_equal(tokens, expected)
    assert rounds == pallas_rounds > 2
    assert len(np.unique(expected)) > 3
    assert {12, DRAFTS + 1, 2 * DRAFTS} <= set(calls)  # a pass, a verification, a draft
