"""The decoding program is lossless, runs as one program, and keeps its caches right."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DRAFTER, random_drafter
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_jax.acceptance import count_accepted
from peagle_jax.decoding import (
    NoDraft,
    ParallelDraft,
    Proposer,
    Request,
    ScriptedDraft,
    State,
    capacity_for,
    generate_tokens,
)
from peagle_jax.decoding.draft import Committed, PromptRows
from peagle_jax.load import LoadedDrafter, LoadedTarget
from peagle_jax.models import Drafter, Frozen, KVCache, Target, masked

BUCKET, CAPACITY = 16, 128


def make_request(
    prompts: Sequence[Sequence[int]], budgets: Sequence[int], eos: Sequence[int] = (-1, -1)
) -> Request:
    tokens = np.zeros((len(prompts), CAPACITY), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = [len(p) for p in prompts]
    arrays = (tokens, lengths, budgets, [list(eos)] * len(prompts))
    return Request(*(jnp.asarray(x, jnp.int32) for x in arrays), sampling=None)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the program made, on the host."""

    tokens: np.ndarray
    lengths: np.ndarray
    rounds: int
    active_rounds: np.ndarray
    accepted_per_position: np.ndarray

    @classmethod
    def of(cls, request: Request, state: State, num_drafts: int) -> "Outcome":
        made = jax.device_get(state.generation)
        spans = zip(made.emitted_in, request.lengths, made.lengths, strict=True)
        counts = [count_accepted(row[int(a) : int(b)], num_drafts) for row, a, b in spans]
        rounds, accepted = (np.stack(column) for column in zip(*counts, strict=True))
        return cls(made.tokens, made.lengths, int(made.rounds), rounds, accepted)


def start(target: LoadedTarget, proposer: Proposer, request: Request, filler: float = 0.0) -> State:
    """Runs the program on caches filled with `filler`."""
    batch = request.tokens.shape[0]
    caches = (
        KVCache.zeros(target.config, batch, CAPACITY, jnp.float32, proposer.num_drafts + 1),
        proposer.new_cache(batch, CAPACITY, jnp.float32),
    )
    caches = jax.tree.map(lambda x: x + filler, caches)
    return generate_tokens(target.weights, proposer, request, *caches, prompt_rows=BUCKET)


def run(
    target: LoadedTarget, proposer: Proposer, request: Request, filler: float = 0.0
) -> tuple[Outcome, KVCache, KVCache]:
    state = start(target, proposer, request, filler)
    drafter_cache = getattr(state.draft_state, "cache", None)
    return Outcome.of(request, state, proposer.num_drafts), state.target_cache, drafter_cache


def new_tokens(request: Request, generation: Outcome) -> list[list[int]]:
    return [
        np.asarray(generation.tokens[row, request.lengths[row] : length]).tolist()
        for row, length in enumerate(generation.lengths)
    ]


def naive_greedy(target: LoadedTarget, prompt: Sequence[int], budget: int) -> list[int]:
    """Decodes without a cache: one full forward over a padded sequence per token."""

    @jax.jit
    def logits(tokens: jax.Array, at: jax.Array) -> jax.Array:
        model = target.weights.merge()
        positions = jnp.arange(CAPACITY)[None]
        causal = jnp.tril(jnp.ones((1, CAPACITY, CAPACITY), bool))
        x, *_ = model(tokens[None], positions, masked([causal] * target.config.num_layers))
        return model.logits(x[0, at])

    tokens = np.zeros((CAPACITY,), np.int32)
    tokens[: len(prompt)] = prompt
    for length in range(len(prompt), len(prompt) + budget):
        tokens[length] = int(jnp.argmax(logits(jnp.asarray(tokens), length - 1)))
    return tokens[len(prompt) : len(prompt) + budget].tolist()


PROMPTS = [[5, 60, 33], list(range(20, 36)), [9]]
BUDGET = 40


@pytest.fixture(scope="module")
def plain(target: LoadedTarget) -> list[list[int]]:
    """What the target says after each of PROMPTS, by naive decoding."""
    return [naive_greedy(target, prompt, BUDGET) for prompt in PROMPTS]


def script(plain: list[list[int]], accepts: Sequence[int], beside: Proposer) -> ScriptedDraft:
    """Drafts the known continuations of PROMPTS."""
    tokens = np.zeros((len(PROMPTS), CAPACITY), np.int32)
    for row, (prompt, continuation) in enumerate(zip(PROMPTS, plain, strict=True)):
        tokens[row, len(prompt) : len(prompt) + BUDGET] = continuation
    return ScriptedDraft(jnp.asarray(tokens), jnp.asarray(accepts, jnp.int32), beside)


