"""COD sampling: counts against the published package, and what must hold of every sample."""

import collections
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN
from hypothesis import strategies as st

from peagle_jax.training import CodConfig, Elements, sample

COD = dict(np.load(GOLDEN / "oracle" / "cod.npz"))


def kept(elements: Elements) -> list[tuple[int, int]]:
    """The (depth, anchor) in use, in their order."""
    return [
        (int(d), int(a))
        for a, d, v in zip(elements.anchors, elements.depths, elements.valid, strict=True)
        if v
    ]


def draw(mask: np.ndarray, ids: np.ndarray, config: CodConfig, seed: int = 0) -> Elements:
    arrays = jnp.asarray(mask, bool), jnp.asarray(ids, jnp.int32)
    elements = sample(jax.random.key(seed), *arrays, config)
    assert elements.anchors.shape == (config.bound(len(mask)),)
    return elements


def check(elements: Elements, mask: np.ndarray, ids: np.ndarray, config: CodConfig) -> None:
    """Whatever the draw: order, nesting, supervision, documents and upper counts."""
    pairs, length = kept(elements), len(mask)
    assert pairs == sorted(set(pairs))
    together = set(pairs)
    assert {a for d, a in pairs if d == 0} == set(np.flatnonzero(ids >= 0))
    np.testing.assert_array_equal(elements.anchors[:length], np.arange(length))
    np.testing.assert_array_equal(elements.depths, np.sort(elements.depths))
    assert (np.asarray(elements.anchors) >= 0).all()
    for depth, anchor in pairs:
        if depth:
            assert (depth - 1, anchor) in together
            assert anchor + depth < length
            assert (ids[anchor : anchor + depth + 1] == ids[anchor]).all()
            assert mask[anchor + 1 : anchor + depth + 1].all()
    seeds = int((np.asarray(mask, bool) & (ids >= 0)).sum())
    if config.max_anchors is not None:
        seeds = min(seeds, config.max_anchors)
    for depth in range(1, config.num_depths):
        rate = max(config.ratio**depth, config.ratio_floor)
        assert sum(d == depth for d, _ in pairs) <= max(0, int((seeds - depth) * rate))


@pytest.mark.parametrize("cap", [None, 10])
@pytest.mark.parametrize("kind", ["all", "half", "alt"])
def test_counts_equal_speculators(kind: str, cap: int | None) -> None:
    """The most elements that each depth has in a few draws: now and then chains run out of rows.

    The published sampler's anchor -1 (of `all`) is counted where it takes the place of another.
    """
    config, ids = CodConfig(8, 0.7, 0.2, cap), np.zeros(40, np.int32)
    ours, theirs = np.zeros(8, int), np.zeros(8, int)
    for seed in range(8):
        name = f"{kind}.cap{cap}.seed{seed % 4}"
        theirs = np.maximum(theirs, np.bincount(COD[f"{name}.depth"], minlength=8))
        mask = COD[f"{name}.mask"]
        elements = draw(mask, ids, config, seed)
        check(elements, mask, ids, config)
        counts = np.bincount([d for d, _ in kept(elements)], minlength=8)
        assert counts[1] >= theirs[1] - (cap is not None)
        ours = np.maximum(ours, counts)
    if kind == "alt":  # two supervised rows in a row, so how many chains go on is left to chance
        assert 2 <= ours[2] <= config.counts(40)[2, 26]
        assert abs(ours[2] - theirs[2]) <= 2
        ours[2] = theirs[2]
    np.testing.assert_array_equal(ours, theirs)


def test_documented_counts() -> None:
    """The table of `training.md`: a row supervised but for its first token."""
    for length, cap, counts in (
        (256, None, [256, 177, 123, 86, 60, 50, 49, 48]),
        (1024, 512, [1024, 357, 249, 174, 121, 101, 101, 101]),
    ):
        mask, ids = np.arange(length) > 0, np.zeros(length)
        elements = draw(mask, ids, CodConfig(8, 0.7, 0.2, cap))
        found = np.bincount([d for d, _ in kept(elements)], minlength=8)
        np.testing.assert_allclose(found, counts, atol=1)  # chains may run into the row's end
        np.testing.assert_array_equal(found[:5], counts[:5])
    # The paper's: 2048 rows, 8 depths, 0.8 make about 8 522 elements.
    assert abs(CodConfig(8, 0.8, 0.2).bound(2048) - 8522) < 30
    assert CodConfig(8, 0.7, 0.2, 512).bound(4096) < 1.3 * 4096


