"""Losslessness of every target family, with windows that generation runs well past.

The checks of one family share its programs: what they vary is traced.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DRAFTER, FAMILIES, random_drafter, random_target

from peagle_jax.config import TargetConfig
from peagle_jax.decoding import (
    Generation,
    NoDraft,
    ParallelDraft,
    Proposer,
    Request,
    ScriptedDraft,
    generate_tokens,
)
from peagle_jax.load import LoadedDrafter, LoadedTarget
from peagle_jax.models import KVCache, masked

CAPACITY, BUCKET, BUDGET, DRAFTS = 128, 32, 60, 3
PROMPTS = [[5, 60, 33], list(range(20, 49)), [9]]  # one of them longer than the windows
ROWS = len(PROMPTS)


@dataclasses.dataclass(frozen=True)
class Case:
    """A target, what it says by naive decoding, and a head that is hardly ever right."""

    target: LoadedTarget
    drafter: LoadedDrafter
    plain: list[list[int]]

    def script(self, accepts: Sequence[int]) -> ScriptedDraft:
        """Drafts the known continuations, with the head beside it."""
        tokens = np.zeros((ROWS, CAPACITY), np.int32)
        for row, (prompt, continuation) in enumerate(zip(PROMPTS, self.plain, strict=True)):
            tokens[row, len(prompt) : len(prompt) + BUDGET] = continuation
        cycle = np.resize(np.asarray(accepts, np.int32), 12)
        return ScriptedDraft(jnp.asarray(tokens), jnp.asarray(cycle), self.head(DRAFTS))

    def head(self, num_drafts: int) -> ParallelDraft:
        config = self.drafter.config
        return ParallelDraft(self.drafter.weights, num_drafts, config.aux_boundaries)


def window_masks(config: TargetConfig, length: int) -> list[jax.Array]:
    """What each layer's rows see of each other, `[1, T, T]`."""
    row, key = jnp.arange(length)[:, None], jnp.arange(length)
    return [
        ((key <= row) & (key > row - (window or length)))[None] for window in config.sliding_windows
    ]


def naive_greedy(target: LoadedTarget, prompt: list[int]) -> list[int]:
    """Decodes without a cache: one full forward over a padded sequence per token."""

    @jax.jit
    def best(tokens: jax.Array, at: jax.Array) -> jax.Array:
        model = target.weights.merge()
        masks = masked(window_masks(target.config, CAPACITY))
        x, *_ = model(tokens[None], jnp.arange(CAPACITY)[None], masks)
        return jnp.argmax(model.logits(x[0, at]))

    tokens = np.zeros((CAPACITY,), np.int32)
    tokens[: len(prompt)] = prompt
    for length in range(len(prompt), len(prompt) + BUDGET):
        tokens[length] = int(best(jnp.asarray(tokens), jnp.asarray(length - 1)))
    return tokens[len(prompt) : len(prompt) + BUDGET].tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    config = FAMILIES[request.param]
    windows: tuple[int | None, ...] = (None, None)
    if request.param == "gpt_oss":  # windows with which a ring at K = 3 has no slot to spare
        config, windows = dataclasses.replace(config, sliding_windows=(5, None, 5)), (None, 3)
    target = random_target(config, seed=3)
    drafter = random_drafter(dataclasses.replace(DRAFTER, sliding_windows=windows))
    return Case(target, drafter, [naive_greedy(target, prompt) for prompt in PROMPTS])


