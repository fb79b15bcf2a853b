"""What is emitted has exactly the target's law: chi-square tests against enumeration.

Every p-value here must be above ALPHA. All seeds are fixed, so a test that passes passes always.
Variants with a known fault, which real engines have had, must give p-values below REJECTED.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DRAFTER, random_drafter
from sampling_law import (
    Settings,
    TableDraft,
    TableTarget,
    as_sampling,
    fit,
    sequence_law,
    stop_ids,
)

import peagle_jax
from peagle_jax import SamplingParams
from peagle_jax.decoding import NoDraft, Proposer, Request, generate_tokens, program, verify
from peagle_jax.decoding.sampling import Purpose, Sampling, draw, gumbel, processed_logits
from peagle_jax.decoding.verify import accept_greedy, accept_sampled
from peagle_jax.load import LoadedTarget
from peagle_jax.models import KVCache, masked

ALPHA, REJECTED = 1e-4, 1e-12
RUNS = 200_200  # a multiple of the number of CONTROLS
VOCAB, PLACES, PROMPT = 5, 16, [1, 2]
REDUCED = [0, 1, 3, 4]  # target ids of the draft vocabulary

CONTROLS = {
    "none": Settings(),
    "greedy": Settings(temperature=0.0, frequency=0.7),
    "temperature": Settings(temperature=0.6),
    "top_k": Settings(top_k=3),
    "top_p": Settings(top_p=0.75),
    "min_p": Settings(min_p=0.25),
    "bias": Settings(bias={0: 1.5, 2: -1.0, 4: 0.5}),
    "allowed": Settings(allowed=[1, 2, 4]),
    "bad": Settings(bad=[3]),
    "repetition": Settings(repetition=1.7),
    "presence": Settings(presence=1.3),
    "frequency": Settings(frequency=-0.8),
    "min_new_tokens": Settings(min_new_tokens=2, stops=(0, 3)),
    "all": Settings(
        temperature=1.4, top_k=4, top_p=0.95, min_p=0.03, repetition=0.8, presence=0.4,
        frequency=0.5, min_new_tokens=3, bias={1: 0.7, 2: -0.4}, bad=[0], stops=(4,),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Kind:
    """A program: what drafts, and how many."""

    num_drafts: int
    one_pass: bool = True
    sample: bool = True
    reduced: bool = True
    tells: str = "true"

    @property
    def budget(self) -> int:
        """Tokens to generate: one from the prefill, and at best all that a round can emit."""
        return self.num_drafts + 2

    def proposer(self) -> Proposer:
        if self.num_drafts == 0:
            return NoDraft()
        ids = np.array(REDUCED if self.reduced else range(VOCAB))
        rng = np.random.default_rng(3)
        table = np.zeros((PLACES, VOCAB, len(ids)), np.float32)
        table[1:] = tables()[:-1][..., ids]  # near enough to the target to be accepted often
        table += rng.normal(0, 0.8, table.shape).astype(np.float32)
        return TableDraft(
            jnp.asarray(table), jnp.asarray(ids, jnp.int32), self.num_drafts, self.one_pass,
            self.sample, self.tells,
        )  # fmt: skip


@functools.cache
def tables() -> np.ndarray:
    """The target's logits `[P, V, V]` after a token at a place."""
    table = np.random.default_rng(2).normal(0, 1.3, (PLACES, VOCAB, VOCAB))
    return table.astype(np.float32)


def arguments(kind: Kind, settings: list[Settings], runs: int = RUNS) -> tuple[Any, ...]:
    tokens = np.zeros((runs, PLACES), np.int32)
    tokens[:, : len(PROMPT)] = PROMPT
    ones = np.ones((runs,), np.int32)
    seeds = np.stack([ones, np.arange(runs)], axis=1)
    arrays = map(jnp.asarray, (tokens, ones * len(PROMPT), ones * kind.budget))
    sampling = as_sampling(settings, VOCAB, seeds)
    request = Request(*arrays, stop_ids(settings, runs), sampling)
    none = KVCache((), ())
    return TableTarget(jnp.asarray(tables())), kind.proposer(), request, none, ()


