"""Prompts in every form become token ids, or one error names the prompt that cannot."""

from collections import deque
from types import MappingProxyType, SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEMO_TARGET

from peagle_jax import load
from peagle_jax.prompts import PromptError, encode_prompts

VOCAB = 96


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The demo target's."""
    if not DEMO_TARGET.is_dir():
        pytest.skip("the demo's target is not there: make model")
    return load._tokenizer(DEMO_TARGET)


# Token ids


@pytest.mark.parametrize(
    "prompt",
    [
        [0, 5, 95],
        (0, 5, 95),
        deque([0, 5, 95]),
        np.array([0, 5, 95]),
        np.array([0, 5, 95], np.uint8),
        jnp.array([0, 5, 95]),
        [np.int32(0), np.int64(5), 95],
        [jnp.int32(0), 5, 95],
    ],
    ids=lambda prompt: type(prompt).__name__,
)
@pytest.mark.parametrize("kind", [list, tuple])
def test_token_ids_of_any_sequence(prompt: Any, kind: type) -> None:
    encoded = encode_prompts(kind([prompt, [1], range(2, 4)]), None, VOCAB)
    assert encoded == [[0, 5, 95], [1], [2, 3]]
    assert type(encoded[0]) is list and {type(i) for i in encoded[0]} == {int}


def test_the_callers_prompt_is_copied() -> None:
    prompt = [1, 2]
    encode_prompts([prompt], None, VOCAB)[0].append(3)
    assert prompt == [1, 2]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 96], "token id 96 is outside the vocabulary of 96"),
        (np.array([1, -1]), "token id -1 is outside the vocabulary of 96"),
        ([1 << 70], f"token id {1 << 70} is outside the vocabulary of 96"),
        ([1, True], "True is neither a token id nor a chat message"),
        (np.array([True]), "neither a token id nor a chat message"),
        (np.array([1.0]), "neither a token id nor a chat message"),
        ([1, "2"], "'2' is neither a token id nor a chat message"),
        ([1, None], "None is neither a token id nor a chat message"),
        ([[1, 2]], r"[1, 2] is neither a token id nor a chat message"),
        ([1, {"role": "user", "content": "Hi"}], "is neither a token id nor a chat message"),
        ((), "it is empty"),
        (np.zeros(0, np.int32), "it is empty"),
        (range(0), "it is empty"),
        (None, "NoneType is no prompt"),
        ({1, 2}, "set is no prompt"),
        (iter([1, 2]), "list_iterator is no prompt"),
        ({"role": "user", "content": "Hi"}, "dict is no prompt"),
        ("Hi", "the target has no tokenizer, so it takes token ids only"),
        ([{"role": "user", "content": "Hi"}], "the target has no chat template"),
    ],
)
def test_the_prompt_that_is_wrong_is_named_by_its_index(prompt: Any, message: str) -> None:
    for index in (1, 2):
        prompts: list[Any] = [[5], [6, 7]]
        prompts.insert(index, prompt)
        with pytest.raises(PromptError) as error:
            encode_prompts(prompts, None, VOCAB)
        assert str(error.value).startswith(f"prompt {index}: ")
        assert message in str(error.value)


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}, {1}, iter([[1]]), (), np.ones((2, 2), int)])
def test_what_is_no_list_of_prompts(prompts: Any) -> None:
    with pytest.raises(PromptError, match="a string or a list with at least one prompt"):
        encode_prompts(prompts, None, VOCAB)


@pytest.mark.parametrize("prompts", [[5, 6], [True], [{"role": "user", "content": "Hi"}]])
def test_a_single_prompt_has_to_be_put_into_a_list(prompts: Any) -> None:
    with pytest.raises(PromptError, match="put a single list of token ids or messages into a list"):
        encode_prompts(prompts, None, VOCAB)


@pytest.mark.parametrize(
    "prompts",
    [list(np.arange(3)), [np.array(3)], [np.ones((2, 2), int)]],
    ids=["numpy ids without a list", "no axis", "two axes"],
)
def test_arrays_of_other_shapes_are_refused(prompts: Any) -> None:
    with pytest.raises(PromptError):
        encode_prompts(prompts, None, VOCAB)


def test_bytes_are_no_token_ids() -> None:
    with pytest.raises(PromptError):
        encode_prompts([b"Hi"], None, 256)


