"""Segments: the same loss and gradient as at once, with less in memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DRAFTER, random_drafter
from flax import nnx

from peagle_jax.config import DrafterConfig
from peagle_jax.models import Drafter, Frozen
from peagle_jax.models.layers import RMSNorm
from peagle_jax.training import (
    LOSSES,
    CodConfig,
    Elements,
    Metrics,
    PackedRow,
    Parts,
    TargetHead,
    gradients,
    sample,
    split,
)
from peagle_jax.training.partition import segments

pytestmark = pytest.mark.slow

LENGTH, DEPTHS = 48, 6
HEADS = {
    "full": DRAFTER,
    "sliding": dataclasses.replace(DRAFTER, sliding_windows=(7, None), qk_norm=True),
}


def packed_row(config: DrafterConfig, length: int, seed: int) -> PackedRow:
    """Two documents and padding; few rows of the first one are supervised."""
    rng = np.random.default_rng(seed)
    ids = np.repeat([0, 1, -1], [length // 2, length // 2 - 5, 5])
    return PackedRow(
        jnp.asarray(rng.integers(0, config.vocab_size - 1, length), jnp.int32),
        jnp.asarray(rng.standard_normal((length, config.feature_size)), jnp.float32),
        jnp.asarray(rng.standard_normal((length, config.target_hidden_size)), jnp.float32),
        jnp.asarray((rng.random(length) < np.where(ids == 0, 0.3, 0.9)) & (ids >= 0)),
        jnp.asarray(ids, jnp.int32),
    )


def target_head(config: DrafterConfig) -> TargetHead:
    norm = Frozen.of(RMSNorm(config.target_hidden_size, 1e-5, jnp.float32))
    shape = config.draft_vocab_size, config.target_hidden_size
    return TargetHead(norm, jax.random.normal(jax.random.key(1), shape) / 3)


@pytest.mark.parametrize("partitions", [1, 2, 3, 4, 8, 200])
def test_every_element_in_one_segment_with_its_chain(partitions: int) -> None:
    row = packed_row(DRAFTER, LENGTH, 0)
    config = CodConfig(DEPTHS)
    deep = sample(jax.random.key(0), row.loss_mask, row.document_ids, config)[LENGTH:]
    parts, places = segments(deep, partitions, DEPTHS)
    assert parts.anchors.shape == (partitions, -(-len(deep.anchors) // partitions) + DEPTHS - 2)
    found = np.sort(np.asarray(places)[np.asarray(parts.valid)])
    np.testing.assert_array_equal(found, np.flatnonzero(deep.valid))
    assert len(found) > 40
    assert (np.asarray(places)[~np.asarray(parts.valid)] == len(deep.anchors)).all()
    seen: dict[int, int] = {}
    for segment in range(partitions):
        valid = np.asarray(parts.valid[segment])
        part = jax.tree.map(lambda x, s=segment, v=valid: np.asarray(x[s])[v], parts)
        place = np.asarray(places[segment])[valid]
        np.testing.assert_array_equal(part.anchors, np.asarray(deep.anchors)[place])
        np.testing.assert_array_equal(part.depths, np.asarray(deep.depths)[place])
        for anchor in part.anchors:
            assert seen.setdefault(int(anchor), segment) == segment


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("sliding", (3,)),
        pytest.param("full", (2, 4, 8), marks=pytest.mark.slow),
        pytest.param("sliding", (2, 8), marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_those_of_one_pass(name: str, counts: tuple[int, ...]) -> None:
    config = HEADS[name]
    row, teacher = packed_row(config, LENGTH, 1), target_head(config)
    parts = split(random_drafter(config).weights.merge(), lm_head=True)
    elements = sample(jax.random.key(3), row.loss_mask, row.document_ids, CodConfig(DEPTHS))
    whole = step(parts, row, elements, teacher, 1)
    assert whole[0].total.sum() > 80
    for partitions in counts:
        metrics, slopes = step(parts, row, elements, teacher, partitions)
        np.testing.assert_allclose(metrics.loss, whole[0].loss, rtol=1e-6)
        for field in ("total", "hits", "chains", "survivors"):
            np.testing.assert_array_equal(getattr(metrics, field), getattr(whole[0], field))
        for key, slope in whole[1].items():
            scale = jnp.abs(slope).max()
            assert scale > 0
            np.testing.assert_allclose(slopes[key], slope, rtol=1e-5, atol=1e-5 * scale)


@functools.partial(jax.jit, static_argnames=("partitions", "remat"))
def step(
    parts: Parts,
    row: PackedRow,
    elements: Elements,
    teacher: TargetHead,
    partitions: int,
    remat: bool = False,
) -> tuple[Metrics, dict[str, jax.Array]]:
    return gradients(
        parts.build,
        parts.trainable,
        row,
        elements,
        teacher,
        loss=LOSSES["kl_div"],
        num_depths=DEPTHS,
        partitions=partitions,
        chunk=64,
        remat=remat,
    )


def test_nothing_supervised_is_no_nan() -> None:
    config = HEADS["sliding"]  # whose programs another test compiles
    row = dataclasses.replace(packed_row(config, LENGTH, 1), loss_mask=jnp.zeros(LENGTH, bool))
    parts = split(random_drafter(config).weights.merge(), lm_head=True)
    elements = sample(jax.random.key(3), row.loss_mask, row.document_ids, CodConfig(DEPTHS))
    assert isinstance(elements, Elements)
    for partitions in (1, 3):
        metrics, slopes = step(parts, row, elements, target_head(config), partitions)
        assert metrics.loss == 0
        assert metrics.acceptance_length == 1
        assert all((slope == 0).all() for slope in slopes.values())


def temporaries(length: int, partitions: int, sizes: dict[str, int], remat: bool = False) -> int:
    """Bytes that the compiled gradient needs beside arguments and results."""
    config = dataclasses.replace(DRAFTER, **sizes)
    head = Drafter(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    row = packed_row(config, length, 0)
    elements = sample(jax.random.key(0), row.loss_mask, row.document_ids, CodConfig(DEPTHS))
    lowered = step.lower(split(head), row, elements, target_head(config), partitions, remat)
    return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_falls_with_segments() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 256, "target_hidden_size": 64}
    each = [temporaries(256, p, sizes) for p in (1, 2, 8)]
    assert each == sorted(each, reverse=True)
    assert each[-1] < 0.5 * each[0]


def test_remat_computes_the_same_with_less_memory() -> None:
    config = HEADS["sliding"]
    row, teacher = packed_row(config, LENGTH, 1), target_head(config)
    parts = split(random_drafter(config).weights.merge(), lm_head=True)
    elements = sample(jax.random.key(3), row.loss_mask, row.document_ids, CodConfig(DEPTHS))
    (metrics, slopes), (again, others) = (
        step(parts, row, elements, teacher, 3, remat) for remat in (False, True)
    )
    np.testing.assert_allclose(metrics.loss, again.loss, rtol=1e-6)
    for key, slope in slopes.items():
        np.testing.assert_allclose(others[key], slope, rtol=1e-4, atol=1e-5 * jnp.abs(slope).max())
    sizes = {"hidden_size": 64, "intermediate_size": 512, "target_hidden_size": 64}
    assert temporaries(256, 1, sizes, True) < 0.8 * temporaries(256, 1, sizes)