@functools.cache
def compiled(kind: Kind) -> Callable[..., Any]:
    lowered = generate_tokens.lower(*arguments(kind, [Settings()]), prompt_rows=len(PROMPT))
    return lowered.compile(compiler_options={"xla_backend_optimization_level": 1})


def answers_of(state: Any, kind: Kind) -> np.ndarray:
    tokens = np.asarray(state.generation.tokens[:, len(PROMPT) :][:, : kind.budget])
    return tokens.astype(np.int8)


@functools.cache
def answers(kind: Kind, control: str) -> np.ndarray:
    """What the program answers `[RUNS, n]`, every row with its own seed."""
    return answers_of(compiled(kind)(*arguments(kind, [CONTROLS[control]])), kind)


def exact_law(settings: Settings, budget: int) -> dict[tuple[int, ...], float]:
    def logits_after(output: tuple[int, ...]) -> np.ndarray:
        return tables()[len(PROMPT) - 1 + len(output), [*PROMPT, *output][-1]]

    return sequence_law(logits_after, settings, PROMPT, budget)


GREEDY_DRAFTS, SAMPLED_DRAFTS = Kind(2, sample=False), Kind(2)


def cases() -> list[Any]:
    """Every control with two drafts; and some with other numbers and ways of drafting."""
    fast = [
        *((SAMPLED_DRAFTS, control) for control in CONTROLS),
        *((GREEDY_DRAFTS, c) for c in ("none", "greedy", "top_p", "repetition", "frequency")),
        *((GREEDY_DRAFTS, c) for c in ("min_new_tokens", "all")),
        (Kind(3, one_pass=False, reduced=False), "all"),
    ]
    kinds = [Kind(0)] + [
        Kind(n, one_pass, sample, reduced)
        for n in (1, 2, 3)
        for one_pass in (True, False)
        for sample in (True, False)
        for reduced in (True, False)
    ]
    some = ("none", "greedy", "top_p", "frequency", "min_new_tokens", "all")
    rest = [(kind, control) for kind in kinds for control in some]
    rest += [(GREEDY_DRAFTS, control) for control in CONTROLS if control not in some]
    slow = [pytest.param(*case, marks=pytest.mark.slow) for case in rest if case not in fast]
    return fast + slow


@pytest.mark.parametrize(("kind", "control"), cases())
def test_what_is_emitted_has_the_targets_law(kind: Kind, control: str) -> None:
    settings = CONTROLS[control]
    law = exact_law(settings, kind.budget)
    assert sum(law.values()) == pytest.approx(1)
    assert len(law) == 1 if control == "greedy" else len(law) > 3
    assert fit(answers(kind, control), law, settings.stops) > ALPHA


@pytest.mark.parametrize("kind", [SAMPLED_DRAFTS, GREEDY_DRAFTS])
def test_drafts_are_accepted_and_rejected(kind: Kind) -> None:
    """Otherwise the tests of the law would test nothing."""
    state = compiled(kind)(*arguments(kind, [Settings()]))
    rounds = np.asarray(state.generation.emitted_in[:, len(PROMPT) :][:, : kind.budget])
    needed, counts = np.unique(rounds[:, -1], return_counts=True)
    np.testing.assert_array_equal(needed, [1, 2, 3])  # all three tokens in one round, or one each
    assert (counts > 0.05 * RUNS).all()


@pytest.mark.parametrize(
    "kind", [SAMPLED_DRAFTS, pytest.param(GREEDY_DRAFTS, marks=pytest.mark.slow)]
)
def test_settings_are_each_rows_own(kind: Kind) -> None:
    """Greedy and sampled rows in one batch, in the program that was compiled for others."""
    mixed = answers_of(compiled(kind)(*arguments(kind, list(CONTROLS.values()))), kind)
    for row, (control, settings) in enumerate(CONTROLS.items()):
        ours, theirs = (x[row :: len(CONTROLS)] for x in (mixed, answers(kind, control)))
        ended = np.cumsum(np.isin(ours, settings.stops), axis=1) - np.isin(ours, settings.stops)
        assert ((ours == theirs) | (ended > 0)).all()


