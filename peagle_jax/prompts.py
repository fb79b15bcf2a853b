"""From what users write to token ids: strings, chat messages, or the ids themselves."""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]
Prompts = str | Sequence[Prompt]


class PromptError(ValueError):
    """A prompt is not of a form that can be answered."""


def encode_prompts(
    prompts: Prompts, tokenizer: Any, vocab_size: int, *, continued: bool = False
) -> list[list[int]]:
    """Turns prompts into token ids.

    Args:
      prompts: one string, or a list whose items are each a string, a list of chat messages
        (`{"role": ..., "content": ...}`, the tokenizer's chat template is applied and the
        assistant's turn opened) or a list of token ids.
      tokenizer: a Hugging Face tokenizer; None will do where every prompt is token ids.
      vocab_size: token ids must be below it.
      continued: the prompts go on from a text that was read before, so that no token begins a
        text, and no template a chat.

    Raises:
      PromptError: naming the prompt by its index.
    """
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Sequence) or len(prompts) == 0:
        raise PromptError("prompts must be a string or a list with at least one prompt")
    if isinstance(prompts[0], Mapping) or (
        hasattr(prompts[0], "__index__") and getattr(prompts[0], "ndim", 0) == 0
    ):
        raise PromptError(
            "prompts is a list of prompts: put a single list of token ids or messages into a list"
        )
    encoded = []
    for index, prompt in enumerate(prompts):
        try:
            encoded.append(_encode(prompt, tokenizer, vocab_size, continued))
        except PromptError as error:
            raise PromptError(f"prompt {index}: {error}") from None
    return encoded


def check_room(prompts: Sequence[Sequence[int]], context: int, known: int = 0) -> None:
    """Checks that the context has room for at least one token after each prompt.

    Args:
      prompts: token ids.
      context: tokens that a sequence may have.
      known: tokens of a prefix before them.

    Raises:
      PromptError: naming the prompt by its index.
    """
    for index, ids in enumerate(prompts):
        if known + len(ids) >= context:
            raise PromptError(
                f"prompt {index}: {known + len(ids)} tokens leave no room in the target's context "
                f"of {context}; shorten it to at most {context - 1}"
            )


def _encode(prompt: Any, tokenizer: Any, vocab_size: int, continued: bool) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError("the target has no tokenizer, so it takes token ids only")
        try:
            encoded = tokenizer(prompt, verbose=False, add_special_tokens=not continued)
            ids = _check_ids(encoded["input_ids"], vocab_size)
        except TypeError as error:  # a lone surrogate
            raise PromptError("it is no valid Unicode text") from error
    elif isinstance(prompt, bytes | bytearray) or not (
        isinstance(prompt, Sequence) or getattr(prompt, "ndim", 0) == 1
    ):
        raise PromptError(
            f"{type(prompt).__name__} is no prompt: give a string, a list of messages or token ids"
        )
    elif len(prompt) > 0 and isinstance(prompt[0], Mapping):
        if continued:
            raise PromptError(
                "messages after a prefix would begin another chat: render the chat template "
                "yourself, and give the token ids after the prefix"
            )
        ids = _encode_chat(prompt, tokenizer, vocab_size)
    else:
        ids = _check_ids(prompt, vocab_size)
    if not ids:
        raise PromptError("it is empty")
    return ids


def _check_ids(prompt: Any, vocab_size: int) -> list[int]:
    ids = []
    for token in prompt:
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise PromptError(f"{token!r} is neither a token id nor a chat message")
        ids.append(int(token))
        if not 0 <= ids[-1] < vocab_size:
            raise PromptError(f"token id {ids[-1]} is outside the vocabulary of {vocab_size}")
    return ids


def _encode_chat(messages: Sequence[Message], tokenizer: Any, vocab_size: int) -> list[int]:
    if tokenizer is None or not tokenizer.chat_template:
        raise PromptError("the target has no chat template; give a string or token ids")
    turns = [{**m, "content": _text_content(m)} for m in messages if _check_message(m)]
    try:
        encoded = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    except (jinja2.TemplateError, TypeError) as error:
        raise PromptError(f"the chat template refuses it: {error}") from error
    return _check_ids(encoded["input_ids"], vocab_size)


def _check_message(message: Any) -> bool:
    if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
        raise PromptError('each message must be {"role": ..., "content": ...}')
    return True


def _text_content(message: Message) -> str:
    """Returns the message's text; parts of another kind are errors."""
    content = message["content"]
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else [content]
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise PromptError(f"it holds content of type {kind!r}; only text is supported")
        if not isinstance(part.get("text"), str):
            raise PromptError("a part of type 'text' has no text")
    return "".join(part["text"] for part in parts)
