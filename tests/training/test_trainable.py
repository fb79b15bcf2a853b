"""What trains and what stays."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import DRAFTER, random_drafter
from flax import nnx

from peagle_jax.models import Drafter
from peagle_jax.training import split
from peagle_jax.training.trainable import MASK_ROW


def arrays(head: Drafter) -> dict[str, jax.Array]:
    flat = nnx.to_flat_state(nnx.split(head)[1])
    return {".".join(map(str, path)): variable.get_value() for path, variable in flat}


@pytest.mark.parametrize("embedding", [True, False])
@pytest.mark.parametrize("lm_head", [True, False])
def test_a_step_changes_what_trains_and_nothing_else(embedding: bool, lm_head: bool) -> None:
    """An optimiser that shifts all that it is given; decay and rates by name work with it."""
    head = random_drafter().weights.merge()
    before = arrays(head)
    parts = split(head, embedding=embedding, lm_head=lm_head)
    assert sorted(set(parts.trainable) | set(parts.frozen)) == sorted(
        set(before) | ({MASK_ROW} if not embedding else set())
    )
    slow = {name: "norms" if "norm" in name else "rest" for name in parts.trainable}
    optimiser = optax.multi_transform({"norms": optax.sgd(0.5), "rest": optax.sgd(1.0)}, slow)
    slopes = jax.tree.map(jnp.ones_like, parts.trainable)
    updates, _ = optimiser.update(slopes, optimiser.init(parts.trainable), parts.trainable)
    after = arrays(parts.build(optax.apply_updates(parts.trainable, updates)))
    assert set(after) == set(before)
    for name, array in before.items():
        moved = np.full(array.shape, 0.5 if "norm" in name else 1.0)
        if name == "d2t" or (name == "lm_head" and not lm_head):
            moved[:] = 0
        if name == "embedding" and not embedding:
            moved[:] = 0
            moved[DRAFTER.mask_token_id] = 1
        np.testing.assert_allclose(array - after[name], moved, atol=1e-6)
    # Of the arrays as they are, the head as it was.
    same = arrays(parts.build(parts.trainable))
    assert all((same[name] == array).all() for name, array in before.items())


@pytest.mark.parametrize(
    "changes", [{"own_embedding": False}, {"own_lm_head": False, "draft_vocab_size": 96}]
)
def test_a_head_that_shares_a_table_needs_its_target(changes: dict[str, Any]) -> None:
    config = dataclasses.replace(DRAFTER, **changes)
    with pytest.raises(ValueError, match="needs its target"):
        split(Drafter(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
