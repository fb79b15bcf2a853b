"""Losses and gradients against the published speculators package; logits in chunks."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DRAFTER
from flax import nnx
from oracle import (
    DEPTHS,
    NAMES,
    ORACLE,
    elements_of,
    gradient_names,
    head_of,
    load,
    row_of,
    teacher_of,
)

from peagle_jax.models import Drafter, Frozen
from peagle_jax.models.layers import RMSNorm
from peagle_jax.training import LOSSES, Elements, TargetHead, gradients, split
from peagle_jax.training.loss import kl_div, lk_hybrid, summed_loss, tv
from peagle_jax.training.metrics import measure


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("loss", LOSSES)
def test_element_losses_equal_speculators(loss: str, name: str) -> None:
    golden = load(ORACLE / name / "pack.npz")
    each = LOSSES[loss](jnp.asarray(golden["logits"]), jnp.asarray(golden["targets"]))
    np.testing.assert_allclose(each, golden[f"elem.{loss}"], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_element_losses_slopes(loss: str) -> None:
    """Automatic against finite differences; nowhere a slope to the target or a NaN."""
    rng = np.random.default_rng(1)
    draft, target, way = (jnp.asarray(3 * rng.standard_normal((4, 9)), jnp.float32) for _ in "abc")
    slope = jax.grad(lambda z: LOSSES[loss](z, target).sum())(draft)
    if loss == "lk_hybrid":  # its weight is a constant
        alpha = 1 - tv(draft, target)
        weight = jnp.exp(-3 * alpha)
        parts = [jax.vmap(jax.grad(f))(draft, target) for f in (kl_div, tv)]
        expected = weight[:, None] * parts[0] + (1 - weight)[:, None] * parts[1]
        np.testing.assert_allclose(slope, expected, atol=1e-5)
    else:
        step = 1e-2
        above, below = (LOSSES[loss](draft + s * way, target).sum() for s in (step, -step))
        np.testing.assert_allclose(jnp.sum(slope * way), (above - below) / (2 * step), rtol=2e-2)
    apart = jnp.array([[60.0, 0.0, -60.0]])
    assert jnp.isfinite(jax.grad(lambda z: LOSSES[loss](z, -apart).sum())(apart)).all()
    assert jnp.allclose(lk_hybrid(target, target), 0, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_every_gradient_equal_speculators(name: str, tmp_path: Path) -> None:
    """The whole way from the packed row, with the published choice of elements."""
    golden, head = load(ORACLE / name / "grad.npz"), head_of(name, tmp_path)
    row, elements, teacher = row_of(golden), elements_of(golden), teacher_of(name, head)
    parts = split(head)
    metrics, slopes = jax.jit(
        lambda p: gradients(
            parts.build,
            p,
            row,
            elements,
            teacher,
            loss=kl_div,
            num_depths=DEPTHS,
            chunk=30,  # the last chunk is not full
        )
    )(parts.trainable)
    np.testing.assert_allclose(metrics.mean_loss, golden["loss"], rtol=1e-5)
    for depth in range(DEPTHS):
        name = f"metric.position_{depth}_acc"
        assert metrics.total[depth] == golden[f"{name}_total"]
        assert metrics.hits[depth] == golden[f"{name}_sum"]
    ours = gradient_names(head)
    assert set(slopes) == set(ours)
    theirs = [name for names in ours.values() for name in names]
    assert {f"grad.{name}" for name in theirs} == {key for key in golden if key[:5] == "grad."}
    for name, names in ours.items():
        each = [golden[f"grad.{n}"] for n in names]
        expected = np.concatenate(each).reshape(slopes[name].shape)
        scale = np.abs(expected).max()
        assert scale > 0
        np.testing.assert_allclose(slopes[name], expected, rtol=1e-4, atol=1e-4 * scale)


def head_and_teacher(vocabulary: int, width: int = 16) -> tuple[Drafter, TargetHead]:
    config = DRAFTER.from_json(
        DRAFTER.to_json()
        | {"vocab_size": vocabulary, "draft_vocab_size": vocabulary, "hidden_size": width}
        | {"target_hidden_size": width, "mask_token_id": 0}
    )
    head = Drafter(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    norm = Frozen.of(RMSNorm(width, 1e-5, jnp.float32))
    return head, TargetHead(norm, jax.random.normal(jax.random.key(1), (vocabulary, width)))


def test_no_whole_logits_in_memory() -> None:
    """What the compiled gradient needs beside its arguments, at 16 chunks and at one."""
    count, vocabulary, width = 1024, 4096, 16
    head, teacher = head_and_teacher(vocabulary, width)
    states = jnp.zeros((count, width))
    whole = 4 * count * vocabulary

    def temporaries(chunk: int) -> int:
        def total(x: jax.Array, table: jax.Array) -> jax.Array:
            graphdef, state = nnx.split(head)
            state["lm_head"] = state["lm_head"].replace(table)
            copy = nnx.merge(graphdef, state)
            rows = jnp.arange(count)
            charged = jnp.ones(count, bool)
            return summed_loss(copy, x, charged, teacher, states, rows, kl_div, chunk)[0]

        slope = jax.jit(jax.grad(total, (0, 1)))
        memory = slope.lower(states, head.lm_head[...]).compile().memory_analysis()
        return memory.temp_size_in_bytes

    assert temporaries(count // 16) < whole / 2
    assert temporaries(count) > whole


def test_chunks_give_the_same_sums_and_hits() -> None:
    """Of chunks that fit and that do not; hits of what is charged as told by whole logits."""
    head, teacher = head_and_teacher(12)
    rng = np.random.default_rng(3)
    states, x = (jnp.asarray(rng.standard_normal((n, 16)), jnp.float32) for n in (7, 20))
    # Near the teacher's own states, so that some of the favourites agree.
    rows = jnp.asarray(rng.integers(0, 7, 20))
    head.lm_head.set_value(teacher.head)
    x = 0.8 * x + states[rows]
    charged = jnp.asarray(rng.random(20) < 0.6)
    draft = np.asarray(head.final_norm(x) @ teacher.head.T)
    target = np.asarray(teacher.logits(states))[rows]
    expected = np.where(charged, kl_div(jnp.asarray(draft), jnp.asarray(target)), 0).sum()
    agree = charged & (draft.argmax(-1) == target.argmax(-1))
    assert 3 < agree.sum() < charged.sum()
    for chunk in (1, 6, 20, 64):
        total, hits = summed_loss(head, x, charged, teacher, states, rows, kl_div, chunk)
        np.testing.assert_allclose(total, expected, rtol=1e-5)
        np.testing.assert_array_equal(hits & charged, agree)


def test_a_frozen_lm_head_has_no_gradient() -> None:
    """The largest one is not made: no array of the table's shape is added up."""
    head, teacher = head_and_teacher(12)
    head.lm_head.set_value(teacher.head)
    x, charged, rows = jnp.ones((20, 16)), jnp.ones((20,), bool), jnp.zeros((20,), jnp.int32)

    def total(x: jax.Array, table: jax.Array) -> jax.Array:
        used = nnx.clone(head)
        used.lm_head[...] = table
        return summed_loss(used, x, charged, teacher, x, rows, kl_div, 8)[0]

    def sums_of_tables(argnums: int | tuple[int, ...]) -> int:
        traced = str(jax.make_jaxpr(jax.grad(total, argnums))(x, teacher.head))
        rows, width = teacher.head.shape
        return len(re.findall(rf"f32\[{rows},{width}\] = add ", traced))

    assert sums_of_tables(0) == 0
    assert sums_of_tables((0, 1)) > 0


