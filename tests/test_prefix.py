"""`prefill`: a prefix read once gives the tokens and the acceptance of reading it every time."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
from conftest import DRAFTER, FAMILIES, random_drafter, random_target
from tiny_tokenizer import byte_tokenizer
from tokenizers.processors import TemplateProcessing

import peagle_jax
from peagle_jax import SamplingParams
from peagle_jax.decoding import generate_tokens, read_prefix, reading
from peagle_jax.load import LoadedDrafter, LoadedTarget

# So few tokens that a random head is right now and then: its acceptance tells about its cache.
VOCABULARY = 8
# All prompts fit the smallest bucket, so that there is little to compile.
SUFFIXES = [[7, 4, 2, 1], [(5 * i) % 7 for i in range(9)], [3], [1, 2]]
LONG = [(13 * i * i + 5) % 7 for i in range(23)]  # several windows of 8
SHORT = [4, 1, 3]
HOT = [SamplingParams(temperature=10.0, seed=seed) for seed in range(3)]


def model(family: str = "llama", **changes: Any) -> LoadedTarget:
    config = dataclasses.replace(FAMILIES[family], vocab_size=VOCABULARY, **changes)
    return random_target(config, seed=3)


def head(family: str = "llama", eagle3: bool = False, seed: int = 1) -> LoadedDrafter:
    config = dataclasses.replace(
        DRAFTER,
        vocab_size=VOCABULARY,
        draft_vocab_size=VOCABULARY,
        mask_token_id=None if eagle3 else VOCABULARY - 1,
        sliding_windows=(None, 8 if family == "gpt_oss" else None),
    )
    return random_drafter(config, seed)


def check(
    target: LoadedTarget, prefix_ids: list[int], drafter: LoadedDrafter | None, **options: Any
) -> peagle_jax.GenerationResult:
    """Compares everything but times with and without the prefix.

    Sampled tokens depend on the drafts, so they tell about the drafter's cache too.
    """
    options.setdefault("max_new_tokens", 24)
    options.setdefault("sampling", [*HOT, SamplingParams()])
    whole = peagle_jax.generate(
        target, [prefix_ids + suffix for suffix in SUFFIXES], drafter=drafter, **options
    )
    prefix = peagle_jax.prefill(target, prefix_ids, drafter=drafter)
    for _ in range(2):  # it can be used again
        got = peagle_jax.generate(target, SUFFIXES, drafter=drafter, prefix=prefix, **options)
        assert [plain(c) for c in got] == [plain(c) for c in whole]
        for ours, theirs in zip(got, whole, strict=True):
            for a, b in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
                assert abs(a.logprob - b.logprob) < 1e-5
                assert [i for i, _ in a.top] == [i for i, _ in b.top]
    if drafter is not None:
        assert got.metrics.acceptance_length > 1.05
    return got


def plain(completion: peagle_jax.Completion) -> peagle_jax.Completion:
    return dataclasses.replace(completion, logprobs=None)


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Prefills take so many rows a pass. Programs are told apart by shapes alone: forget them."""

    def limit(rows: int) -> None:
        monkeypatch.setattr(reading, "PREFILL_ROWS", rows)
        _forget()

    yield limit
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    sys.modules["peagle_jax.batch"]._programs.clear()
    generate_tokens.clear_cache()
    read_prefix.clear_cache()


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_prefix_changes_nothing(family: str) -> None:
    """Windows shorter and longer than the prefix, in target and drafter."""
    target, drafter = model(family), head(family)
    for prefix in (SHORT, LONG):
        check(target, prefix, drafter, num_speculative_tokens=3)


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [1, 2, 4, 7])
@pytest.mark.parametrize("eagle3", [False, True], ids=["p-eagle", "eagle3"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_head(family: str, eagle3: bool, num_drafts: int) -> None:
    target, drafter = model(family), head(family, eagle3)
    for prefix in (SHORT, LONG):
        check(target, prefix, drafter, num_speculative_tokens=num_drafts)


def test_eagle3() -> None:
    check(model(), LONG, head(eagle3=True), num_speculative_tokens=2)


def test_plain_decoding_sampling_and_logprobs() -> None:
    params = [
        SamplingParams(temperature=0.8, seed=n, repetition_penalty=1.2, logprobs=2)
        for n in range(len(SUFFIXES))
    ]
    got = check(model(), LONG, None, sampling=params)
    assert len({tuple(c.token_ids) for c in got}) == len(SUFFIXES)


def test_sampled_drafts() -> None:
    params = SamplingParams(temperature=0.7, top_k=6, seed=5, logprobs=1)
    options: dict[str, Any] = {"draft_sampling": "sample", "num_speculative_tokens": 3}
    check(model(), LONG, head(), sampling=params, **options)


@pytest.mark.parametrize("num_drafts", [3, None])
def test_the_end_of_the_context(num_drafts: int | None) -> None:
    target = model(max_position_embeddings=40)
    drafter = head() if num_drafts else None
    got = check(target, LONG, drafter, num_speculative_tokens=num_drafts, max_new_tokens=15)
    assert [len(c.token_ids) for c in got] == [13, 8, 15, 15]
    prefix = peagle_jax.prefill(target, LONG)
    with pytest.raises(ValueError, match="prompt 0: 40 tokens leave no room"):
        peagle_jax.generate(target, [[1] * 17], prefix=prefix)
    with pytest.raises(ValueError, match="prompt 0: 40 tokens leave no room"):
        peagle_jax.prefill(target, [1] * 40)


@pytest.mark.parametrize(
    "family",
    ["gpt_oss", *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES if f != "gpt_oss")],
)
def test_passes_do_not_matter(family: str, few_rows: Callable[[int], None]) -> None:
    """One pass over the prompts, several, and several over prefix and prompts."""
    target, drafter = model(family), head(family)
    prompts = [LONG + suffix for suffix in SUFFIXES]
    options: dict[str, Any] = {"drafter": drafter, "num_speculative_tokens": 3}
    options |= {"max_new_tokens": 24, "sampling": [*HOT, SamplingParams()]}
    whole = peagle_jax.generate(target, prompts, **options)
    few_rows(16)  # 4 of each of 4 sequences, 16 of the prefix
    assert list(peagle_jax.generate(target, prompts, **options)) == list(whole)
    prefix = peagle_jax.prefill(target, LONG, drafter=drafter)
    assert list(peagle_jax.generate(target, SUFFIXES, prefix=prefix, **options)) == list(whole)


def test_a_prefix_of_other_models_is_refused() -> None:
    target, drafter = model(), head()
    with_head = peagle_jax.prefill(target, SHORT, drafter=drafter)
    without = peagle_jax.prefill(target, SHORT)
    for other, its_head, prefix in (
        (model(), drafter, with_head),
        (target, head(), with_head),
        (target, None, with_head),
        (target, drafter, without),
    ):
        with pytest.raises(ValueError, match="another target or drafter"):
            peagle_jax.generate(other, [[5]], drafter=its_head, prefix=prefix)


def test_streaming_and_text_after_a_prefix(target: LoadedTarget) -> None:
    """Text after a prefix gets no token that begins a text."""
    tokenizer = byte_tokenizer()
    special = tokenizer.convert_tokens_to_ids("<|0|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|0|> $A", special_tokens=[("<|0|>", special)]
    )
    talking = dataclasses.replace(target, tokenizer=tokenizer)
    prefix = peagle_jax.prefill(talking, "the end, ")
    assert prefix.token_ids[0] == special
    rest = tokenizer("abc", add_special_tokens=False)["input_ids"]
    expected = peagle_jax.generate(talking, [prefix.token_ids + rest], max_new_tokens=9)
    *_, last = peagle_jax.stream(talking, "abc", prefix=prefix, max_new_tokens=9)
    assert last.completion == expected[0]
    with pytest.raises(ValueError, match="messages after a prefix would begin another chat"):
        peagle_jax.generate(talking, [[{"role": "user", "content": "a"}]], prefix=prefix)