def parallel(drafter: LoadedDrafter, num_drafts: int) -> ParallelDraft:
    return ParallelDraft(drafter.weights, num_drafts, drafter.config.aux_boundaries)


def test_plain_decoding_equals_naive_decoding(target: LoadedTarget, plain: list[list[int]]) -> None:
    assert len({t for row in plain for t in row}) > 20  # the texts are not one repeated token
    request = make_request(PROMPTS, [BUDGET] * 3)
    generation, *_ = run(target, NoDraft(), request)
    assert new_tokens(request, generation) == plain
    assert generation.rounds == BUDGET - 1


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 7])
def test_random_drafter_is_lossless(
    target: LoadedTarget, drafter: LoadedDrafter, plain: list[list[int]], num_drafts: int
) -> None:
    request = make_request(PROMPTS, [BUDGET] * 3)
    generation, *_ = run(target, parallel(drafter, num_drafts), request)
    assert new_tokens(request, generation) == plain


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_oracle_drafter_reaches_the_longest_acceptance(
    target: LoadedTarget, plain: list[list[int]], num_drafts: int
) -> None:
    budget = 1 + 4 * (num_drafts + 1)
    request = make_request(PROMPTS, [budget] * 3)
    proposer = script(plain, [num_drafts], NoDraft(num_drafts))
    generation, *_ = run(target, proposer, request)
    assert new_tokens(request, generation) == [row[:budget] for row in plain]
    assert generation.rounds == 4  # acceptance length is exactly K + 1
    np.testing.assert_array_equal(generation.accepted_per_position, 4)


def test_always_wrong_drafter_costs_rounds_but_no_token(
    target: LoadedTarget, plain: list[list[int]]
) -> None:
    request = make_request(PROMPTS, [BUDGET] * 3)
    generation, *_ = run(target, script(plain, [0], NoDraft(3)), request)
    assert new_tokens(request, generation) == plain
    assert generation.rounds == BUDGET - 1
    np.testing.assert_array_equal(generation.accepted_per_position, 0)


@pytest.mark.parametrize("extra", [-2, 0, 1, 2])
def test_budget_ends_inside_and_at_the_end_of_a_block(
    target: LoadedTarget, drafter: LoadedDrafter, plain: list[list[int]], extra: int
) -> None:
    """max_new_tokens of 1, K, K + 1, K + 2 and different for each row."""
    for accepts in ([3], [0], [1, 3, 0, 2]):
        proposer = script(plain, accepts, parallel(drafter, 3))
        budgets = [3 + extra, 11 + extra, 1]
        request = make_request(PROMPTS, budgets)
        generation, *_ = run(target, proposer, request)
        assert new_tokens(request, generation) == [
            row[:budget] for row, budget in zip(plain, budgets, strict=True)
        ]
        total = int(generation.accepted_per_position.sum() + generation.active_rounds.sum())
        assert total == sum(budgets) - 3  # every token but each row's first comes from a round


@pytest.mark.parametrize("offset", range(6))
def test_eos_at_every_offset_of_a_block(
    target: LoadedTarget, plain: list[list[int]], offset: int
) -> None:
    eos = [plain[0][offset], plain[1][offset + 3]]
    expected = []
    for row in plain:
        ends = [i for i, token in enumerate(row) if token in eos]
        expected.append(row[: ends[0] + 1] if ends else row)
    assert len(expected[0]) <= offset + 1
    request = make_request(PROMPTS, [BUDGET] * 3, eos)
    for accepts in ([3], [2, 0, 3]):
        generation, *_ = run(target, script(plain, accepts, NoDraft(3)), request)
        assert new_tokens(request, generation) == expected


def test_rows_of_a_batch_equal_rows_alone(
    target: LoadedTarget, drafter: LoadedDrafter, plain: list[list[int]]
) -> None:
    """Different prompt lengths, acceptances and ends; drafts do not depend on the batch."""
    batch = make_request(PROMPTS, [BUDGET, 7, 23])
    together, *_ = run(target, parallel(drafter, 3), batch)
    for row, prompt in enumerate(PROMPTS):
        alone = make_request([prompt], [int(batch.budgets[row])])
        generation, *_ = run(target, parallel(drafter, 3), alone)
        assert new_tokens(alone, generation)[0] == new_tokens(batch, together)[row]
        assert generation.active_rounds[0] == together.active_rounds[row]
        np.testing.assert_array_equal(
            generation.accepted_per_position[0], together.accepted_per_position[row]
        )