def test_a_draft_from_the_targets_own_law_is_always_accepted() -> None:
    """It would not be if draft and verification shared noise, or q went astray."""
    kind = Kind(3, one_pass=False, reduced=False)
    target, proposer, *rest = arguments(kind, [Settings()])
    table = jnp.roll(target.table, 1, axis=0)
    state = compiled(kind)(target, dataclasses.replace(proposer, table=table), *rest)
    assert int(state.generation.rounds) == 1
    law = exact_law(Settings(), kind.budget)
    assert fit(answers_of(state, kind), law, ()) > ALPHA


# Faults. Each replaces something that the program or the verification calls.


def reused_for_acceptance(patch: pytest.MonkeyPatch) -> None:
    def uniform(seeds: jax.Array, positions: jax.Array, purpose: Purpose) -> jax.Array:
        noise = gumbel(seeds, positions, Purpose.DRAFT, VOCAB)
        return jnp.exp(-jnp.exp(-noise[..., 0, 0]))

    patch.setattr(verify, "uniform", uniform)


def reused_for_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(verify, "gumbel", lambda s, at, _, size: gumbel(s, at, Purpose.DRAFT, size))


def residual_without_q(patch: pytest.MonkeyPatch) -> None:
    def accept(
        drafts: jax.Array, q: Any, law: jax.Array, sampling: Sampling, lengths: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        accepted, tokens = accept_sampled(drafts, q, law, sampling, lengths)
        own = jnp.take_along_axis(law, accepted[:, None, None], axis=1)
        at = (lengths + accepted)[:, None]
        token = draw(own, gumbel(sampling.seeds, at, Purpose.TOKEN, VOCAB))
        is_own = jnp.arange(tokens.shape[1]) == accepted[:, None]
        return accepted, jnp.where(is_own, token, tokens)

    patch.setattr(program, "accept_sampled", accept)


def bonus_without_processors(patch: pytest.MonkeyPatch) -> None:
    def processed(logits: jax.Array, *rest: Any) -> jax.Array:
        ours = processed_logits(logits, *rest)
        return ours if ours.shape[1] == 1 else ours.at[:, -1].set(logits[:, -1])

    patch.setattr(program, "processed_logits", processed)


def only_bonus_with_processors(patch: pytest.MonkeyPatch) -> None:
    def processed(logits: jax.Array, *rest: Any) -> jax.Array:
        return logits.at[:, -1].set(processed_logits(logits, *rest)[:, -1])

    patch.setattr(program, "processed_logits", processed)


def penalties_without_drafts(patch: pytest.MonkeyPatch) -> None:
    def processed(
        logits: jax.Array, sampling: Sampling, tokens: Any, prompts: Any, lengths: Any,
        drafts: jax.Array, stops: Any,
    ) -> jax.Array:  # fmt: skip
        nothing = jnp.full_like(drafts, -1)
        return processed_logits(logits, sampling, tokens, prompts, lengths, nothing, stops)

    patch.setattr(program, "processed_logits", processed)


def first_rows_law_for_all(patch: pytest.MonkeyPatch) -> None:
    """The law's rows are off by one from the drafts' on."""

    def accept(drafts: Any, q: Any, law: jax.Array, *rest: Any) -> tuple[jax.Array, jax.Array]:
        return accept_sampled(drafts, q, jnp.concatenate([law[:, :1], law[:, :-1]], 1), *rest)

    patch.setattr(program, "accept_sampled", accept)


def temperature_last(patch: pytest.MonkeyPatch) -> None:
    """tpu-inference's order."""
    honest = program.probabilities

    def probabilities(logits: jax.Array, sampling: Sampling) -> jax.Array:
        ones = jnp.ones_like(sampling.temperature)
        cut = honest(logits, dataclasses.replace(sampling, temperature=ones))
        return jax.nn.softmax(jnp.log(cut) / sampling.temperature[:, None, None])

    patch.setattr(program, "probabilities", probabilities)


def no_fault(patch: pytest.MonkeyPatch) -> None:
    """That the harness of the faults finds none of itself."""


PENALISED = Settings(presence=1.5, frequency=1.0)
BIASED = Settings(bias={0: 2.0, 3: -2.0})
SLOW = {"marks": pytest.mark.slow}


@pytest.mark.parametrize(
    ("fault", "kind", "settings"),
    [
        pytest.param(no_fault, Kind(2, tells="dense"), Settings()),
        pytest.param(reused_for_acceptance, Kind(2, reduced=False), Settings()),
        pytest.param(residual_without_q, SAMPLED_DRAFTS, Settings()),
        pytest.param(bonus_without_processors, SAMPLED_DRAFTS, BIASED),
        pytest.param(penalties_without_drafts, GREEDY_DRAFTS, PENALISED),
        pytest.param(no_fault, Kind(2, tells="unmapped"), Settings(), **SLOW),
        pytest.param(reused_for_tokens, Kind(2, reduced=False), Settings(), **SLOW),
        pytest.param(residual_without_q, GREEDY_DRAFTS, Settings(), **SLOW),
        pytest.param(only_bonus_with_processors, SAMPLED_DRAFTS, BIASED, **SLOW),
        pytest.param(first_rows_law_for_all, SAMPLED_DRAFTS, Settings(), **SLOW),
        pytest.param(
            temperature_last, SAMPLED_DRAFTS, Settings(temperature=0.5, top_p=0.75), **SLOW
        ),
    ],
)
def test_a_biased_program_is_rejected(
    fault: Callable[[pytest.MonkeyPatch], None],
    kind: Kind,
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    assert fit_afresh(kind, settings) < REJECTED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"), [(SAMPLED_DRAFTS, PENALISED), (Kind(2, tells="nothing"), Settings())]
)
def test_an_unbiased_program_is_not(kind: Kind, settings: Settings) -> None:
    """One that says nothing about its drawn drafts is: the rule is right whatever x is.

    Given any x, the emitted token is x with probability p(x), else a draw from p without x.
    """
    assert fit_afresh(kind, settings) > ALPHA


def fit_afresh(kind: Kind, settings: Settings) -> float:
    """Returns the p-value of 40k runs of a program that is traced now, with what is patched."""
    given = arguments(kind, [settings], runs=40_000)
    traced = jax.jit(lambda *a: generate_tokens.__wrapped__(*a, prompt_rows=len(PROMPT)))
    fresh = traced.lower(*given).compile(compiler_options={"xla_backend_optimization_level": 0})
    return fit(answers_of(fresh(*given), kind), exact_law(settings, kind.budget), settings.stops)


# The rule itself.


def test_a_greedy_law_gives_the_greedy_rule() -> None:
    """Whatever the drafts and what they were drawn from."""
    rng = np.random.default_rng(0)
    batch, drafts, vocab = 500, 3, 4
    logits = jnp.asarray(rng.normal(size=(batch, drafts + 1, vocab)), jnp.float32)
    best = jnp.argmax(logits, axis=-1)
    law = jax.nn.one_hot(best, vocab)
    proposed = jnp.asarray(rng.integers(-1, vocab, (batch, drafts)), jnp.int32)
    proposed = jnp.where(rng.random((batch, drafts)) < 0.6, best[:, :-1], proposed)
    seeds = np.stack([np.arange(batch)] * 2, axis=1)
    sampling = as_sampling([Settings(temperature=0.0)], vocab, seeds)
    accepted, tokens = accept_greedy(proposed, logits)
    own = jax.nn.one_hot(proposed, vocab)
    for q in (None, own, own * 0.5):
        ours, ours_tokens = accept_sampled(proposed, q, law, sampling, jnp.arange(batch))
        np.testing.assert_array_equal(ours, accepted)
        kept = np.arange(drafts + 1) <= np.asarray(accepted)[:, None]
        np.testing.assert_array_equal(np.where(kept, ours_tokens, 0), np.where(kept, tokens, 0))
    assert len(np.unique(accepted)) == drafts + 1


def test_a_rejection_that_rounding_left_nothing_for_draws_from_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not token 0, which is what an argmax over nothing gives."""
    monkeypatch.setattr(verify, "uniform", lambda _, at, __: jnp.full(at.shape, 0.9999999))
    runs = 4000
    law = jnp.broadcast_to(jnp.asarray([0.0, 0.25, 0.75]), (runs, 2, 3))
    q = jnp.nextafter(law[:, :1], jnp.inf) + 1e-6
    sampling = as_sampling([Settings()], 3, np.stack([np.arange(runs)] * 2, axis=1))
    drafts = jnp.full((runs, 1), 2, jnp.int32)
    accepted, tokens = accept_sampled(drafts, q, law, sampling, jnp.ones((runs,), jnp.int32))
    assert (np.asarray(accepted) == 0).all()
    assert fit(np.asarray(tokens[:, :1]), {(1,): 0.25, (2,): 0.75}, ()) > ALPHA


def test_no_token_without_probability_is_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the uniform number is 0."""
    monkeypatch.setattr(verify, "uniform", lambda _, at, __: jnp.zeros(at.shape))
    runs = 1000
    law = jnp.broadcast_to(jnp.asarray([0.5, 0.0, 0.5]), (runs, 2, 3))
    sampling = as_sampling([Settings()], 3, np.stack([np.arange(runs)] * 2, axis=1))
    drafts = jnp.ones((runs, 1), jnp.int32)
    for q in (None, jnp.full((runs, 1, 3), 1 / 3)):
        accepted, tokens = accept_sampled(drafts, q, law, sampling, jnp.ones((runs,), jnp.int32))
        assert (np.asarray(accepted) == 0).all()
        assert set(np.unique(tokens[:, 0])) == {0, 2}


# Real models, through the public interface.

HEADS = {
    "p_eagle": dataclasses.replace(DRAFTER, draft_vocab_size=4),
    "eagle3": dataclasses.replace(DRAFTER, draft_vocab_size=4, mask_token_id=None),
}


def logits_of(target: LoadedTarget, ids: list[int]) -> np.ndarray:
    """The target's logits after all of `ids`, without a cache."""
    length = len(ids)
    causal = jnp.tril(jnp.ones((1, length, length), bool))
    model = target.weights.merge()
    seen = masked([causal] * target.config.num_layers)
    x, *_ = model(jnp.asarray([ids], jnp.int32), jnp.arange(length)[None], seen)
    return np.asarray(model.logits(x[0, -1]))


@pytest.mark.parametrize(
    ("head", "draft_sampling"),
    [
        ("p_eagle", "sample"),
        pytest.param("eagle3", "sample", marks=pytest.mark.slow),
        pytest.param("p_eagle", "greedy", marks=pytest.mark.slow),
        pytest.param("eagle3", "greedy", marks=pytest.mark.slow),
    ],
)
def test_sampled_answers_of_a_real_program_have_the_targets_law(
    target: LoadedTarget, head: str, draft_sampling: Any
) -> None:
    drafter = random_drafter(HEADS[head])
    ids = np.asarray(drafter.weights.merge().to_target_ids(jnp.arange(4))).tolist()
    prompt, budget, runs = [5, 60, 33], 3, 2048
    left = [*ids, 50]  # one that is never drafted
    # All about as likely as each other after the prompt.
    flat = {t: 12.0 - float(logits_of(target, prompt)[t]) for t in left}
    settings = Settings(temperature=1.5, allowed=left, frequency=1.0, bias=flat)
    same: dict[str, Any] = {
        "temperature": 1.5, "allowed_token_ids": left, "frequency_penalty": 1.0, "logit_bias": flat
    }  # fmt: skip
    out = peagle_jax.generate(
        target,
        [prompt] * runs,
        drafter=drafter,
        sampling=[SamplingParams(seed=seed, **same) for seed in range(runs)],
        max_new_tokens=budget,
        num_speculative_tokens=2,
        draft_sampling=draft_sampling,
        batch_size=16,
    )
    answered = np.array([completion.token_ids for completion in out])
    known: dict[tuple[int, ...], np.ndarray] = {}

    def logits_after(output: tuple[int, ...]) -> np.ndarray:
        if output not in known:
            known[output] = logits_of(target, [*prompt, *output])
        return known[output]

    law = sequence_law(logits_after, settings, prompt, budget)
    assert sum(chance > 10 / runs for chance in law.values()) > 20
    assert fit(answered, law, ()) > ALPHA
    assert out.metrics.acceptance_length is not None
    assert 1.1 < out.metrics.acceptance_length < 2.9
    unpenalised = dataclasses.replace(settings, frequency=0.0)
    assert fit(answered, sequence_law(logits_after, unpenalised, prompt, budget), ()) < REJECTED
