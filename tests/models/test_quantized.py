"""MXFP4 against a table of its values, and what its scales are."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

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