LENGTH, CONFIG = 24, CodConfig(5, 0.8, 0.2)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH),
    st.lists(st.integers(1, 10), min_size=1, max_size=6),
    st.integers(0, 2**31 - 1),
    st.sampled_from([CONFIG, CodConfig(5, 1.0, 0.0, 6)]),
)
def test_properties(mask: list[bool], sizes: list[int], seed: int, config: CodConfig) -> None:
    """Any supervision of any documents, the first row and padding included."""
    ids = np.repeat(np.arange(len(sizes)), sizes)[:LENGTH]
    ids = np.pad(ids, (0, LENGTH - len(ids)), constant_values=-1)
    check(draw(np.array(mask), ids, config, seed), np.array(mask), ids, config)


def test_nothing_and_everything_supervised() -> None:
    ids = np.zeros(LENGTH)
    none = draw(np.zeros(LENGTH), ids, CONFIG)
    assert kept(none) == [(0, a) for a in range(LENGTH)]
    # At a ratio of 1 nothing is dropped but what has no room: every anchor has every depth.
    config = CodConfig(4, 1.0, 0.0)
    pairs = kept(draw(np.ones(LENGTH), ids, config))
    assert pairs == [(d, a) for d in range(4) for a in range(LENGTH - d)]
    # Two documents supervised throughout: no chain leaves the first one.
    ids = np.repeat([0, 1], LENGTH // 2)
    pairs = kept(draw(np.ones(LENGTH), ids, config))
    room = [a % (LENGTH // 2) for _, a in pairs]
    assert all(a + d < LENGTH // 2 for (d, _), a in zip(pairs, room, strict=True))
    assert {d for d, _ in pairs} == {0, 1, 2, 3}


def test_choice_is_uniform() -> None:
    """How often each anchor is kept, over many draws: chi square of each depth."""
    mask, ids, draws = jnp.arange(LENGTH) > 2, jnp.zeros(LENGTH, jnp.int32), 4000
    keys = jax.random.split(jax.random.key(5), draws)
    elements = jax.vmap(lambda key: sample(key, mask, ids, CONFIG))(keys)
    for depth in range(1, 5):
        chosen = np.asarray(elements.valid & (elements.depths == depth))
        seen = np.bincount(np.asarray(elements.anchors)[chosen], minlength=LENGTH)
        # Anchors whose chain ends one row before the last are in every pool that their like are.
        alike = seen[2 : LENGTH - depth]
        assert seen.sum() == alike.sum()
        part = alike.mean() / draws
        assert 0.3 < part < 0.95
        statistic = np.sum((alike - alike.mean()) ** 2) / (draws * part * (1 - part))
        assert abs(statistic / len(alike) - 1) < 0.9  # 1 +- sqrt(2 / 20)


def test_law_is_that_of_independent_draws_per_depth() -> None:
    """One random order for all depths gives what drawing afresh at each depth gives, exactly."""
    mask, ids = np.array([0, 1, 1, 0, 1, 1, 1], bool), np.zeros(7, np.int32)
    config, draws = CodConfig(3, 0.6, 0.2), 6000
    first, second = (int(config.counts(7)[d, 5]) for d in (1, 2))
    assert (first, second) == (2, 1)
    law: dict[tuple[int, ...], float] = collections.Counter()
    pairs = list(itertools.combinations([0, 1, 3, 4, 5], first))  # anchors, row a + 1 supervised
    for chosen in pairs:
        pool = [a for a in chosen if a + 2 < 7 and mask[a + 2]]
        for deeper in itertools.combinations(pool, min(second, len(pool))):
            ways = len(list(itertools.combinations(pool, min(second, len(pool)))))
            law[(*chosen, -1, *deeper)] += 1 / len(pairs) / ways
    keys = jax.random.split(jax.random.key(2), draws)
    args = jnp.asarray(mask), jnp.asarray(ids)
    drawn = jax.vmap(lambda key: sample(key, *args, config))(keys)
    anchors, depths, valid = (np.asarray(x) for x in (drawn.anchors, drawn.depths, drawn.valid))
    found: dict[tuple[int, ...], int] = collections.Counter()
    for a, d, v in zip(anchors, depths, valid, strict=True):
        found[(*map(int, a[v & (d == 1)]), -1, *map(int, a[v & (d == 2)]))] += 1
    assert set(found) == set(law)
    statistic = sum((found[k] - draws * p) ** 2 / (draws * p) for k, p in law.items())
    assert statistic < len(law) + 4 * np.sqrt(2 * len(law))


@pytest.mark.parametrize(
    "values", [{"num_depths": 0}, {"ratio": 0.0}, {"ratio_floor": 1.5}, {"max_anchors": 0}]
)
def test_wrong_configs_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        CodConfig(**{"num_depths": 4, **values})  # type: ignore[arg-type]
