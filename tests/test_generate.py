"""The public API: prompts in every form, results, metrics, compilation, and bad input."""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from conftest import DEMO_DRAFTER, DRAFTER, TARGET, random_drafter, random_target

import peagle_jax
from peagle_jax.load import LoadedDrafter, LoadedTarget

PROMPTS = [[5, 60, 33], list(range(20, 50)), [9]]


def tokens(result: peagle_jax.GenerationResult) -> list[list[int]]:
    return [completion.token_ids for completion in result]


def test_drafter_changes_no_token(target: LoadedTarget, drafter: LoadedDrafter) -> None:
    plain = peagle_jax.generate(target, PROMPTS, max_new_tokens=20)
    drafted = peagle_jax.generate(
        target, PROMPTS, drafter=drafter, max_new_tokens=20, num_speculative_tokens=3
    )
    assert tokens(plain) == tokens(drafted)
    assert [c.prompt_token_ids for c in plain] == PROMPTS
    assert plain[0].text is None
    assert {c.finish_reason for c in plain} == {"length"}
    assert len(plain) == 3
    assert tokens(plain) == [plain[i].token_ids for i in range(3)]


def test_batches_do_not_matter(target: LoadedTarget, drafter: LoadedDrafter) -> None:
    prompts = PROMPTS * 2
    together = peagle_jax.generate(target, prompts, drafter=drafter, max_new_tokens=12)
    for size in (1, 3):
        parts = peagle_jax.generate(
            target, prompts, drafter=drafter, max_new_tokens=12, batch_size=size
        )
        assert tokens(parts) == tokens(together)
        assert parts.metrics.num_rounds == together.metrics.num_rounds


def test_eos_ids_end_a_sequence(target: LoadedTarget, drafter: LoadedDrafter) -> None:
    plain = tokens(peagle_jax.generate(target, PROMPTS, max_new_tokens=20))
    eos = (plain[0][4], plain[1][7])
    config = dataclasses.replace(target.config, eos_token_ids=eos)
    stopping = dataclasses.replace(target, config=config)
    for head in (None, drafter):
        out = peagle_jax.generate(stopping, PROMPTS, drafter=head, max_new_tokens=20)
        for row, completion in zip(plain, out, strict=True):
            ends = [i for i, token in enumerate(row) if token in eos]
            assert completion.token_ids == (row[: ends[0] + 1] if ends else row)
            assert completion.finish_reason == ("stop" if ends else "length")


def test_generation_ends_at_the_end_of_the_context(
    target: LoadedTarget, drafter: LoadedDrafter
) -> None:
    prompt = [(7 * i) % 96 for i in range(250)]  # of a context of 256
    for head in (None, drafter):
        out = peagle_jax.generate(target, [prompt, [4]], drafter=head, max_new_tokens=30)
        assert [len(c.token_ids) for c in out] == [6, 30]
        assert out[0].finish_reason == "length"


def test_metrics_add_up(target: LoadedTarget, drafter: LoadedDrafter) -> None:
    out = peagle_jax.generate(
        target, PROMPTS, drafter=drafter, max_new_tokens=20, num_speculative_tokens=3
    )
    metrics = out.metrics
    assert metrics.num_generated_tokens == 60
    assert metrics.acceptance_length is not None
    assert math.isclose(metrics.num_rounds * metrics.acceptance_length, 60 - 3)
    assert math.isclose(sum(metrics.acceptance_per_position), metrics.acceptance_length - 1)
    assert len(metrics.acceptance_per_position) == 3
    assert metrics.tokens_per_second == 60 / metrics.seconds
    plain = peagle_jax.generate(target, PROMPTS, max_new_tokens=20).metrics
    assert (plain.num_rounds, plain.acceptance_length) == (57, 1.0)
    one = peagle_jax.generate(target, PROMPTS, max_new_tokens=1).metrics
    assert (one.num_rounds, one.acceptance_length, one.acceptance_per_position) == (0, None, [])