# Text and chat, with the demo target's tokenizer

QUESTION = "What is 2 + 2?"
CHAT = [{"role": "user", "content": QUESTION}]


def encode(prompts: Any, tokenizer: Any) -> list[list[int]]:
    return encode_prompts(prompts, tokenizer, 49152)


def test_text(tokenizer: Any) -> None:
    (ids,) = encode(QUESTION, tokenizer)
    assert tokenizer.decode(ids) == QUESTION
    assert encode([QUESTION, "Hi", ids], tokenizer) == [ids, *encode("Hi", tokenizer), ids]
    assert encode((QUESTION,), tokenizer) == [ids]


def test_chat(tokenizer: Any) -> None:
    (ids,) = encode([CHAT], tokenizer)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        f"<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    )
    talk = [
        {"role": "system", "content": "Be brief."},
        *CHAT,
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Sure?"},
    ]
    (longer,) = encode([talk], tokenizer)
    assert tokenizer.decode(longer) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert encode([CHAT, talk, QUESTION], tokenizer) == [ids, longer, *encode(QUESTION, tokenizer)]


def test_text_in_parts(tokenizer: Any) -> None:
    whole = encode([CHAT], tokenizer)
    first, second = ({"type": "text", "text": part} for part in (QUESTION[:7], QUESTION[7:]))
    for content in ([first, second], (first, second)):
        assert encode([[{"role": "user", "content": content}]], tokenizer) == whole
    single = {"type": "text", "text": QUESTION}
    assert encode([[{"role": "user", "content": single}]], tokenizer) == whole
    assert encode([(MappingProxyType(CHAT[0]),)], tokenizer) == whole
    assert first == {"type": "text", "text": QUESTION[:7]}  # left as it was


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "type 'image'; only text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "audio"}]}],
            "type 'audio'; only text",
        ),
        ([{"role": "user", "content": {"type": "video"}}], "type 'video'; only text"),
        ([{"role": "user", "content": ["Hi"]}], "type 'str'; only text"),
        ([{"role": "user", "content": None}], "type 'NoneType'; only text"),
        ([{"role": "user", "content": 5}], "type 'int'; only text"),
        ([{"role": "user", "content": [{"text": "a"}]}], "type None; only text"),
        ([{"role": "user"}], "each message must be"),
        ([{"content": "Hi"}], "each message must be"),
        ([*CHAT, {"text": "Hi"}], "each message must be"),
        ([*CHAT, "Hi"], "each message must be"),
        ([*CHAT, 5], "each message must be"),
        ("", "it is empty"),
    ],
)
def test_a_wrong_chat_is_named_by_its_index(messages: Any, message: str, tokenizer: Any) -> None:
    with pytest.raises(PromptError) as error:
        encode([CHAT, messages], tokenizer)
    assert str(error.value).startswith("prompt 1: ")
    assert message in str(error.value)


def test_a_tokenizer_without_a_template_takes_text_only() -> None:
    plain = SimpleNamespace(chat_template=None)
    with pytest.raises(PromptError, match="prompt 0: the target has no chat template; give a str"):
        encode_prompts([CHAT], plain, VOCAB)


class Strict:
    """A chat template that refuses a chat, as those of Gemma and Mistral do."""

    chat_template = "yes"

    def apply_chat_template(self, *_: Any, **__: Any) -> Any:
        from jinja2.exceptions import TemplateError

        raise TemplateError("Conversation roles must alternate")


def test_a_chat_that_the_template_refuses() -> None:
    with pytest.raises(PromptError, match=r"prompt 0: .*roles must alternate"):
        encode_prompts([CHAT], Strict(), VOCAB)


@pytest.mark.parametrize("part", [{"type": "text"}, {"type": "text", "text": None}])
def test_a_part_without_text_is_refused(part: Any, tokenizer: Any) -> None:
    with pytest.raises(PromptError, match="prompt 0: "):
        encode([[{"role": "user", "content": [part]}]], tokenizer)


def test_a_tokenizer_with_more_ids_than_the_model_has(tokenizer: Any) -> None:
    """The embedding has no row for them."""
    with pytest.raises(PromptError, match="outside the vocabulary of 96"):
        encode_prompts([QUESTION], tokenizer, VOCAB)
