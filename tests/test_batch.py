"""Batches that shrink: the rows that are kept go on as if nothing had happened."""

import dataclasses

import jax
import pytest
from conftest import TARGET, random_target

from peagle_jax import SamplingParams
from peagle_jax.batch import Batch
from peagle_jax.decoding import NoDraft

PROMPTS = [[5, 60, 33], list(range(20, 50)), [9], [8, 8], [70, 3, 1]]
SEEDED = [SamplingParams(temperature=1.0, seed=n, logit_bias={n: 1.0}) for n in range(5)]


@pytest.mark.slow
def test_kept_rows_go_on() -> None:
    """In any order, filled up to a power of two by a row that is done; the prompts go with them."""
    kept = [4, 0, 2]
    target = random_target(dataclasses.replace(TARGET, num_layers=1, sliding_windows=(None,)))

    def batch() -> Batch:
        return Batch(target, NoDraft(), PROMPTS, SEEDED, 12)

    whole = batch()
    whole.run()
    part = batch()
    part.run(3)
    part.stop([row for row in range(5) if row not in kept])
    assert part.state is not None
    part.generation = jax.device_get(part.state.generation)
    part.keep(kept)
    assert part.generation.tokens.shape[0] == 4
    assert part.prompts == [PROMPTS[row] for row in kept]
    assert not part.generation.done[: len(kept)].any()
    assert part.generation.done[len(kept) :].all()
    part.run()
    for row, old in enumerate(kept):
        length = int(whole.generation.lengths[old])
        assert int(part.generation.lengths[row]) == length == len(PROMPTS[old]) + 12
        for got, expected in (
            (part.generation.tokens, whole.generation.tokens),
            (part.generation.emitted_in, whole.generation.emitted_in),
        ):
            assert got[row, :length].tolist() == expected[old, :length].tolist()
