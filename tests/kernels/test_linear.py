"""Every form of the product against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.kernels import linear


@pytest.mark.parametrize("features", [7, 32, 32768])
@pytest.mark.parametrize("rows", [1, 2, 4, 6, 8, 9, 16, 40])
def test_linear_equals_float64(rows: int, features: int) -> None:
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 48), np.float32)
    weight = rng.standard_normal((features, 48), np.float32)
    bias = rng.standard_normal((features,), np.float32)
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    out = jax.jit(linear)(*map(jnp.asarray, (x, weight)))
    np.testing.assert_allclose(out, exact, atol=3e-5)
    out = linear(*map(jnp.asarray, (x[None], weight, bias)))
    assert out.shape == (1, rows, features)
    np.testing.assert_allclose(out[0], exact + bias, atol=3e-5)


@pytest.mark.parametrize("rows", [2, 4, 8, 12])
def test_a_row_does_not_depend_on_its_place(rows: int) -> None:
    """What `exact=True` rests on: a row's bits are the same in every place of the block."""
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.standard_normal((960, 576), np.float32))
    x = rng.standard_normal((rows, 576), np.float32)
    product = jax.jit(linear)
    out = np.asarray(product(jnp.asarray(x), weight))
    for shift in range(1, rows):
        rolled = np.asarray(product(jnp.asarray(np.roll(x, shift, axis=0)), weight))
        np.testing.assert_array_equal(np.roll(out, shift, axis=0), rolled)
