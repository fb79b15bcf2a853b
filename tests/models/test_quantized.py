"""MXFP4 against a table of its values, and against the same model unpacked."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import GOLDEN

import peagle_jax
from peagle_jax.checkpoint import abstract_parameters, load_arrays, save
from peagle_jax.convert import to_native
from peagle_jax.models import Frozen, KVCache, Target, cached
from peagle_jax.models.quantized import unpack_mxfp4

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TABLE = np.concatenate([VALUES, -VALUES])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_code_and_scale_is_exact(dtype: np.dtype) -> None:
    """All 256 bytes under all scales that keep the products normal numbers."""
    scales = np.arange(3, 253, dtype=np.uint8)[:, None].repeat(16, axis=1)  # [250, 16]
    blocks = np.arange(256, dtype=np.uint8).reshape(16, 16)[None].repeat(250, axis=0)
    unpacked = jax.jit(unpack_mxfp4, static_argnums=2)(blocks, scales, dtype)
    assert unpacked.dtype == dtype
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1)  # low bits first
    expected = TABLE[codes] * 2.0 ** (scales.astype(int) - 127)[..., None, None]
    np.testing.assert_array_equal(np.asarray(unpacked, np.float64), expected.reshape(250, 512))


def test_the_sign_of_zero_is_kept() -> None:
    block = np.full((1, 1, 16), 0x80, np.uint8)
    unpacked = unpack_mxfp4(jnp.asarray(block), jnp.full((1, 1), 127, jnp.uint8), jnp.float32)
    np.testing.assert_array_equal(np.signbit(unpacked[0]), [False, True] * 16)


@jax.jit
def logits(target: Frozen[Target], tokens: jax.Array) -> jax.Array:
    model, (batch, length) = target.merge(), tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    cache = KVCache.zeros(model.config, batch, length, jnp.float32, block=length)
    x, *_ = model(tokens, positions, cached(cache, positions))
    return model.logits(x)


def test_packed_experts_give_the_logits_of_plain_ones(tmp_path: Path) -> None:
    """A converted MXFP4 checkpoint against the same weights unpacked beforehand, as bfloat16."""
    to_native(GOLDEN / "targets" / "gpt_oss_mxfp4", tmp_path / "packed")
    packed = peagle_jax.load_target(tmp_path / "packed")
    moe = dataclasses.replace(packed.config.moe, weights="plain")
    config = dataclasses.replace(packed.config, moe=moe)
    stored = load_arrays(tmp_path / "packed", abstract_parameters(packed.config))
    arrays = {}
    for name, array in stored.items():
        if name.endswith(".blocks"):
            scales = stored[name.replace(".blocks", ".scales")]
            codes = np.stack([array & 15, array >> 4], axis=-1)
            values = TABLE[codes] * 2.0 ** (scales.astype(int) - 127)[..., None, None]
            plain = values.reshape(*scales.shape[:-1], -1).astype(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(plain.astype(np.float64).reshape(values.shape), values)
            arrays[name.removesuffix(".blocks")] = jnp.asarray(plain)
        elif not name.endswith(".scales"):
            arrays[name] = jnp.asarray(array, jnp.bfloat16)
    save(tmp_path / "plain", config, arrays)
    plain_target = peagle_jax.load_target(tmp_path / "plain")
    tokens = jnp.asarray(np.load(GOLDEN / "targets" / "gpt_oss_mxfp4" / "golden.npz")["ids"])
    ours, theirs = (logits(t.weights, tokens) for t in (packed, plain_target))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
