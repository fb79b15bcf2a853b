"""Log-probabilities are those of the target's own rows, with and without a drafter.

`test_stops.py` compares them with forwards without a cache, greedily, and cut at every stop.
"""

from typing import Any

import numpy as np
import pytest

import peagle_jax
from peagle_jax import SamplingParams
from peagle_jax.load import LoadedDrafter, LoadedTarget

PROMPTS = [[5, 60, 33], list(range(20, 49)), [9]]


def test_equal_to_plain_decoding(target: LoadedTarget, drafter: LoadedDrafter) -> None:
    """Before every processor: under penalties, bias and temperature they are the same."""
    params = [
        SamplingParams(logprobs=5, repetition_penalty=1.3),
        SamplingParams(logprobs=0, bad_token_ids=[3, 4], logit_bias={50: 2.0}),
        SamplingParams(min_new_tokens=3),
    ]
    options: dict[str, Any] = {"sampling": params, "max_new_tokens": 24}
    plain = peagle_jax.generate(target, PROMPTS, **options)
    drafted = peagle_jax.generate(
        target, PROMPTS, drafter=drafter, num_speculative_tokens=3, **options
    )
    assert drafted[2].logprobs is None is plain[2].logprobs
    for ours, theirs, count in zip(drafted, plain, (5, 0), strict=False):
        assert ours.token_ids == theirs.token_ids
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert (a.token_id, len(a.top)) == (b.token_id, count)
            assert abs(a.logprob - b.logprob) < 1e-5 and a.logprob < 0
            assert [i for i, _ in a.top] == [i for i, _ in b.top]
            np.testing.assert_allclose([v for _, v in a.top], [v for _, v in b.top], atol=1e-5)
            assert sorted(a.top, key=lambda each: -each[1]) == a.top
    # Some token is not the likeliest, for the penalty chose it; its own value is reported.
    assert any(entry.token_id != entry.top[0][0] for entry in drafted[0].logprobs)


def test_sampled_tokens_have_their_own(target: LoadedTarget, drafter: LoadedDrafter) -> None:
    """Temperature does not show: plain decoding of the same tokens reports the same values."""
    params = SamplingParams(temperature=1.5, seed=3, logprobs=96)
    options: dict[str, Any] = {"drafter": drafter, "num_speculative_tokens": 3}
    [sampled] = peagle_jax.generate(
        target, PROMPTS[:1], sampling=params, max_new_tokens=16, **options
    )
    assert len(set(sampled.token_ids)) > 5
    for count, entry in enumerate(sampled.logprobs):
        assert np.isclose(sum(np.exp(value) for _, value in entry.top), 1, atol=1e-4)
        assert dict(entry.top)[entry.token_id] == entry.logprob
        if count in (0, 1, 7, 15):
            [after] = peagle_jax.generate(
                target,
                [[*PROMPTS[0], *sampled.token_ids[:count]]],
                sampling=SamplingParams(logprobs=96),
                max_new_tokens=1,
            )
            ours, theirs = dict(entry.top), dict(after.logprobs[0].top)
            assert max(abs(ours[i] - theirs[i]) for i in range(96)) < 1e-5


def test_out_of_range(target: LoadedTarget) -> None:
    for count in (-1, 97, 101, True, 1.5):
        with pytest.raises(ValueError, match=r"logprobs must be an integer in 0\.\."):
            peagle_jax.generate(target, [[5]], sampling=SamplingParams(logprobs=count))
