"""Every schedule of the experts against NumPy's sum over all experts, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_jax.kernels import Product, experts, mix_experts

HIDDEN, INNER = 24, 16


class Case:
    """Random experts, rows and routes."""

    def __init__(self, num_rows: int, num_experts: int, k: int, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.num_experts = num_experts
        self.first = jnp.asarray(rng.standard_normal((num_experts, INNER, HIDDEN), np.float32))
        self.second = jnp.asarray(rng.standard_normal((num_experts, HIDDEN, INNER), np.float32))
        self.rows = jnp.asarray(rng.standard_normal((num_rows, HIDDEN), np.float32)) / HIDDEN**0.5
        popular = rng.dirichlet(np.full(num_experts, 0.3)) + 1e-6  # some experts get most rows
        shares = popular / popular.sum()
        chosen = [rng.choice(num_experts, k, replace=False, p=shares) for _ in range(num_rows)]
        self.chosen = jnp.asarray(np.stack(chosen).astype(np.int32))
        self.weights = jnp.asarray(rng.random((num_rows, k), np.float32))

    def expert(self, index: jax.Array, rows: jax.Array, product: Product) -> jax.Array:
        inner = jax.nn.relu(product(rows, self.first[index]))
        return product(inner, self.second[index])

    def expected(self) -> np.ndarray:
        arrays = (self.rows, self.first, self.second)
        rows, first, second = (np.asarray(array, np.float64) for array in arrays)
        inner = np.maximum(np.einsum("rh,eih->eri", rows, first), 0)
        every = np.einsum("eri,ehi->erh", inner, second)
        picked = every[np.asarray(self.chosen).T, np.arange(len(rows))]  # [k, R, H]
        return np.einsum("krh,rk->rh", picked, self.weights)


SHAPES = [
    (1, 8, 2),
    (1, 1, 1),
    (3, 8, 3),
    (8, 8, 8),
    (9, 4, 1),
    (40, 6, 2),
    (300, 4, 2),
    (7, 64, 5),
]


@pytest.mark.parametrize(("num_rows", "num_experts", "k"), SHAPES)
def test_the_mixture_is_the_weighted_sum(num_rows: int, num_experts: int, k: int) -> None:
    case = Case(num_rows, num_experts, k)
    out = jax.jit(mix_experts, static_argnames=("num_experts", "expert"))(
        case.rows, case.chosen, case.weights, num_experts=num_experts, expert=case.expert
    )
    np.testing.assert_allclose(out, case.expected(), atol=1e-5)


@pytest.mark.parametrize(("num_rows", "num_experts", "k"), SHAPES)
def test_the_schedules_agree(num_rows: int, num_experts: int, k: int) -> None:
    """Both on this platform, where one of them is not used."""
    case = Case(num_rows, num_experts, k)
    blocks = experts._by_block(case.rows, case.chosen, num_experts, case.expert)
    pairs = experts._by_pair(case.rows, case.chosen, case.expert)
    np.testing.assert_allclose(blocks, pairs, atol=1e-5)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.integers(1, 50), st.integers(1, 12), st.data())
def test_any_routes(num_rows: int, num_experts: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, num_experts))
    case = Case(num_rows, num_experts, k, data.draw(st.integers(0, 99)))
    out = mix_experts(case.rows, case.chosen, case.weights, num_experts, case.expert)
    np.testing.assert_allclose(out, case.expected(), atol=1e-5)


def test_only_experts_in_use_are_touched() -> None:
    """The weights of the others are NaN, and NaN times a weight of 0 would show."""
    case = Case(5, 16, 2)
    unused = np.setdiff1d(np.arange(16), case.chosen)
    assert len(unused) > 4
    expected = case.expected()
    case.first = case.first.at[unused].set(np.nan)
    case.second = case.second.at[unused].set(np.nan)
    out = mix_experts(case.rows, case.chosen, case.weights, 16, case.expert)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_without_a_kernel_none_can_be_asked_for() -> None:
    case = Case(2, 4, 2)
    with pytest.raises(ValueError, match="only MXFP4 weights have one"):
        mix_experts(case.rows, case.chosen, case.weights, 4, case.expert, implementation="pallas")