def test_a_prompt_of_similar_size_compiles_nothing(
    target: LoadedTarget, drafter: LoadedDrafter
) -> None:
    """Counted by JAX's own event for every compilation by the backend."""
    compiled = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    options: dict[str, Any] = {"drafter": drafter, "num_speculative_tokens": 2}
    peagle_jax.generate(target, [list(range(40))] * 3, max_new_tokens=21, **options)
    assert compiled
    compiled.clear()
    out = peagle_jax.generate(target, [list(range(60))] * 4, max_new_tokens=25, **options)
    peagle_jax.generate(target, [list(range(33))] * 3, max_new_tokens=1, **options)
    assert compiled == []
    assert out.metrics.compile_seconds < 0.5


def test_exact_is_bit_equal_to_drafting(target: LoadedTarget, drafter: LoadedDrafter) -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "num_speculative_tokens": 4}
    exact = peagle_jax.generate(target, PROMPTS, exact=True, **options)
    assert tokens(exact) == tokens(peagle_jax.generate(target, PROMPTS, drafter=drafter, **options))
    assert exact.metrics.acceptance_length == 1.0


@pytest.mark.parametrize("num_drafts", [1, 2, 5])
def test_eagle3_head_drafts_one_after_the_other(target: LoadedTarget, num_drafts: int) -> None:
    head = random_drafter(dataclasses.replace(DRAFTER, mask_token_id=None))
    options: dict[str, Any] = {"max_new_tokens": 20, "num_speculative_tokens": num_drafts}
    plain = peagle_jax.generate(target, PROMPTS, max_new_tokens=20)
    drafted = peagle_jax.generate(target, PROMPTS, drafter=head, **options)
    assert tokens(plain) == tokens(drafted)
    assert len(drafted.metrics.acceptance_per_position) == num_drafts
    with pytest.raises(ValueError, match="EAGLE-3 head"):
        peagle_jax.generate(target, PROMPTS, drafter=head, drafting="parallel")


@pytest.mark.parametrize(
    ("changes", "wide"),
    [
        ({"aux_boundaries": (0, 3), "fc_norm": False}, {}),
        ({"norm_before_residual": True, "fc_norm": False, "norm_before_fc": True}, {}),
        ({"qk_norm": True, "sliding_windows": (5, None)}, {}),
        ({"draft_vocab_size": 96, "own_embedding": False, "own_lm_head": False}, {}),
        ({"hidden_size": 48, "attention_bias": True, "mlp_bias": True}, {}),
        ({}, {"sliding_windows": (6, None, 9), "qk_norm": True, "tie_word_embeddings": True}),
        ({}, {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True}),
    ],
)
def test_every_architecture_option_is_lossless(
    changes: dict[str, Any], wide: dict[str, Any]
) -> None:
    target = random_target(dataclasses.replace(TARGET, **wide))
    drafter = random_drafter(dataclasses.replace(DRAFTER, **changes))
    plain = peagle_jax.generate(target, PROMPTS, max_new_tokens=30)
    drafted = peagle_jax.generate(
        target, PROMPTS, drafter=drafter, max_new_tokens=30, num_speculative_tokens=3
    )
    assert tokens(plain) == tokens(drafted)


@pytest.mark.parametrize("mask_token_id", [95, None])
def test_a_drafter_goes_on_past_its_trained_length(
    target: LoadedTarget, mask_token_id: int | None
) -> None:
    """Positions make its RoPE, not a table; its drafts do not depend on the length it states."""
    long = random_drafter(dataclasses.replace(DRAFTER, mask_token_id=mask_token_id))
    config = dataclasses.replace(long.config, max_position_embeddings=8)
    short = random_drafter(config)
    ours, theirs = (
        peagle_jax.generate(target, PROMPTS, drafter=head, max_new_tokens=150)
        for head in (short, long)
    )
    assert tokens(ours) == tokens(theirs)
    assert ours.metrics.acceptance_per_position == theirs.metrics.acceptance_per_position
    assert sum(ours.metrics.acceptance_per_position) > 0


IMAGE = [{"role": "user", "content": [{"type": "image", "url": "x.png"}]}]


