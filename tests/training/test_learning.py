"""The method itself, on a toy: mask slots learn what a target with structure will say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import DRAFTER
from flax import nnx

from peagle_jax.models import Drafter, Frozen
from peagle_jax.models.layers import RMSNorm
from peagle_jax.training import (
    LOSSES,
    CodConfig,
    Metrics,
    PackedRow,
    TargetHead,
    gradients,
    sample,
    split,
)

WORDS, WIDTH, LENGTH, DEPTHS = 12, 32, 48, 4
CONFIG = dataclasses.replace(
    DRAFTER,
    vocab_size=WORDS + 1,
    draft_vocab_size=WORDS,
    mask_token_id=WORDS,
    aux_boundaries=(1,),
    fc_norm=False,
    norm_before_fc=True,
    num_depths=DEPTHS,
)

Arrays = dict[str, jax.Array]
State = tuple[Arrays, optax.OptState]


@pytest.mark.slow
def test_mask_slots_learn() -> None:
    """The target goes round a cycle of words, one or two steps at a time by document.

    Its state is the word that comes next and its feature the word that was, both with noise. A
    mask slot has to find its anchor's word and the document's pace, and to count its depth.
    """
    key = jax.random.key(0)
    table = jnp.linalg.qr(jax.random.normal(key, (WIDTH, WIDTH)))[0][:WORDS] * WIDTH**0.5

    def packed_row(key: jax.Array) -> PackedRow:
        starts, paces, noise = jax.random.split(key, 3)
        ids = jnp.repeat(jnp.arange(3), LENGTH // 3)
        place = jnp.arange(LENGTH) % (LENGTH // 3)
        pace = jax.random.randint(paces, (3,), 1, 3)[ids]
        words = (jax.random.randint(starts, (3,), 0, WORDS)[ids] + place * pace) % WORDS
        tokens, after = (words + pace) % WORDS, (words + 2 * pace) % WORDS
        features = table[words] + 0.3 * jax.random.normal(noise, (LENGTH, WIDTH))
        return PackedRow(tokens, features, table[after], place > 0, ids)

    teacher = TargetHead(Frozen.of(RMSNorm(WIDTH, 1e-5, jnp.float32)), table / WIDTH**0.5)
    head = Drafter(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(0))
    parts = split(head, lm_head=True)
    optimiser = optax.adam(3e-3)

    def one(trainable: Arrays, key: jax.Array) -> tuple[Metrics, Arrays]:
        row = packed_row(key)
        elements = sample(key, row.loss_mask, row.document_ids, CodConfig(DEPTHS))
        loss = LOSSES["kl_div"]
        return gradients(
            parts.build, trainable, row, elements, teacher, loss=loss, num_depths=DEPTHS
        )

    def step(state: State, key: jax.Array) -> tuple[State, Metrics]:
        trainable, moments = state
        metrics, slopes = jax.vmap(one, (None, 0))(trainable, jax.random.split(key, 4))
        slopes = jax.tree.map(lambda x: x.mean(0), slopes)
        updates, moments = optimiser.update(slopes, moments)
        metrics = jax.tree.map(lambda x: x.sum(0), metrics)
        return (optax.apply_updates(trainable, updates), moments), metrics

    state = parts.trainable, optimiser.init(parts.trainable)
    train = jax.jit(lambda state, keys: jax.lax.scan(step, state, keys))
    _, metrics = train(state, jax.random.split(key, 200))
    first, last = (
        jax.tree.map(lambda x, s=s: x[s].sum(0), metrics) for s in (np.s_[:5], np.s_[-20:])
    )
    np.testing.assert_array_less(first.accuracy[1:], 0.2)  # chance is 1 of 12
    np.testing.assert_array_less(0.9, last.accuracy)
    assert first.acceptance_length < 2
    assert last.acceptance_length > 4.5
