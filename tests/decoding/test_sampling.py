"""Logits processors against transformers and against float64; the random numbers."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling_law import Settings, as_sampling, stop_ids
from scipy import stats

from peagle_jax.decoding import Penalties, Sampling
from peagle_jax.decoding.sampling import (
    Purpose,
    draw,
    gumbel,
    probabilities,
    processed_logits,
    uniform,
)

VOCAB, CAPACITY = 12, 16


def test_processors_equal_those_of_transformers() -> None:
    """All sequences in one batch, each with its own settings; later rows see the drafts."""
    golden = dict(np.load(GOLDEN / "processors.npz"))
    batch = len(golden["logits"])
    ones = np.ones((batch,), np.float32)
    sampling = Sampling(
        seeds=jnp.zeros((batch, 2), jnp.uint32),
        **{
            name: jnp.asarray(golden[name])
            for name in ("temperature", "top_k", "top_p", "min_p", "min_new_tokens")
        },
        bias=jnp.asarray(np.where(golden["banned"], -np.inf, golden["bias"])),
        penalties=Penalties(*map(jnp.asarray, (golden["repetition"], 0 * ones, 0 * ones))),
    )
    names = ("tokens", "prompt_lengths", "lengths", "drafts", "stop_ids")
    context = (jnp.asarray(golden[name]) for name in names)
    law = np.asarray(whole_law(jnp.asarray(golden["logits"]), sampling, *context))
    np.testing.assert_array_equal(law > 0, golden["law"] > 0)
    np.testing.assert_allclose(law, golden["law"], rtol=2e-5)
    kept = (law > 0).sum(axis=-1)
    assert {1, 2, 48} < set(kept.flat)  # that many tokens are left


def laws(
    chosen: Sequence[Settings],
    logits: np.ndarray,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    drafts: np.ndarray,
    bare: bool = False,
) -> np.ndarray:
    """Returns the law `[B, K + 1, V]` of the package."""
    batch, _, vocab = logits.shape
    tokens = np.full((batch, CAPACITY), 7, np.int32)  # junk that must not count
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        ids = [*prompt, *output]
        tokens[row, : len(ids)] = ids
    before = np.array([len(prompt) for prompt in prompts], np.int32)
    after = before + np.array([len(output) for output in outputs], np.int32)
    sampling = as_sampling(chosen, vocab, np.zeros((batch, 2), np.uint32), bare)
    arrays = map(jnp.asarray, (tokens, before, after, drafts))
    return np.asarray(whole_law(logits, sampling, *arrays, stop_ids(chosen, len(chosen))))


@jax.jit
def whole_law(logits: jax.Array, sampling: Sampling, *context: jax.Array) -> jax.Array:
    return probabilities(processed_logits(logits, sampling, *context), sampling)


def check(
    chosen: Sequence[Settings],
    logits: np.ndarray,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    drafts: np.ndarray,
    bare: bool = False,
) -> np.ndarray:
    """Compares every row that rounding cannot turn over, and returns the law."""
    ours = laws(chosen, logits, prompts, outputs, drafts, bare)
    for row, each in enumerate(chosen):
        for place in range(logits.shape[1]):
            seen = [*outputs[row], *drafts[row, :place].tolist()]
            law, margin = each.law_and_margin(logits[row, place], prompts[row], seen)
            if margin < 1e-5:
                continue
            np.testing.assert_array_equal(ours[row, place] > 0, law > 0)
            np.testing.assert_allclose(ours[row, place], law, rtol=3e-5, atol=1e-9)
    return ours


def test_every_control_in_one_batch() -> None:
    """Each beside the others, with ties, and with what lies at the ends of its range."""
    chosen = [
        Settings(),
        Settings(temperature=0.0),
        Settings(temperature=9e-6),
        Settings(temperature=0.01),
        Settings(temperature=50.0),
        Settings(top_k=1),
        Settings(top_k=3),
        Settings(top_k=VOCAB),
        Settings(top_k=VOCAB + 5),
        Settings(top_k=-1),
        Settings(top_k=2**31 - 1),
        Settings(top_p=1e-9),
        Settings(top_p=1e-60),  # 0 in float32
        Settings(top_p=0.5),
        Settings(top_p=0.9999999),
        Settings(min_p=1.0),
        Settings(min_p=0.2),
        Settings(min_p=1e-9),
        Settings(top_k=5, top_p=0.7),
        Settings(top_k=2, top_p=0.9999999),
        Settings(top_k=4, min_p=0.1, top_p=0.8, temperature=1.7),
        Settings(repetition=1.5),
        Settings(repetition=0.5),
        Settings(presence=2.0),
        Settings(presence=-2.0),
        Settings(frequency=1.5),
        Settings(repetition=1.3, presence=0.5, frequency=0.5, temperature=0.0),
        Settings(bias={2: 3.0, 5: -4.0}),
        Settings(allowed=[1, 3, 8]),
        Settings(allowed=[4], bad=[5], top_p=0.3, top_k=3, min_p=0.5),
        Settings(bad=[0, 1, 2]),
        Settings(min_new_tokens=3, stops=(2, 9)),
        Settings(min_new_tokens=4, stops=(2,), bias={2: 9.0}, temperature=0.0),
    ]
    rng = np.random.default_rng(1)
    batch, drafts = len(chosen), 3
    rough = rng.normal(0, 2, (batch, drafts + 1, VOCAB)).astype(np.float32)
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 5)).tolist() for _ in chosen]
    outputs = [rng.integers(0, VOCAB, rng.integers(0, 5)).tolist() for _ in chosen]
    proposed = rng.integers(0, VOCAB, (batch, drafts)).astype(np.int32)
    check(chosen, rough, prompts, outputs, proposed)
    ties = np.round(rough).astype(np.float32)
    law = check(chosen, ties, prompts, outputs, proposed)
    kept = (law > 0).sum(axis=-1)
    assert (kept[chosen.index(Settings(top_k=3))] > 3).any()  # ties with the third
    assert (kept[chosen.index(Settings(min_p=1.0))] >= (kept > 0)).all()
    # What is None by default is what it is where the settings say nothing.
    plain = [each for each in chosen if not each.bias and each.allowed is None and not each.bad]
    plain = [s for s in plain if (s.repetition, s.presence, s.frequency) == (1, 0, 0)]
    rows = [chosen.index(each) for each in plain]
    some = (
        plain, rough[rows], [prompts[r] for r in rows], [outputs[r] for r in rows], proposed[rows]
    )  # fmt: skip
    np.testing.assert_array_equal(laws(*some, bare=True), laws(*some))


def test_a_cut_is_made_whatever_the_other_rows_ask_for() -> None:
    """Top-k without top-p, and the other way round, alone and beside each other."""
    logits = np.log(np.array([[[0.1, 0.4, 0.3, 0.2]]], np.float32))
    nothing = np.zeros((1, 0), np.int32)
    for each, expected in (
        (Settings(top_k=2), [0, 4 / 7, 3 / 7, 0]),
        (Settings(top_p=0.6), [0, 4 / 7, 3 / 7, 0]),
        (Settings(top_p=0.65, top_k=3), [0, 4 / 7, 3 / 7, 0]),
        (Settings(top_p=0.35), [0, 1, 0, 0]),
        (Settings(min_p=0.6), [0, 4 / 7, 3 / 7, 0]),
        (Settings(), [0.1, 0.4, 0.3, 0.2]),
    ):
        for beside in (each, Settings(), Settings(top_p=0.9), Settings(temperature=0.0)):
            rows = np.repeat(logits, 2, axis=0)
            law = laws([each, beside], rows, [[0]] * 2, [[]] * 2, np.repeat(nothing, 2, axis=0))
            np.testing.assert_allclose(law[0, 0], expected, rtol=1e-5)


def test_a_low_temperature_is_not_a_greedy_one() -> None:
    """Which shows where the two best tie: the greedy one is the first of them."""
    logits = np.array([[[0.5, 2.0, 2.0, 1.0]]] * 4, np.float32)
    chosen = [Settings(temperature=t) for t in (0.0, 9e-6, 1e-5, 1e-3)]
    law = laws(chosen, logits, [[0]] * 4, [[]] * 4, np.zeros((4, 0), np.int32))[:, 0]
    np.testing.assert_array_equal(law[:2], [[0, 1, 0, 0]] * 2)
    np.testing.assert_array_equal(law[2:], [[0, 0.5, 0.5, 0]] * 2)


def test_top_p_of_one_cuts_nothing_of_a_large_vocabulary() -> None:
    """Though the sum of the shares before the last one rounds to 1 and above."""
    rows = np.random.default_rng(0).normal(0, 5, (2, 1, 50_000)).astype(np.float32)
    nothing = np.zeros((2, 0), np.int32)
    law = laws([Settings(), Settings(top_p=0.5)], rows, [[0]] * 2, [[]] * 2, nothing)
    assert (law[0] > 0).all()
    assert (law[1] > 0).sum() < 10_000


def test_penalties_see_the_drafts_before_each_row() -> None:
    """Counted one by one; a draft that is not one counts as nothing."""
    logits = np.zeros((3, 4, 5), np.float32)
    drafts = np.array([[1, 1, 2], [-1, -1, -1], [0, 3, 0]], np.int32)
    sampling = as_sampling(
        [Settings(frequency=1.0), Settings(frequency=1.0), Settings(presence=1.0)],
        5, np.zeros((3, 2), np.uint32),
    )  # fmt: skip
    tokens = np.array([[4, 3, 3, 1], [4, 3, 3, 1], [4, 3, 3, 1]], np.int32)
    arrays = map(jnp.asarray, (tokens, [1, 1, 1], [3, 3, 2], drafts, np.full((3, 2), -1)))
    processed = np.asarray(processed_logits(jnp.asarray(logits), sampling, *arrays))
    np.testing.assert_array_equal(
        processed[0],
        [[0, 0, 0, -2, 0], [0, -1, 0, -2, 0], [0, -2, 0, -2, 0], [0, -2, -1, -2, 0]],
    )
    np.testing.assert_array_equal(processed[1], [[0, 0, 0, -2, 0]] * 4)
    np.testing.assert_array_equal(
        processed[2], [[0, 0, 0, -1, 0], [-1, 0, 0, -1, 0], [-1, 0, 0, -1, 0], [-1, 0, 0, -1, 0]]
    )


def test_the_furthest_settings_leave_a_law() -> None:
    """What `SamplingParams` allows at most stays finite in float32."""
    most = 1e10
    chosen = [
        Settings(temperature=1e-5, repetition=1 / most, bias={1: most}),
        Settings(temperature=1e-5, repetition=most, bias=dict.fromkeys(range(VOCAB), -most)),
        Settings(temperature=most, frequency=most, presence=-most, bad=[3]),
        Settings(temperature=most, frequency=-most, presence=most, allowed=[0]),
    ]
    logits = np.random.default_rng(0).normal(0, 30, (4, 3, VOCAB)).astype(np.float32)
    drafts = np.array([[1, 1], [2, 0], [5, 5], [0, 0]], np.int32)
    law = laws(chosen, logits, [[0, 1]] * 4, [[1, 1, 1]] * 4, drafts)
    assert np.isfinite(law).all()
    np.testing.assert_allclose(law.sum(axis=-1), 1, rtol=1e-5)


@st.composite
def any_settings(draw_: st.DrawFn) -> Settings:
    ids = st.integers(0, VOCAB - 1)
    numbers = st.sampled_from([-2.0, -0.5, 0.25, 1.0, 3.0])
    allowed = draw_(st.none() | st.lists(ids, min_size=2, unique=True))
    bad = draw_(st.lists(ids, max_size=3, unique=True))
    stops = tuple(draw_(st.lists(ids, max_size=2, unique=True)))
    left = set(range(VOCAB) if allowed is None else allowed) - set(bad) - set(stops)
    assume(left)
    return Settings(
        temperature=draw_(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0])),
        top_k=draw_(st.integers(-1, VOCAB + 2)),
        top_p=draw_(st.sampled_from([1e-6, 0.3, 0.6, 0.9, 0.999, 1.0])),
        min_p=draw_(st.sampled_from([0.0, 0.01, 0.1, 0.7, 1.0])),
        repetition=draw_(st.sampled_from([1.0, 0.5, 1.25, 2.0])),
        presence=draw_(st.just(0.0) | numbers),
        frequency=draw_(st.just(0.0) | numbers),
        min_new_tokens=draw_(st.integers(0, 6)),
        bias=draw_(st.dictionaries(ids, numbers, max_size=3)),
        allowed=allowed,
        bad=bad,
        stops=stops,
    )


@settings(max_examples=60, deadline=None)
@given(
    chosen=st.lists(any_settings(), min_size=4, max_size=4),
    seed=st.integers(0, 2**32 - 1),
    ties=st.booleans(),
)
def test_any_settings(chosen: list[Settings], seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (4, 3, VOCAB)).astype(np.float32)
    if ties:
        logits = np.round(logits * 2) / 2
    prompts = [rng.integers(0, VOCAB, rng.integers(1, 6)).tolist() for _ in chosen]
    outputs = [rng.integers(0, VOCAB, rng.integers(0, 6)).tolist() for _ in chosen]
    check(chosen, logits, prompts, outputs, rng.integers(0, VOCAB, (4, 2)).astype(np.int32))


# Random numbers. Alpha of every test is 1e-4, and all seeds are fixed.


def seeds_and_places(count: int, places: int = 1) -> tuple[jax.Array, jax.Array]:
    seeds = np.stack([np.arange(count) % 7, np.arange(count)], axis=1)
    return jnp.asarray(seeds, jnp.uint32), jnp.tile(jnp.arange(places), (count, 1))


@pytest.mark.parametrize("vocab", [1, 2, 9, 257])
def test_a_draw_has_its_law(vocab: int) -> None:
    """Sizes that fill the square of groups, and that do not."""
    count = 40_000
    law = np.random.default_rng(vocab).dirichlet(np.full(vocab, 0.7))
    if vocab > 7:
        law[::7] = 0
    noise = gumbel(*seeds_and_places(count), Purpose.TOKEN, vocab)
    made = draw(jnp.broadcast_to(jnp.asarray(3 * law, jnp.float32), (count, 1, vocab)), noise)
    counts = np.bincount(np.asarray(made[:, 0]), minlength=vocab)
    assert counts[law == 0].sum() == 0
    expected = count * law / law.sum()
    rare = expected < 10
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    some = expected > 0
    if some.sum() > 1:
        assert stats.chisquare(observed[some], expected[some]).pvalue > 1e-4


def test_a_large_vocabularys_tail_is_drawn() -> None:
    """Four million tokens of 1e-8 each, which one float32 Gumbel number each would never draw."""
    vocab, count, tail = 2**22, 2000, 0.04
    law = np.full((vocab,), tail / (vocab - 1), np.float32)
    law[17] = 1 - tail
    noise = gumbel(*seeds_and_places(count), Purpose.TOKEN, vocab)
    made = np.asarray(jax.jit(jax.vmap(draw, in_axes=(None, 0)))(jnp.asarray(law), noise[:, 0]))
    drawn = made[made != 17]
    assert stats.binomtest(len(drawn), count, tail).pvalue > 1e-4
    assert stats.kstest(drawn / vocab, "uniform").pvalue > 1e-4


def test_streams_are_uniform_and_independent() -> None:
    """Over purposes, places and seeds: correlations below 4.5 standard errors."""
    count, places = 20_000, 3
    seeds, at = seeds_and_places(count, places)
    streams = []
    for purpose in Purpose:
        streams.append(np.asarray(uniform(seeds, at, purpose)).T)
        noise = np.asarray(gumbel(seeds, at, purpose, 4))  # [N, 3, 2, 2]
        streams.append(np.exp(-np.exp(-noise)).reshape(count, -1).T)
    columns = np.concatenate(streams)
    assert len(columns) == 3 * (3 + 12)
    for column in columns:
        assert stats.kstest(column, "uniform").pvalue > 1e-4
    own = np.zeros((len(columns),) * 2, bool)
    for purpose in range(3):  # one purpose's uniform and Gumbel numbers are never used together
        for place in range(places):
            base = purpose * 15
            own[base + place, base + 3 : base + 15] = True
    own |= own.T | np.eye(len(columns), dtype=bool)
    for both in (columns, np.abs(columns - 0.5)):
        correlation = np.corrcoef(both)
        assert np.abs(correlation[~own]).max() < 4.5 / np.sqrt(count)
    # From one seed to the next, and from one place to the next of the next seed.
    for shift in (1, 7):
        shifted = np.corrcoef(columns, np.roll(columns, shift, axis=1))[45:, :45]
        assert np.abs(shifted).max() < 4.7 / np.sqrt(count)


def test_numbers_depend_on_seed_place_and_purpose_alone() -> None:
    seeds = jnp.asarray([[0, 5], [5, 0], [0, 6], [2**32 - 1, 5]], jnp.uint32)
    at = jnp.asarray([[3, 4, 5]] * 4)
    uniforms = jax.jit(uniform, static_argnums=2)
    noises = jax.jit(gumbel, static_argnums=(2, 3))
    whole = {p: np.asarray(uniforms(seeds, at, p)) for p in Purpose}
    values = np.concatenate([x.ravel() for x in whole.values()])
    assert len(np.unique(values)) == len(values)  # both halves of a seed count
    for row, column in np.ndindex(4, 3):
        one = uniforms(seeds[row, None], at[row, None, column, None], Purpose.ACCEPT)
        assert one[0, 0] == whole[Purpose.ACCEPT][row, column]
    noise = noises(seeds, at, Purpose.TOKEN, 50)
    alone = noises(seeds[2:3], at[2:3, 1:2], Purpose.TOKEN, 50)
    np.testing.assert_array_equal(alone[0, 0], noise[2, 1])
