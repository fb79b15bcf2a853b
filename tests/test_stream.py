"""`stream`: the pieces, the dispatches, donated state; and `generate(profile=True)`."""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from conftest import DRAFTER, TARGET, random_drafter, random_target
from tiny_tokenizer import byte_tokenizer

import peagle_jax
from peagle_jax import Piece, SamplingParams
from peagle_jax.load import LoadedDrafter, LoadedTarget

PROMPTS = [[5, 60, 33], list(range(20, 49)), [9]]
DRAFTS = 3


@pytest.fixture(scope="module")
def talking() -> LoadedTarget:
    return dataclasses.replace(
        random_target(dataclasses.replace(TARGET, eos_token_ids=(90,))), tokenizer=byte_tokenizer()
    )


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """The programs that are dispatched, by name, with their arguments."""
    module = sys.modules["peagle_jax.batch"]
    compiled, found = module._compiled, []

    def watched(function: Any, *arguments: Any, **statics: Any) -> Any:
        program = compiled(function, *arguments, **statics)

        def run(*arguments: Any) -> Any:
            found.append((function.__name__, arguments))
            return program(*arguments)

        return run

    monkeypatch.setattr(module, "_compiled", watched)
    return found


def collect(pieces: Iterator[Piece], tokenizer: Any, rows: int) -> list[peagle_jax.Completion]:
    """Checks what holds for every stream, and returns the completions."""
    texts, tokens = [""] * rows, [[] for _ in range(rows)]
    completions: dict[int, peagle_jax.Completion] = {}
    metrics = None
    for piece in pieces:
        assert piece.index not in completions and metrics is None
        texts[piece.index] += piece.text or ""
        tokens[piece.index] += piece.token_ids
        decoded = tokenizer.decode(tokens[piece.index], skip_special_tokens=True)
        if piece.completion is None:  # all that no later token can change, and nothing else
            assert texts[piece.index] == decoded.removesuffix("\ufffd")
        else:
            assert texts[piece.index] == piece.completion.text
            assert tokens[piece.index] == piece.completion.token_ids
            completions[piece.index] = piece.completion
        metrics = piece.metrics
    assert metrics is not None
    assert metrics.num_generated_tokens == sum(len(c.token_ids) for c in completions.values())
    assert metrics.num_rounds == sum(c.acceptance.num_rounds for c in completions.values())
    return [completions[row] for row in range(rows)]


@pytest.mark.parametrize("rounds_per_piece", [1, 4, 100])
def test_a_stream_is_the_generation_in_pieces(
    rounds_per_piece: int, talking: LoadedTarget, drafter: LoadedDrafter, runs: list[Any]
) -> None:
    options: dict[str, Any] = {
        "drafter": drafter,
        "max_new_tokens": 30,
        "num_speculative_tokens": DRAFTS,
    }
    whole = peagle_jax.generate(talking, PROMPTS, **options)
    assert [name for name, _ in runs] == ["generate_tokens"]
    runs.clear()
    pieces = peagle_jax.stream(talking, PROMPTS, rounds_per_piece=rounds_per_piece, **options)
    assert runs == []
    assert collect(pieces, talking.tokenizer, 3) == list(whole)
    assert any("\ufffd" in c.text for c in whole)  # some characters were left unfinished
    rounds = max(c.acceptance.num_rounds for c in whole)
    chunks = -(-rounds // rounds_per_piece)
    assert [name for name, _ in runs] == [
        "generate_tokens",
        *["continue_generation"] * (chunks - 1),
    ]
    for _, arguments in runs[1:]:  # what is large was donated
        state = arguments[3]
        donated = (state.features, state.target_cache, state.draft_state.cache)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
    for _, (models, *_) in runs:
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(models))


def test_no_text_past_a_stop_is_ever_shown(talking: LoadedTarget, drafter: LoadedDrafter) -> None:
    free = peagle_jax.generate(talking, PROMPTS, max_new_tokens=30)
    stops = [next(t[i : i + 3] for i in range(4, 30) if "\ufffd" not in t[i : i + 3])
             for t in (c.text for c in free)]  # fmt: skip
    shown = [""] * 3
    params = [SamplingParams(stop=[stop]) for stop in stops]
    pieces = peagle_jax.stream(
        talking, PROMPTS, drafter=drafter, sampling=params, max_new_tokens=30,
        num_speculative_tokens=DRAFTS,
    )  # fmt: skip
    for piece in pieces:
        shown[piece.index] += piece.text or ""
        whole = free[piece.index].text.partition(stops[piece.index])[0]
        assert whole.startswith(shown[piece.index])
        if piece.completion:
            assert shown[piece.index] == piece.completion.text == whole
            assert piece.completion.stop_reason == stops[piece.index]


def test_a_stopped_row_leaves_the_others_alone(
    talking: LoadedTarget, drafter: LoadedDrafter
) -> None:
    free = peagle_jax.generate(talking, PROMPTS, max_new_tokens=40)
    stop = free[1].text[2:4]
    params = [SamplingParams(), SamplingParams(stop=[stop]), SamplingParams()]
    got = peagle_jax.generate(
        talking, PROMPTS, drafter=drafter, sampling=params, max_new_tokens=40,
        num_speculative_tokens=DRAFTS,
    )  # fmt: skip
    assert got[1].stop_reason == stop and len(got[1].token_ids) < 16
    assert [got[i].token_ids for i in (0, 2)] == [free[i].token_ids for i in (0, 2)]


def test_without_a_tokenizer_there_are_token_ids(target: LoadedTarget) -> None:
    [whole] = peagle_jax.generate(target, [[5]], max_new_tokens=8)
    pieces = list(peagle_jax.stream(target, [[5]], max_new_tokens=8, rounds_per_piece=3))
    assert [len(piece.token_ids) for piece in pieces] == [4, 3, 1]
    assert {piece.text for piece in pieces} == {None}
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [piece.completion for piece in pieces] == [None, None, whole]


def test_errors_come_before_the_first_piece(target: LoadedTarget) -> None:
    with pytest.raises(ValueError, match="rounds_per_piece must be an integer of at least 1"):
        peagle_jax.stream(target, [[5]], rounds_per_piece=0)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        peagle_jax.stream(target, [[96]])


@pytest.mark.parametrize("mask_token_id", [95, pytest.param(None, marks=pytest.mark.slow)])
def test_profile_times_the_drafter_and_changes_nothing(
    mask_token_id: int | None, talking: LoadedTarget
) -> None:
    drafter = random_drafter(dataclasses.replace(DRAFTER, mask_token_id=mask_token_id))
    params = SamplingParams(stop=["\ufffd"])
    options: dict[str, Any] = {"drafter": drafter, "num_speculative_tokens": DRAFTS}
    options |= {"max_new_tokens": 30, "sampling": params}
    plain = peagle_jax.generate(talking, PROMPTS, **options)
    timed = peagle_jax.generate(talking, PROMPTS, profile=True, **options)
    assert list(timed) == list(plain)
    assert timed.metrics.num_rounds == plain.metrics.num_rounds
    assert plain.metrics.draft_share is None
    assert timed.metrics.draft_share is not None and timed.metrics.draft_share > 0
    without = peagle_jax.generate(talking, PROMPTS, max_new_tokens=4, profile=True)
    assert without.metrics.draft_share is None
