"""Settings of sampled answers: what is refused, seeds, and what compiles."""

import dataclasses
import math
import sys
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jax
import numpy as np
import pytest
from conftest import DRAFTER, random_drafter, random_target

import peagle_jax
from peagle_jax import SamplingParams
from peagle_jax.load import LoadedDrafter, LoadedTarget

PROMPTS = [[5, 60, 33], list(range(20, 50)), [9], [9]]
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [NAN, INF, -INF, -0.1, True, "1", None, 1e11, 10**400, 1j, Decimal(1)]),
        ("top_k", [-2, 1.0, True, "5", None, 2**31, NAN]),
        ("top_p", [0, -0.5, 1.0001, NAN, INF, True, None, "0.5"]),
        ("min_p", [-0.01, 1.01, NAN, INF, False, None, [0.1]]),
        ("repetition_penalty", [0, -1.0, NAN, INF, True, None, 1e-11, 1e11]),
        ("presence_penalty", [NAN, INF, -INF, True, None, "1", 1e11, -1e11]),
        ("frequency_penalty", [NAN, INF, -INF, False, None, "1", 1e39]),
        ("min_new_tokens", [-1, 1.5, True, None, 2**31]),
        ("seed", [-1, 2**64, 1.0, True, "1", NAN]),
        ("logprobs", [-1, 101, 1.0, True, "1"]),
        ("logit_bias", [5, [5], "5", {"5": 1.0}, {5.0: 1}, {True: 1}, {-1: 1.0}, {5: NAN}]),
        ("logit_bias", [{5: INF}, {5: -INF}, {5: "1"}, {5: True}, {5: None}, {5: 1e39}]),
        ("allowed_token_ids", [[], 5, "56", b"5", {5}, iter([5]), [-1], [1.0], [True], ["5"]]),
        ("allowed_token_ids", [np.array([5]), [[5]], [None], [2**31]]),
        ("bad_token_ids", [None, 5, "5", b"5", [-1], [0.0], [False], ["5"], [2**40]]),
        ("stop_token_ids", [None, 5, "5", b"5", [-1], [0.0], [False], ["5"], [2**40]]),
        ("ignore_eos", [1, None, "yes"]),
        ("include_stop_str_in_output", [0, None, "no"]),
        ("stop", ["word", b"word", [""], [5], None, 5]),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError) as error:
            SamplingParams(**{name: value})
        assert name.replace("include_stop_str_in_output", "include") in str(error.value), value
        assert "\n" not in str(error.value)


def test_ids_that_exclude_each_other_leave_nothing() -> None:
    with pytest.raises(ValueError, match="allowed_token_ids leaves no token"):
        SamplingParams(allowed_token_ids=[4, 5], bad_token_ids=[5, 4])


def test_what_is_a_number_is_taken() -> None:
    """Also the ends of each range."""
    for values in (
        {"temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0, "seed": 0},
        {"temperature": 1e10, "top_k": 2**31 - 1, "top_p": 1e-9, "min_p": 1, "seed": 2**64 - 1},
        {"temperature": np.float32(0.5), "top_k": np.int64(4), "seed": np.uint64(7)},
        {"temperature": Fraction(1, 3), "presence_penalty": -3, "frequency_penalty": 2},
        {"repetition_penalty": 1e-10, "logit_bias": {np.int32(3): -1e10, 4: np.float64(2)}},
        {"allowed_token_ids": range(3), "bad_token_ids": (1,), "stop_token_ids": [2, 2]},
    ):
        params = SamplingParams(**values)
        assert {name: getattr(params, name) for name in values} == values


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logit_bias": {96: 1.0}}, "logit_bias: a token id must be an integer in 0..95, got 96"),
        ({"allowed_token_ids": [5, 96]}, "allowed_token_ids: a token id must be an integer in"),
        ({"bad_token_ids": [200]}, "bad_token_ids: a token id must be an integer in 0..95"),
        ({"stop_token_ids": [96]}, "stop_token_ids: a token id must be an integer in 0..95"),
        ({"logprobs": 97}, "logprobs must be an integer in 0..96"),
        ({"bad_token_ids": range(96)}, "no token may be generated"),
        ({"allowed_token_ids": [7, 8], "min_new_tokens": 1}, "no token may be generated"),
        (
            {"allowed_token_ids": [7, 3], "min_new_tokens": 1, "stop_token_ids": [3]},
            "no token may be generated",
        ),
    ],
)
def test_what_does_not_fit_the_target_is_refused_before_anything_runs(
    target: LoadedTarget, params: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["peagle_jax.batch"], "_compiled", None)
    config = dataclasses.replace(target.config, eos_token_ids=(7, 8))
    stopping = dataclasses.replace(target, config=config)
    for run in (peagle_jax.generate, peagle_jax.stream):
        with pytest.raises(ValueError) as error:
            run(stopping, [[5], [6]], sampling=[SamplingParams(), SamplingParams(**params)])
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"temperature": 1.0}, "sampling must be SamplingParams"),
        (0.7, "sampling must be SamplingParams"),
        ([None, None], "sampling must be SamplingParams"),
        ([], "0 SamplingParams for 2 prompts"),
        ([SamplingParams()], "1 SamplingParams for 2 prompts"),
    ],
)
def test_sampling_is_one_or_one_for_each(target: LoadedTarget, sampling: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        peagle_jax.generate(target, [[5], [6]], sampling=sampling)


# Seeds. The random target and head are float32.

PARAMS = [
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=1.3, seed=2**64 - 1, top_p=0.95, repetition_penalty=1.2),
    SamplingParams(temperature=0.8, seed=3, min_p=0.02, logit_bias={4: 1.0}),
    SamplingParams(temperature=0.8, seed=4, min_p=0.02, logit_bias={4: 1.0}),
]


