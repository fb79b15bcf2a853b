"""Attention against a float64 reference that loops over heads and rows."""

import functools
import importlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_reference import reference, ring

from peagle_jax.kernels import attention
from peagle_jax.kernels.attention import block_rows
from peagle_jax.kernels.mosaic import devices_serve
from peagle_jax.models.cache import ring_positions


@pytest.mark.parametrize("group", [1, 2, 3, 8])
@pytest.mark.parametrize("sinks", [None, 1.0, 30.0])
@pytest.mark.parametrize(("window", "slots"), [(None, 40), (1, 6), (5, 10), (5, 17), (64, 40)])
def test_attention_equals_float64(
    group: int, sinks: float | None, window: int | None, slots: int
) -> None:
    """Rings of just window + T - 1 slots, larger ones, and ones that never turn."""
    rng = np.random.default_rng(group)
    q = rng.standard_normal((3, 6, 2 * group, 16), np.float32)
    k, v = (rng.standard_normal((3, 2, 40, 16), np.float32) for _ in range(2))
    positions = np.array([0, 13, 34])[:, None] + np.arange(6)
    logits = None if sinks is None else sinks * rng.standard_normal(2 * group).astype(np.float32)
    newest = positions[:, -1]
    kept = (ring(x, newest, slots) for x in (k, v))
    held = jnp.arange(slots) if window is None else ring_positions(jnp.asarray(newest), slots)
    out = attention(*map(jnp.asarray, (q, *kept, positions)), held, window, logits)
    np.testing.assert_allclose(out, reference(q, k, v, positions, window, logits), atol=1e-5)


def test_a_sink_takes_its_share() -> None:
    """Scores 1, 2, 0.5 and a sink of 1.5, as worked out by hand."""
    scores = np.array([1.0, 2.0, 0.5], np.float32)
    keys = jnp.asarray(scores)[None, None, :, None].repeat(2, axis=3) / 2**0.5  # q = (1, 1), D = 2
    values = jnp.eye(3)[None, None, :, :2]  # shows the first two weights
    args = jnp.ones((1, 1, 1, 2)), keys, values, jnp.array([[2]]), jnp.arange(3)
    out = attention(*args, sinks=jnp.array([1.5]))
    np.testing.assert_allclose(out[0, 0, 0], [0.167405097, 0.455054234], rtol=1e-6)


@pytest.mark.parametrize("score_bytes", [1 << 28, 1000, 1])
def test_long_prefill_is_the_same_in_pieces(
    score_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of 8 rows, whole and in blocks of one row or a few."""
    module = importlib.import_module("peagle_jax.kernels.attention")
    monkeypatch.setattr(module, "PIECE_ROWS", 8)
    monkeypatch.setattr(module, "SCORE_BYTES", score_bytes)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s, np.float32) for s in ((1, 30, 4, 8), *[(1, 2, 30, 8)] * 2))
    positions = np.arange(30)[None]
    for own, window in ((False, None), (True, None), (True, 1), (True, 5), (True, 30)):
        arrays = map(jnp.asarray, (q, k, v, positions, positions))
        out = attention(*arrays, window, own=own)
        np.testing.assert_allclose(out, reference(q, k, v, positions, window), atol=1e-5)


def test_bfloat16_keeps_float32_softmax() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(s, np.float32) for s in ((2, 3, 4, 8), *[(2, 2, 50, 8)] * 2))
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    positions = np.array([[40, 41, 42], [3, 4, 5]])
    out = attention(q, k, v, jnp.asarray(positions), jnp.arange(50))
    assert out.dtype == jnp.bfloat16
    exact = reference(*(np.asarray(x, np.float32) for x in (q, k, v)), positions, None)
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=1e-2)


def test_blocks_keep_the_scores_small() -> None:
    """GPT-OSS, 8 prompts of 32k: 4 rows a block; what fits is not cut."""
    assert block_rows(1024, 8 * 64 * 32768) == 4
    assert block_rows(1024, 9 * 1024) == 1024
    assert block_rows(30, 1 << 24) == 2  # the largest power of two that divides it
    assert block_rows(7, 1 << 30) == 1


def custom_calls(platform: str, head_dim: int, dtype: str, implementation: str | None) -> int:
    """Counts Pallas kernels in a program that is lowered for a platform."""

    def call(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
        return attention(q, k, v, positions, jnp.arange(64), implementation=implementation)

    shapes = (1, 4, 2, head_dim), *[(1, 1, 64, head_dim)] * 2
    arrays = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]
    positions = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    lowered = jax.jit(call).trace(*arrays, positions).lower(lowering_platforms=(platform,))
    return lowered.as_text().count("custom_call @mosaic_gpu")


@pytest.mark.parametrize(
    ("platform", "head_dim", "dtype", "implementation", "kernels"),
    [
        ("cuda", 64, "bfloat16", None, 1),
        ("cuda", 128, "float16", "auto", 1),
        ("cuda", 128, "bfloat16", "xla", 0),
        ("cuda", 128, "float32", "auto", 0),
        ("cuda", 256, "bfloat16", "auto", 0),
        ("cpu", 64, "bfloat16", None, 0),
    ],
)
def test_the_choice(
    platform: str, head_dim: int, dtype: str, implementation: str | None, kernels: int
) -> None:
    assert custom_calls(platform, head_dim, dtype, implementation) == kernels


@pytest.mark.parametrize("length", [5, 70])
def test_both_kernels_by_the_entry_point(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among rows whose positions do not begin at 0. (Why one warpgroup: test_prefill_attention.)"""
    module = importlib.import_module("peagle_jax.kernels.prefill_attention")
    monkeypatch.setattr(module, "WARPGROUPS", 1)
    rng = np.random.default_rng(0)
    shapes = (2, length, 2, 16), *[(2, 1, length, 16)] * 2
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
    positions = np.broadcast_to(np.arange(length), (2, length))
    call = functools.partial(attention, window=4, own=True, implementation="pallas")
    out = jax.jit(call)(*map(jnp.asarray, (q, k, v, positions + 3, positions + 3)))
    np.testing.assert_allclose(out, reference(q, k, v, positions, 4), atol=1e-5)


@pytest.mark.parametrize(
    ("capabilities", "serve"),
    [
        ([], True),
        (["9.0"], True),
        (["10.0", "10.3"], True),
        (["8.9"], False),
        (["9.0", "12.0"], False),
    ],
)
def test_which_gpus_take_the_kernels(
    capabilities: list[str], serve: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [types.SimpleNamespace(platform="gpu", compute_capability=c) for c in capabilities]
    monkeypatch.setattr(jax, "local_devices", lambda: gpus)
    assert devices_serve() is serve