def test_slots_beyond_a_row_have_no_influence(
    target: LoadedTarget, drafter: LoadedDrafter, plain: list[list[int]]
) -> None:
    request = make_request(PROMPTS, [BUDGET] * 3)
    generation, *_ = run(target, parallel(drafter, 3), request, filler=1e4)
    assert new_tokens(request, generation) == plain


@pytest.mark.parametrize("accepts", [[0], [2], [3, 0, 1]])
def test_drafter_cache_equals_a_fresh_prefill(
    target: LoadedTarget, drafter: LoadedDrafter, plain: list[list[int]], accepts: list[int]
) -> None:
    """What mask slots left behind is overwritten by rows with the target's features."""
    request = make_request(PROMPTS, [BUDGET] * 3)
    generation, target_cache, draft_cache = run(
        target, script(plain, accepts, parallel(drafter, 3)), request
    )
    model, head = target.weights.merge(), drafter.weights.merge()
    for row, prompt in enumerate(PROMPTS):
        committed = len(prompt) + BUDGET - 5  # the last round's rows wait for the next one
        tokens = generation.tokens[row, : committed + 1][None]
        positions = jnp.arange(committed)[None]
        causal = jnp.tril(jnp.ones((1, committed, committed), bool))
        _, features, kv = model(tokens[:, :-1], positions, masked([causal] * 3), (1, 2, 3))
        _, draft_kv = head(
            tokens[:, 1:], head.project(features), positions, masked([causal] * 2), model
        )
        for fresh, cache in ((kv, target_cache), (draft_kv, draft_cache)):
            for new, old in zip(fresh.keys + fresh.values, cache.keys + cache.values, strict=True):
                np.testing.assert_allclose(new[0], old[row, :, :committed], atol=2e-4, rtol=1e-3)


def test_first_drafts_do_not_depend_on_how_many_follow(
    target: LoadedTarget, drafter: LoadedDrafter
) -> None:
    """drafts[:i] are the same for every K > i, after a prefill and after a round."""
    model = target.weights.merge()
    request = make_request(PROMPTS, [1] * 3)
    drafted = {}
    for num_drafts in (1, 3, 8):
        proposer = parallel(drafter, num_drafts)
        drafted[num_drafts] = _drafts_after(model, proposer, request, [2, 1, 0])
    for num_drafts, drafts in drafted.items():
        np.testing.assert_array_equal(drafts, drafted[8][..., :num_drafts])
    assert len(np.unique(drafted[8])) > 10


def _drafts_after(
    model: Target, proposer: ParallelDraft, request: Request, accepted: list[int]
) -> np.ndarray:
    """Returns the drafts [2, B, K] after the prefill and after `accepted` drafts of a round."""
    batch = request.tokens.shape[0]
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 90, (batch, CAPACITY)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(CAPACITY), (batch, CAPACITY))
    causal = jnp.tril(jnp.ones((batch, CAPACITY, CAPACITY), bool))
    attend = masked([causal] * model.config.num_layers)
    _, features, _ = model(tokens, positions, attend, proposer.aux_boundaries)
    state = proposer.read(
        model,
        PromptRows(
            tokens[:, 1:BUCKET],
            features[:, : BUCKET - 1],
            positions[:, : BUCKET - 1],
            request.lengths - 1,
        ),
        proposer.start(model, proposer.new_cache(batch, CAPACITY, jnp.float32)),
        empty=True,
    )
    drafts, length = [], request.lengths + 1
    for kept in (np.zeros(batch, np.int32), np.minimum(accepted, proposer.num_drafts)):
        rows = (length - kept - 2)[:, None] + jnp.arange(proposer.num_drafts + 1)
        seen = Committed(
            tokens, length, jnp.asarray(kept, jnp.int32),
            jnp.take_along_axis(features, rows[..., None], axis=1), jnp.int32(0),
        )  # fmt: skip
        made, _, state = proposer.propose(model, state, seen, None)
        drafts.append(np.asarray(made))
        length = length + 1 + np.minimum(accepted, 1)  # the same tokens for every K
    return np.stack(drafts)


def test_mask_slots_shape_every_draft_but_the_first(target: LoadedTarget) -> None:
    """Another `mask_hidden` changes drafts 1.. and never draft 0."""
    model = target.weights.merge()
    request = make_request(PROMPTS, [1] * 3)
    head, other = random_drafter().weights.merge(), random_drafter().weights.merge()
    other.mask_hidden[...] = -other.mask_hidden[...]
    ours, theirs = (
        _drafts_after(
            model, ParallelDraft(Frozen.of(m), 5, DRAFTER.aux_boundaries), request, [0, 0, 0]
        )
        for m in (head, other)
    )
    np.testing.assert_array_equal(ours[..., 0], theirs[..., 0])
    assert (ours[..., 1:] != theirs[..., 1:]).mean() > 0.5


