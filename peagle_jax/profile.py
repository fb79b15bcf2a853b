"""What drafting takes of a round, timed where a generation ended."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from peagle_jax.batch import Batch
from peagle_jax.decoding import Proposer, Request, State, continue_generation
from peagle_jax.models import Frozen, Target

REPEATS = 5


def draft_share(batch: Batch) -> float:
    """Times the drafter's `propose` alone, and a whole round (draft, verify, accept, commit).

    Both are compiled first and then run in turn, each as one dispatch that the host waits for, on
    the shapes and the caches that the generation ended with. Sequences that are at their end count
    like the others: their rows are computed all the same.

    Args:
      batch: after its last round; it cannot run again.

    Returns:
      the ratio of the medians.
    """
    target, proposer, request = batch.models
    state, batch.state = batch.state, None
    assert state is not None
    drafts: list[float] = []
    rounds: list[float] = []
    for _ in range(REPEATS + 1):
        rest = dataclasses.replace(state, draft_state=None)
        seconds, (draft_state, *_) = _timed(
            _propose, target, proposer, request, rest, state.draft_state
        )
        drafts.append(seconds)
        # One round more; a sequence without budget emits nothing, so none outgrows its room.
        past = state.generation
        past = dataclasses.replace(past, done=jnp.zeros_like(past.done))
        state = dataclasses.replace(state, generation=past, draft_state=draft_state)
        last = past.rounds + 1
        seconds, state = _timed(continue_generation, target, proposer, request, state, last)
        rounds.append(seconds)
    return statistics.median(drafts[1:]) / statistics.median(rounds[1:])


@functools.partial(jax.jit, donate_argnames="draft_state")
def _propose(
    target: Frozen[Target], proposer: Proposer, request: Request, state: State, draft_state: Any
) -> tuple[Any, ...]:
    *drafts, draft_state = proposer.propose(
        target.merge(), draft_state, state.seen, request.sampling
    )
    return draft_state, *drafts


def _timed(program: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    made = jax.block_until_ready(program(*arguments))
    return time.perf_counter() - started, made