class Template:
    """Stands in for a tokenizer with a chat template."""

    chat_template = "yes"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": [[]]}, "prompt 0: it is empty"),
        ({"prompts": [[5], []]}, "prompt 1: it is empty"),
        ({"prompts": [1, 2, 3]}, "put a single list"),
        ({"prompts": ["text"]}, "no tokenizer"),
        ({"prompts": [[96]]}, "token id 96 is outside the vocabulary of 96"),
        ({"prompts": [[-1]]}, "token id -1 is outside"),
        ({"prompts": [[1.5]]}, "neither a token id"),
        ({"prompts": [7.0]}, "float is no prompt"),
        ({"prompts": [[1] * 256]}, "256 tokens leave no room in the target's context of 256"),
        ({"prompts": [[1] * 300]}, "shorten it to at most 255"),
        ({"prompts": [IMAGE]}, "no chat template"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1, got 0"),
        ({"max_new_tokens": -5}, "max_new_tokens must be an integer of at least 1, got -5"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be an integer of at least 1"),
        ({"num_speculative_tokens": 9}, "trained for 8 drafts"),
        ({"batch_size": 0}, "batch_size"),
        ({"target": "no/such/folder"}, "no/such/folder: no such folder"),
        ({"drafter": "./nowhere"}, "./nowhere: no such folder"),
    ],
)
def test_bad_input_is_one_error_before_compilation(
    target: LoadedTarget,
    drafter: LoadedDrafter,
    arguments: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["peagle_jax.batch"], "_compiled", None)
    call = {"target": target, "prompts": [[5]], "drafter": drafter, **arguments}
    with pytest.raises(ValueError) as error:
        peagle_jax.generate(call.pop("target"), call.pop("prompts"), **call)
    assert message in str(error.value)


def test_an_image_is_refused(target: LoadedTarget) -> None:
    chatting = dataclasses.replace(target, tokenizer=Template())
    with pytest.raises(ValueError, match="content of type 'image'; only text is supported"):
        peagle_jax.generate(chatting, [IMAGE])
    with pytest.raises(ValueError, match="each message must be"):
        peagle_jax.generate(chatting, [[{"content": "hello"}]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden_size": 64}, "hidden size 64, this target has 32"),
        ({"vocab_size": 128}, "vocabulary of 128, this target one of 96"),
        ({"aux_boundaries": (1, 2, 4)}, "boundaries 0..3"),
    ],
)
def test_a_drafter_of_another_target_is_refused(
    target: LoadedTarget, changes: dict[str, Any], message: str
) -> None:
    config = dataclasses.replace(DRAFTER, **changes)
    wrong = LoadedDrafter(config, random_drafter().weights, Path("random"))
    with pytest.raises(ValueError, match=message):
        peagle_jax.generate(target, [[5]], drafter=wrong)


def test_the_demo_models_are_lossless(demo_target: LoadedTarget) -> None:
    """The real target and head, all forms of prompts, text without special tokens."""
    target = demo_target
    drafter = peagle_jax.load_drafter(DEMO_DRAFTER)
    question = "What is the capital of France?"
    chat = [{"role": "user", "content": question}]
    parts = [{"role": "user", "content": [{"type": "text", "text": question}]}]
    ids = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    prompts = [chat, parts, list(ids), "The capital of France is"]
    plain = peagle_jax.generate(target, prompts, max_new_tokens=48)
    drafted = peagle_jax.generate(
        target, prompts, drafter=drafter, max_new_tokens=48, num_speculative_tokens=3
    )
    assert tokens(plain) == tokens(drafted)
    assert plain[0].token_ids == plain[1].token_ids == plain[2].token_ids
    assert "Paris" in plain[0].text and "Paris" in plain[3].text
    assert plain[0].finish_reason == "stop" and "<|im_end|>" not in plain[0].text
    assert drafted.metrics.acceptance_length > 1.05
    single = peagle_jax.generate(target, "The capital of France is", max_new_tokens=48)
    assert single[0].text == plain[3].text
    assert np.isfinite(drafted.metrics.tokens_per_second)