@pytest.fixture(scope="module")
def near() -> LoadedDrafter:
    """A head that drafts few ids, so that with a high temperature some are accepted."""
    return random_drafter(dataclasses.replace(DRAFTER, draft_vocab_size=12))


def answers(target: LoadedTarget, rows: list[int], **options: Any) -> list[list[int]]:
    """What PROMPTS with their PARAMS are answered, with others at the end of the list."""
    out = peagle_jax.generate(
        target,
        [PROMPTS[row] for row in rows],
        sampling=[PARAMS[row] for row in rows],
        **{"max_new_tokens": 16, "num_speculative_tokens": 3, **options},
    )
    return [completion.token_ids for completion in out]


def test_the_same_request_gives_the_same_tokens(target: LoadedTarget, near: LoadedDrafter) -> None:
    """In another row, and alone."""
    options = {"drafter": near, "draft_sampling": "sample"}
    whole = answers(target, [0, 1, 2, 3], **options)
    assert len({tuple(answer) for answer in whole}) == 4
    assert whole[2][:4] != whole[3][:4]  # seeds alone differ
    assert answers(target, [3, 2, 1, 0], **options) == whole[::-1]
    assert answers(target, [2], **options) == [whole[2]]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sample", "greedy"])
def test_nothing_but_the_request_matters(
    target: LoadedTarget, near: LoadedDrafter, how: Any
) -> None:
    """Neither the batch's size, nor the others in it, nor the buckets, nor streaming."""
    options: dict[str, Any] = {"drafter": near, "draft_sampling": how}
    whole = answers(target, [0, 1, 2, 3], **options)
    assert answers(target, [0, 1, 2, 3, 0], batch_size=2, **options) == [*whole, whole[0]]
    # Beside a longer prompt and a larger budget: another bucket and another capacity.
    beside = peagle_jax.generate(
        target,
        [list(range(90)), PROMPTS[1], PROMPTS[0]],
        sampling=[SamplingParams(logprobs=2), PARAMS[1], PARAMS[0]],
        max_new_tokens=100,
        num_speculative_tokens=3,
        **options,
    )
    assert [c.token_ids[:16] for c in beside][1:] == [whole[1], whole[0]]
    for rounds in (1, 3):
        streamed: list[list[int]] = [[] for _ in PROMPTS]
        for piece in peagle_jax.stream(
            target,
            PROMPTS,
            sampling=PARAMS,
            rounds_per_piece=rounds,
            max_new_tokens=16,
            num_speculative_tokens=3,
            **options,
        ):
            streamed[piece.index] += piece.token_ids
        assert streamed == whole


def test_both_halves_of_a_seed_count(target: LoadedTarget) -> None:
    """And a seed may be of any integer type. Without one, answers differ."""
    seeds = [1, 1 << 32, (1 << 32) + 1, np.int8(1), np.int32(1), np.uint64(2**63), None, None]
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in seeds]
    out = peagle_jax.generate(target, [[9]] * 8, sampling=params, max_new_tokens=8)
    made = [tuple(completion.token_ids) for completion in out]
    assert made[0] == made[3] == made[4]
    assert len(set(made)) == 6


def test_greedy_rows_beside_sampled_ones_are_greedy(
    target: LoadedTarget, near: LoadedDrafter
) -> None:
    plain = [c.token_ids for c in peagle_jax.generate(target, PROMPTS, max_new_tokens=16)]
    mixed = [SamplingParams(), PARAMS[1], SamplingParams(temperature=1e-6, seed=8), PARAMS[3]]
    out = peagle_jax.generate(
        target,
        PROMPTS,
        drafter=near,
        sampling=mixed,
        max_new_tokens=16,
        num_speculative_tokens=3,
        draft_sampling="sample",
    )
    assert [out[0].token_ids, out[2].token_ids] == [plain[0], plain[2]]
    assert out[3].token_ids != plain[3]


@pytest.mark.parametrize(
    "changes",
    [
        # What takes memory is in the program if any row uses it, and may then have any value.
        [
            {"bad_token_ids": [3], "presence_penalty": 0.5},
            {"logit_bias": {5: 1.0}, "frequency_penalty": 1.0},
            {"allowed_token_ids": [4, 5, 6], "repetition_penalty": 1.3},
        ],
        pytest.param([{}, {}, {}], marks=pytest.mark.slow),
    ],
)
def test_other_values_compile_nothing(changes: list[dict[str, Any]]) -> None:
    """Counted by JAX's own event for every compilation by the backend."""
    # A vocabulary of its own, so that nothing is compiled yet.
    target = random_target(dataclasses.replace(random_target().config, vocab_size=100))
    drafter = random_drafter(dataclasses.replace(DRAFTER, vocab_size=100, draft_vocab_size=12))
    compiled = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)

    def run(*params: SamplingParams) -> None:
        peagle_jax.generate(
            target,
            [[5, 60], [9]],
            drafter=drafter,
            sampling=params,
            max_new_tokens=4,
            num_speculative_tokens=2,
            draft_sampling="sample",
        )

    first, second, third = changes
    run(SamplingParams(temperature=1.0, seed=1), SamplingParams(temperature=0.5, **first))
    assert compiled
    compiled.clear()
    run(
        SamplingParams(**second),
        SamplingParams(temperature=2.0, seed=5, top_k=4, top_p=0.3, min_p=0.1, stop_token_ids=[3]),
    )
    run(
        SamplingParams(temperature=1.0, min_new_tokens=3, stop_token_ids=[1, 2], **third),
        SamplingParams(),
    )
    assert compiled == []