def run(
    case: Case,
    proposer: Proposer,
    budgets: Sequence[int] = (BUDGET,) * ROWS,
    eos: Sequence[int] = (-1, -1),
    rings: bool = True,
) -> tuple[Generation, list[list[int]]]:
    """Runs the program on caches full of junk, and returns each prompt's new tokens too."""
    tokens = np.zeros((ROWS, CAPACITY), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    lengths = [len(prompt) for prompt in PROMPTS]
    arrays = (jnp.asarray(x, jnp.int32) for x in (tokens, lengths, budgets, [list(eos)] * ROWS))
    block = proposer.num_drafts + 1 if rings else CAPACITY
    caches = (
        KVCache.zeros(case.target.config, ROWS, CAPACITY, jnp.float32, block),
        proposer.new_cache(ROWS, CAPACITY, jnp.float32),
    )
    caches = jax.tree.map(lambda x: x + 100.0, caches)
    request = Request(*arrays, sampling=None)
    generation = generate_tokens(
        case.target.weights, proposer, request, *caches, prompt_rows=BUCKET
    ).generation
    new = [
        np.asarray(generation.tokens[row, length : generation.lengths[row]]).tolist()
        for row, length in enumerate(lengths)
    ]
    return generation, new


def test_plain_decoding_equals_naive_decoding(case: Case) -> None:
    assert len({t for row in case.plain for t in row}) > 10  # not one repeated token
    assert run(case, NoDraft())[1] == case.plain


@pytest.mark.parametrize(
    "num_drafts", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 7))]
)
def test_random_head_is_lossless(case: Case, num_drafts: int) -> None:
    generation, new = run(case, case.head(num_drafts))
    assert new == case.plain
    assert int(generation.rounds) > BUDGET / 2  # so most drafts were rejected


@pytest.mark.parametrize("accepts", [[0], [3], [3, 0, 1, 2], [2, 2, 0]])
def test_any_acceptance_is_lossless(case: Case, accepts: list[int]) -> None:
    """An oracle, an always-wrong drafter, and rejections at every place."""
    generation, new = run(case, case.script(accepts))
    assert new == case.plain
    if accepts == [3]:
        assert int(generation.rounds) == -(-(BUDGET - 1) // (DRAFTS + 1))


@pytest.mark.parametrize("budgets", [(1, 3, 4), (5, 1, 2), (17, 60, 0)])
def test_budgets_end_anywhere_in_a_block(case: Case, budgets: tuple[int, ...]) -> None:
    for accepts in ([3], [1, 3, 0]):
        _, new = run(case, case.script(accepts), budgets)
        assert new == [row[:n] for row, n in zip(case.plain, budgets, strict=True)]


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 30])
def test_eos_anywhere_in_a_block(case: Case, offset: int) -> None:
    eos = [case.plain[0][offset], case.plain[1][offset + 3]]
    expected = []
    for row in case.plain:
        ends = [i for i, token in enumerate(row) if token in eos]
        expected.append(row[: ends[0] + 1] if ends else row)
    for accepts in ([3], [2, 0, 3]):
        assert run(case, case.script(accepts), eos=eos)[1] == expected


@pytest.mark.parametrize("case", ["gpt_oss"], indirect=True)
@pytest.mark.parametrize("accepts", [[0, 3, 1], [2]])
def test_a_ring_is_as_good_as_every_slot(
    case: Case, accepts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target and drafter: the head's own drafts are the same over rings and over full caches."""
    own = dataclasses.replace(
        case.script(accepts), continuation=jnp.full((ROWS, CAPACITY), -1, jnp.int32)
    )
    ring, ring_tokens = run(case, own)
    monkeypatch.setattr(
        ParallelDraft,
        "new_cache",
        lambda self, batch, capacity, dtype: KVCache.zeros(
            case.drafter.config, batch, capacity, dtype, block=CAPACITY
        ),
    )
    full, full_tokens = run(case, own, rings=False)
    assert ring_tokens == full_tokens == case.plain
    for row, prompt in enumerate(PROMPTS):
        made = slice(len(prompt), int(ring.lengths[row]))
        np.testing.assert_array_equal(ring.emitted_in[row, made], full.emitted_in[row, made])


@pytest.mark.parametrize(("window", "slots"), [(5, 8), (6, 16), (13, 16)])
def test_a_ring_holds_window_and_drafts(window: int, slots: int) -> None:
    """In eights."""
    config = dataclasses.replace(FAMILIES["gpt_oss"], sliding_windows=(window, None, window))
    cache = KVCache.zeros(config, 2, CAPACITY, jnp.float32, block=DRAFTS + 1)
    assert [k.shape[2] for k in cache.keys] == [slots, CAPACITY, slots]
    assert [v.shape[2] for v in cache.values] == [slots, CAPACITY, slots]
    tiny = KVCache.zeros(config, 1, 4, jnp.float32, block=DRAFTS + 1)
    assert [k.shape[2] for k in tiny.keys] == [4, 4, 4]
