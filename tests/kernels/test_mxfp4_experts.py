"""The MXFP4 kernel, simulated, against float64 products with a table of the codes' values."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import FAMILIES, randomise
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from peagle_jax.kernels import mix_experts, mxfp4_product, mxfp4_supports
from peagle_jax.kernels.attention import Implementation
from peagle_jax.kernels.mosaic import Interpret
from peagle_jax.kernels.mxfp4_experts import LEFT, TILE, WORD, WORDS
from peagle_jax.models.moe import MoE

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TABLE = np.concatenate([VALUES, -VALUES])
BFLOAT16 = ml_dtypes.bfloat16


def slow(*values: Any) -> Any:
    """Returns a parameter of tests, marked."""
    return pytest.param(*values, marks=pytest.mark.slow)


class Case:
    """Random rows in blocks and packed weights, whose unused blocks and experts are poisoned."""

    def __init__(
        self,
        dtype: np.dtype,
        experts: list[int],
        features: int,
        inputs: int,
        size: int = 8,
        scales: tuple[int, int] = (115, 125),
        seed: int = 0,
    ):
        rng = np.random.default_rng(seed)
        count = max(experts) + 1
        self.experts = np.asarray(experts, np.int32)
        self.rows = rng.standard_normal((len(experts), size, inputs)).astype(dtype)
        self.codes = rng.integers(0, 256, (count, features, inputs // 32, 16), np.uint8)
        self.scales = rng.integers(*scales, (count, features, inputs // 32), np.uint8, True)

    def __call__(self, used: int, interpret: Interpret = True) -> np.ndarray:
        arrays = self.rows, self.experts, np.int32(used), self.codes, self.scales
        return np.asarray(mxfp4_product(*map(jnp.asarray, arrays), interpret=interpret))

    def expected(self) -> np.ndarray:
        codes = np.stack([self.codes & 15, self.codes >> 4], axis=-1)  # low bits first
        factors = 2.0 ** (self.scales.astype(int) - 127)
        values = TABLE[codes] * factors[..., None, None]
        weights = values.reshape(*self.scales.shape[:2], -1)
        return np.einsum("bni,boi->bno", self.rows.astype(np.float64), weights[self.experts])


def assert_close(out: np.ndarray, expected: np.ndarray, dtype: np.dtype) -> None:
    assert out.dtype == np.float32
    assert out.shape == expected.shape
    error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    assert error < (1e-5 if dtype == np.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.float32])
def test_product_equals_float64(dtype: np.dtype) -> None:
    """GPT-OSS in small: odd multiples of 64, 45 = 5 x 9 words a row, an expert in two blocks."""
    case = Case(dtype, [0, 2, 2], 192, 576)
    assert_close(case(3), case.expected(), dtype)


def test_float32_rows_lose_nothing() -> None:
    """Where the second and third parts of the rows are all that is left of them."""
    case = Case(np.float32, [0], 64, 64)
    case.rows[:, :, 1::2] = -case.rows[:, :, ::2] * np.float32(1 + 2.0**-12)
    case.codes[:] = 0x22  # all weights are equal: the sums are differences
    case.scales[:] = 127
    assert_close(case(1), case.expected(), np.dtype(np.float32))


@pytest.mark.parametrize("scales", [(40, 41), (157, 158), (97, 157)])
def test_scales_of_the_whole_range(scales: tuple[int, int]) -> None:
    """Every feature by itself, since the largest scale hides all others."""
    case = Case(np.dtype(BFLOAT16), [0], 64, 64, scales=scales)
    error = np.linalg.norm(case(1) - case.expected(), axis=1)
    assert (error < 1e-5 * np.linalg.norm(case.expected(), axis=1)).all()


def test_every_code_is_exact() -> None:
    """All 256 bytes; each row picks one input."""
    case = Case(np.dtype(BFLOAT16), [0], 64, 64, size=64)
    case.codes = np.arange(64 * 32, dtype=np.uint8).reshape(1, 64, 2, 16)
    case.rows[0] = np.eye(64)
    np.testing.assert_array_equal(case(1), case.expected())


def test_unused_blocks_and_experts_are_not_touched() -> None:
    case = Case(np.dtype(BFLOAT16), [1, 3, 3], 64, 128)
    expected = case.expected()[:2]
    case.scales[[0, 2]] = 255
    case.rows[2] = np.nan
    np.testing.assert_allclose(case(2)[:2], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from([64, 128, 192]),
    st.sampled_from([64, 192, 448]),
    st.sampled_from([8, 24]),
    st.lists(st.integers(0, 2), min_size=1, max_size=2),
    st.integers(0, 99),
)
def test_any_shape(features: int, inputs: int, size: int, experts: list[int], seed: int) -> None:
    case = Case(np.dtype(BFLOAT16), experts, features, inputs, size, seed=seed)
    assert_close(case(len(experts)), case.expected(), np.dtype(BFLOAT16))


def test_no_races() -> None:
    """More steps than slots, so that slots are filled again."""
    case = Case(np.dtype(BFLOAT16), [0], 64, 64 * 7 * 5)
    out = case(1, plgpu.InterpretGPUParams(detect_races=True))
    assert_close(out, case.expected(), np.dtype(BFLOAT16))


def test_shapes_that_the_kernel_does_not_take() -> None:
    assert mxfp4_supports(5760, 2880)
    assert not mxfp4_supports(96, 64)
    assert not mxfp4_supports(64, 96)
    case = Case(np.dtype(BFLOAT16), [0], 64, 96)
    with pytest.raises(ValueError, match="no MXFP4 kernel for rows"):
        case(1)


def tiled(array: np.ndarray, layout: plgpu.Layout) -> np.ndarray:
    """Returns the array's elements by warp, lane and register, as Mosaic's layouts are defined."""
    for tile in layout.to_mgpu().tiling.tiles:
        lead, tail = array.shape[: -len(tile)], array.shape[-len(tile) :]
        split = [n for whole, part in zip(tail, tile, strict=True) for n in (whole // part, part)]
        array = array.reshape(*lead, *split)
        first = len(lead)
        outer, inner = (range(first + i, array.ndim, 2) for i in (0, 1))
        array = array.transpose(*range(first), *outer, *inner)
    return array


def test_a_words_halves_are_its_lanes_numbers() -> None:
    """The GPU takes words `[64, 8]` for numbers `[64, 16]`, which is not simulated."""
    word, left = WORD.to_mgpu(), LEFT.to_mgpu()
    assert (word.warp_dims, word.lane_dims) == (left.warp_dims, left.lane_dims)
    assert word.registers_shape((TILE, WORDS)) == left.registers_shape((TILE, 2 * WORDS))
    words = tiled(np.arange(TILE * WORDS).reshape(TILE, WORDS), WORD)
    numbers = tiled(np.arange(2 * TILE * WORDS).reshape(TILE, 2 * WORDS), LEFT)
    np.testing.assert_array_equal(numbers, 2 * words + [0, 1])


class Layer:
    """A mixture of experts as GPT-OSS has them, in widths that the kernel takes."""

    def __init__(self, rows: int, dtype: np.dtype, seed: int = 0):
        base = FAMILIES["gpt_oss"]
        moe = dataclasses.replace(base.moe, num_experts=4, num_experts_per_token=2)
        moe = dataclasses.replace(moe, intermediate_size=64)
        config = dataclasses.replace(base, hidden_size=64, moe=moe)
        layer = randomise(MoE(config, jnp.dtype(dtype), nnx.Rngs(0)), seed)
        self.graph, state = nnx.split(layer)
        floats = (jnp.float32, jnp.bfloat16)
        self.state = jax.tree.map(lambda x: x.astype(dtype) if x.dtype in floats else x, state)
        x = np.random.default_rng(seed).standard_normal((rows, 64))
        self.x = jnp.asarray(x.astype(dtype))

    def __call__(self, implementation: Implementation) -> np.ndarray:
        @jax.jit
        def mixed(state: nnx.State, x: jax.Array) -> jax.Array:
            layer = nnx.merge(self.graph, state)
            assert layer.packed
            experts = layer.config.num_experts, layer.expert, layer.packed_experts
            return mix_experts(x, *layer.route(x), *experts, implementation=implementation)

        out = mixed(self.state, self.x)
        assert out.dtype == self.x.dtype
        return np.asarray(out, np.float64)


@pytest.mark.parametrize(
    ("rows", "dtype"), [slow(1, BFLOAT16), (11, BFLOAT16), slow(3, np.float32)]
)
def test_a_layer_by_the_kernel_equals_xla(rows: int, dtype: np.dtype) -> None:
    """Among 11 rows with 2 of 4 experts each some choose the same; 5 or 6 rows is the mean."""
    layer = Layer(rows, np.dtype(dtype))
    out, expected = layer("pallas"), layer("xla")
    error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    assert error < (1e-5 if dtype == np.float32 else 1e-2)


def test_a_cpu_does_not_simulate_unasked() -> None:
    layer = Layer(3, np.dtype(np.float32))
    np.testing.assert_array_equal(layer("auto"), layer("xla"))
