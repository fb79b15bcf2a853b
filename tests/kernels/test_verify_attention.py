"""The verification's kernel in GPU interpret mode; caches are NaN where no row looks."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_reference import reference, relative_error, ring
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from peagle_jax.kernels import verify_attention
from peagle_jax.kernels.verify_attention import BLOCK

ACCURACY = {"float32": 1e-5, "bfloat16": 1e-2}


def check(
    firsts: Sequence[int],
    length: int,
    slots: int,
    group: int,
    head_dim: int = 64,
    kv_heads: int = 1,
    window: int | None = None,
    sinks: float | None = None,
    dtype: str = "float32",
    parts: int | None = None,
    interpret: Any = True,
) -> None:
    """Compares sequences whose rows begin at `firsts` with float64.

    Without a window their keys lie in the slots of their positions, else in rings.
    """
    rng = np.random.default_rng(length)
    batch, heads = len(firsts), kv_heads * group
    first = np.array(firsts)
    positions = first[:, None] + np.arange(length)
    q = rng.standard_normal((batch, length, heads, head_dim)).astype(jnp.dtype(dtype))
    shape = (batch, kv_heads, max(positions.max() + 1, 1), head_dim)
    k, v = (rng.standard_normal(shape).astype(jnp.dtype(dtype)) for _ in range(2))
    logits = None if sinks is None else sinks * rng.standard_normal(heads).astype(np.float32)
    newest = positions[:, -1]
    base = np.where(newest < 0, -slots, newest // slots * slots)  # what slot 0 holds
    assert window is not None or max(base) <= 0
    if window is not None:
        for b, position in enumerate(first):  # what a ring still holds from before the window
            k[b, :, : max(0, position + 1 - window)] = np.nan
            v[b, :, : max(0, position + 1 - window)] = np.nan
    call = functools.partial(verify_attention, window=window, parts=parts, interpret=interpret)
    out = jax.jit(call)(
        *map(jnp.asarray, (q, *(ring(x, newest, slots, np.nan) for x in (k, v)))),
        jnp.asarray(first, jnp.int32),
        jnp.asarray(base, jnp.int32),
        sinks=None if logits is None else jnp.asarray(logits),
    )
    assert out.shape == q.shape and out.dtype == q.dtype
    assert relative_error(out, reference(q, k, v, positions, window, logits)) < ACCURACY[dtype]


@pytest.mark.parametrize(
    ("group", "head_dim", "kv_heads", "length"),
    [
        (4, 128, 1, 4),  # Llama-3 8B: a tile of 16 rows
        (8, 128, 1, 8),  # Llama-3 70B, Qwen3 32B, Qwen3-Coder-30B: of 64
        (2, 128, 2, 1),  # Qwen3 0.6B, plain decoding
        (5, 128, 1, 6),  # Qwen3 14B: of 32
        (8, 64, 1, 10),  # GPT-OSS, a draft of 5: two tiles
        (3, 64, 1, 4),  # SmolLM
    ],
)
def test_groups_and_heads(group: int, head_dim: int, kv_heads: int, length: int) -> None:
    check([0, 37], length, 72, group, head_dim, kv_heads, sinks=1.0, dtype="bfloat16", parts=2)


def test_lengths_around_the_edges_of_blocks() -> None:
    """From a sequence with no row at all to a full cache."""
    ends = [0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 100]
    check([end - 2 for end in ends], 2, 100, 1, parts=2)


@pytest.mark.parametrize(
    ("window", "slots", "sinks"),
    [
        (1, 4, None),
        (20, 23, 30.0),  # as many slots as a ring needs, in an odd number
        (40, 64, 0.1),
        (70, 96, 1.0),
    ],
)
def test_windows_in_rings(window: int, slots: int, sinks: float | None) -> None:
    """Not yet turned, just turned, and turned often; windows that begin within a block."""
    check([0, slots - 4, slots - 3, 151], 4, slots, 2, window=window, sinks=sinks, parts=2)


def test_a_window_in_a_long_cache() -> None:
    """What lies before the window is not even read: it is NaN."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((1, 2, 2, 64), np.float32))
    k, v = (rng.standard_normal((1, 1, 160, 64), np.float32) for _ in range(2))
    first, base, positions = jnp.array([150]), jnp.array([0]), np.array([[150, 151]])
    kept = (jnp.asarray(x).at[:, :, :141].set(jnp.nan).at[:, :, 152:].set(jnp.nan) for x in (k, v))
    out = verify_attention(q, *kept, first, base, 10, parts=2, interpret=True)
    assert relative_error(out, reference(q, k, v, positions, 10)) < 1e-5


@settings(max_examples=5, deadline=None, derandomize=True)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 7), "rows")
    window = data.draw(st.none() | st.integers(1, 50), "window")
    fewest = length if window is None else window + length - 1
    slots = data.draw(st.integers(fewest, 90), "slots")
    last = slots - length if window is None else 200
    check(
        data.draw(st.lists(st.integers(-length, last), min_size=1, max_size=3), "firsts"),
        length,
        slots,
        group=data.draw(st.integers(1, 8), "group"),
        head_dim=data.draw(st.sampled_from([16, 64]), "head size"),
        window=window,
        sinks=data.draw(st.none() | st.floats(0.1, 10), "sinks"),
        dtype=data.draw(st.sampled_from(sorted(ACCURACY)), "dtype"),
        parts=data.draw(st.integers(1, 3), "parts"),
    )


def test_no_race() -> None:
    """Six blocks go through three stages."""
    check([180], 4, 184, 2, parts=1, interpret=plgpu.InterpretGPUParams(detect_races=True))
