"""The prefill's kernel in GPU interpret mode, over keys that are NaN where none is wanted."""

import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_reference import reference, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_jax.kernels import prefill_attention

module = importlib.import_module("peagle_jax.kernels.prefill_attention")
ACCURACY = {"float32": 1e-5, "bfloat16": 1e-2}


def check(
    counts: Sequence[int],
    length: int,
    group: int,
    head_dim: int = 64,
    firsts: Sequence[int] | None = None,
    slots: int | None = None,
    window: int | None = None,
    sinks: float | None = None,
    dtype: str = "float32",
    interpret: Any = True,
) -> None:
    """Compares the first `counts` of so many rows with float64.

    Args:
      counts: of each sequence.
      length: T.
      group: N; there is one KV head.
      head_dim: D.
      firsts: positions of the first rows; None for 0, without anything cached.
      slots: of a cache in which slots are positions; None for as many slots before the rows as a
        window needs, in the order of positions.
      window: as for the kernel.
      sinks: their scale.
      dtype: of all arrays.
      interpret: as for the kernel.
    """
    rng = np.random.default_rng(length)
    batch, count = len(counts), np.array(counts)
    first = np.zeros(batch, int) if firsts is None else np.array(firsts)
    positions = first[:, None] + np.arange(length)
    q = rng.standard_normal((batch, length, group, head_dim)).astype(jnp.dtype(dtype))
    shape = (batch, 1, positions.max() + 1, head_dim)
    k, v = (rng.standard_normal(shape).astype(jnp.dtype(dtype)) for _ in range(2))
    logits = None if sinks is None else sinks * rng.standard_normal(group).astype(np.float32)
    before = 0 if firsts is None else (window or 0)
    base = first - before if slots is None else np.zeros(batch, int)
    kept = np.full((2, batch, 1, slots or before + length, head_dim), np.nan, q.dtype)
    for b in range(batch):
        oldest = 0 if window is None else first[b] + 1 - window
        for position in range(max(base[b], oldest, 0), first[b] + count[b]):
            kept[0, b, :, position - base[b]] = k[b, :, position]
            kept[1, b, :, position - base[b]] = v[b, :, position]
    call = functools.partial(prefill_attention, window=window, interpret=interpret)
    out = jax.jit(call)(
        *map(jnp.asarray, (q, *kept)),
        *(jnp.asarray(x, jnp.int32) for x in (first, base, count)),
        sinks=None if logits is None else jnp.asarray(logits),
    )
    assert out.shape == q.shape and out.dtype == q.dtype and jnp.all(jnp.isfinite(out))
    wanted = np.arange(length) < count[:, None]
    exact = reference(q, k, v, positions, window, logits)[wanted]
    assert relative_error(np.asarray(out)[wanted], exact) < ACCURACY[dtype]


@pytest.fixture(autouse=True)
def one_warpgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret mode runs several in threads of XLA's pool, where they may wait for each other."""
    monkeypatch.setattr(module, "WARPGROUPS", 1)


@pytest.mark.parametrize(
    ("group", "head_dim", "dtype", "sinks"),
    [
        (3, 64, "bfloat16", 1.0),  # SmolLM
        (4, 128, "bfloat16", None),  # Llama-3 8B
        (5, 128, "float32", None),  # Qwen3 14B
        (8, 64, "bfloat16", 30.0),  # GPT-OSS
        (2, 64, "float32", 30.0),
    ],
)
def test_prompts(group: int, head_dim: int, dtype: str, sinks: float | None) -> None:
    """Lengths from nothing to all rows, which are no multiple of a tile or of 8."""
    check([0, 1, 32, 97], 97, group, head_dim, dtype=dtype, sinks=sinks)


@pytest.mark.parametrize("window", [1, 20, 64])
def test_windows(window: int) -> None:
    """Three tiles, of which the last do not read the first blocks."""
    check([150, 129], 150, 1, window=window, sinks=0.1)


def test_a_pass_over_a_cache() -> None:
    """Rows go on from where a sequence stands, which is another slot in each."""
    check([40, 30], 40, 2, firsts=[0, 51], slots=96)


def test_a_pass_over_what_a_ring_held() -> None:
    """The slots before position 0 are empty."""
    check([70, 60], 70, 1, firsts=[3, 90], window=20)


@pytest.mark.slow
@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 140), "rows")
    cached = data.draw(st.booleans(), "cached")
    batch = data.draw(st.integers(1, 2), "batch")

    def each(most: int) -> list[int]:
        return data.draw(st.lists(st.integers(0, most), min_size=batch, max_size=batch))

    check(
        each(length),
        length,
        data.draw(st.integers(1, 8), "group"),
        data.draw(st.sampled_from([16, 64]), "head size"),
        firsts=each(60) if cached else None,
        slots=200 if cached else None,
        window=data.draw(st.none() | st.integers(1, 150), "window"),
        sinks=data.draw(st.none() | st.floats(0.1, 10), "sinks"),
        dtype=data.draw(st.sampled_from(sorted(ACCURACY)), "dtype"),
    )


RACE = """
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_prefill_attention import check
check([180, 20], 180, 1, interpret=plgpu.InterpretGPUParams(detect_races=True))
"""


def test_two_warpgroups_do_not_race() -> None:
    """Six blocks go through three stages. NPROC makes XLA's pool large enough for all threads."""
    subprocess.run(
        [sys.executable, "-c", RACE],
        cwd=Path(__file__).parent,
        env={**os.environ, "NPROC": "16", "JAX_PLATFORMS": "cpu"},
        check=True,
        timeout=120,
    )