def test_metrics_by_hand() -> None:
    """Four rows, three depths, one unused slot; row 0 is not supervised, so no round starts."""
    table = [  # anchor, depth, used, hit
        (0, 0, 1, 1),
        (1, 0, 1, 1),
        (2, 0, 1, 0),
        (3, 0, 1, 1),
        (0, 1, 1, 1),
        (1, 1, 1, 1),
        (2, 1, 1, 1),  # after a miss
        (0, 2, 1, 1),
        (1, 2, 1, 0),
        (1, 2, 0, 1),
    ]
    anchors, depths, used, hit = (jnp.array(column) for column in zip(*table, strict=True))
    elements = Elements(anchors, depths, used > 0)
    mask = jnp.array([False, True, True, True])
    metrics = measure(jnp.float32(6.0), hit > 0, elements, mask, 3)
    np.testing.assert_array_equal(metrics.total, [3, 3, 2])
    np.testing.assert_array_equal(metrics.hits, [2, 3, 1])
    np.testing.assert_array_equal(metrics.chains, [3, 2, 1])
    np.testing.assert_array_equal(metrics.survivors, [2, 1, 0])
    np.testing.assert_allclose(metrics.accuracy, [2 / 3, 1, 1 / 2])
    np.testing.assert_allclose(metrics.acceptance_length, 1 + 2 / 3 + 1 / 2 + 0)
    np.testing.assert_allclose(metrics.mean_loss, 6 / 8.00001)