def test_exact_plain_decoding_is_bit_equal(target: LoadedTarget, drafter: LoadedDrafter) -> None:
    """The K + 1 row program gives the same bits whichever of its rows a token stands in."""
    request = make_request(PROMPTS, [BUDGET] * 3)
    exact, exact_cache, _ = run(target, NoDraft(3), request)
    plain = new_tokens(request, exact)
    drafted, cache, _ = run(target, script(plain, [3, 1, 2, 0], NoDraft(3)), request)
    assert new_tokens(request, drafted) == plain
    for ours, theirs in zip(exact_cache.values, cache.values, strict=True):
        for row, prompt in enumerate(PROMPTS):
            committed = len(prompt) + BUDGET - 1
            np.testing.assert_array_equal(ours[row, :, :committed], theirs[row, :, :committed])


def test_it_is_one_program(target: LoadedTarget, drafter: LoadedDrafter) -> None:
    """One executable, one loop over rounds, no transfer between prompt and last token."""
    proposer = parallel(drafter, 3)
    request = make_request(PROMPTS, [BUDGET] * 3)
    caches = (
        KVCache.zeros(target.config, 3, CAPACITY, jnp.float32, proposer.num_drafts + 1),
        proposer.new_cache(3, CAPACITY, jnp.float32),
    )
    lowered = generate_tokens.lower(target.weights, proposer, request, *caches, prompt_rows=BUCKET)
    text = lowered.as_text()
    assert text.count("stablehlo.while") == 1
    assert "custom_call" not in text or "callback" not in text
    compiled = lowered.compile()
    cache_bytes = sum(x.nbytes for x in jax.tree.leaves(caches))
    assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(compiled(target.weights, proposer, request, *caches))
    assert all(x.is_deleted() for x in jax.tree.leaves(caches))  # donated


def test_one_drafter_forward_per_round(
    target: LoadedTarget, drafter: LoadedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter is traced twice: once for the prefill, once in the body of the loop."""
    calls = []
    forward = Drafter.__call__

    def counted(self: Drafter, *args: object) -> object:
        calls.append(args[0].shape)
        return forward(self, *args)

    monkeypatch.setattr(Drafter, "__call__", counted)
    proposer = parallel(drafter, 4)
    request = make_request(PROMPTS, [BUDGET] * 3)
    jax.make_jaxpr(
        lambda: start(target, proposer, request)
    )()  # fmt: skip
    assert calls.count((3, 2 * 4)) == 1
    assert calls.count((3, BUCKET - 1)) == 1
    assert len(calls) == 2


def test_capacity_holds_the_furthest_row() -> None:
    """The last draft pass starts at most one short of the length and spans 2K rows."""
    for tokens in (1, 100, 128, 250):
        for drafts in (0, 1, 7):
            capacity = capacity_for(tokens, drafts)
            assert capacity % 128 == 0
            assert tokens + 2 * drafts + 1 <= capacity < tokens + 2 * drafts + 1 + 128


@pytest.mark.parametrize("num_drafts", [1, 3, 6])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_acceptance_pattern_is_lossless(
    target: LoadedTarget, num_drafts: int, data: st.DataObject
) -> None:
    """Random prompts, budgets, EOS ids and acceptance patterns through a scripted drafter."""
    lengths = st.integers(1, BUCKET)
    prompts = [
        data.draw(st.lists(st.integers(0, 95), min_size=n, max_size=n))
        for n in data.draw(st.lists(lengths, min_size=3, max_size=3))
    ]
    budgets = data.draw(st.lists(st.integers(0, BUDGET), min_size=3, max_size=3))
    eos = data.draw(st.lists(st.integers(0, 95), min_size=2, max_size=2))
    accepts = data.draw(st.lists(st.integers(0, num_drafts), min_size=4, max_size=4))
    request = make_request(prompts, budgets, eos)
    plain, *_ = run(target, NoDraft(), request)
    script = ScriptedDraft(
        jnp.asarray(plain.tokens), jnp.asarray(accepts, jnp.int32), NoDraft(num_drafts)
    )
    drafted, *_ = run(target, script, request)
    assert new_tokens(request, drafted) == new_tokens(request, plain)
    emitted = np.asarray(drafted.lengths - request.lengths)
    rounds = np.asarray(drafted.active_rounds)
    accepted = np.asarray(drafted.accepted_per_position).sum(axis=1)
    np.testing.assert_array_equal(emitted, np.minimum(budgets, 1) + rounds + accepted)
    assert (np.diff(np.asarray(drafted.accepted_per_position), axis=1) <= 0).all()
