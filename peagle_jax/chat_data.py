"""Training data from chats that somebody else wrote."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from tqdm import tqdm

from peagle_jax.config import TargetConfig
from peagle_jax.prompts import PromptError, encode_prompts
from peagle_jax.training.dataset import NAME, Document, Recipe, Writer
from peagle_jax.training.folders import DataError, exclusive, holds

SHARD_TOKENS = 1 << 20
# Names of the speakers in ShareGPT's files.
SPEAKERS = {"human": "user", "gpt": "assistant"} | {r: r for r in ("user", "assistant", "system")}
# What the speaker and the text of a turn are called.
KEYS = {"messages": ("role", "content"), "conversations": ("from", "value")}


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What was written.

    Attributes:
      documents: in the dataset.
      tokens: of them.
      supervised: tokens that are learnt.
      cut: documents that were longer than allowed.
      dropped: documents of which nothing that is learnt was left.
    """

    documents: int
    tokens: int
    supervised: int
    cut: int
    dropped: int


def write_chats(
    tokenizer: Any,
    config: TargetConfig,
    path: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    max_tokens: int,
    progress: bool = False,
) -> Prepared:
    """Writes a dataset of chats, of which the assistant's turns are learnt.

    Every assistant turn becomes a document of its own, with all that was said before it as the
    prompt, because chat templates may render a turn otherwise once others follow (as speculators
    does it). A turn that comes first answers nothing, and is not learnt. Rows of token ids are
    taken as they are.

    Args:
      tokenizer: the target's Hugging Face tokenizer, for its chat template; None will do for rows
        of token ids.
      config: the target's, for its vocabulary and EOS tokens.
      path: JSON lines with `messages` (`role`, `content`), or `conversations` as in ShareGPT
        (`from`, `value`), or `input_ids` (or `token_ids`) and `loss_mask`.
      folder: where the dataset goes.
      max_tokens: longer documents are cut there.
      progress: show a progress bar on standard error, if that is a terminal.

    Raises:
      DataError: a line cannot be used (it is named), or the folder holds something else.
    """
    path, folder = Path(path), Path(folder)
    if max_tokens < 2:
        raise DataError(f"max_tokens must be at least 2, got {max_tokens}")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    made_by = {
        "command": "prepare",
        "chats": hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16],
        "chat_template": hashlib.sha256(repr(_template(tokenizer)).encode()).hexdigest()[:16],
        "max_tokens": max_tokens,
    }
    holds(folder, NAME, {"vocab_size": config.vocab_size, "made_by": made_by})
    shards: list[list[Document]] = [[]]
    room = SHARD_TOKENS
    cut = dropped = 0
    for number, line in enumerate(
        tqdm(lines, unit="chat", disable=None if progress else True), start=1
    ):
        try:
            documents = list(_documents(tokenizer, config, line)) if line.strip() else []
        except (DataError, PromptError) as error:
            raise DataError(f"{path}, line {number}: {error}") from error
        for document in documents:
            cut += len(document.input_ids) > max_tokens
            short = Document(document.input_ids[:max_tokens], document.loss_mask[:max_tokens])
            if not short.loss_mask.any():
                dropped += 1
                continue
            if room < len(short.input_ids) and shards[-1]:
                shards.append([])
                room = SHARD_TOKENS
            shards[-1].append(short)
            room -= len(short.input_ids)
    every = [document for shard in shards for document in shard]
    if not every:
        raise DataError(f"{path}: nothing in it is to be learnt within {max_tokens} tokens")
    writer = Writer(folder, Recipe(config.vocab_size, len(shards), made_by))
    with exclusive(folder):
        for index in writer.missing():
            writer.write(index, shards[index])
    return Prepared(
        len(every),
        sum(len(d.input_ids) for d in every),
        sum(int(d.loss_mask.sum()) for d in every),
        cut,
        dropped,
    )


def _documents(tokenizer: Any, config: TargetConfig, line: str) -> Iterator[Document]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"no JSON ({error})") from error
    keys = set(row) if isinstance(row, dict) else set()
    named = [key for key in ("input_ids", "token_ids", "messages", "conversations") if key in keys]
    if len(named) != 1:
        raise DataError(
            "expected an object with either messages, conversations, or input_ids and loss_mask"
        )
    found = row[named[0]]
    if named[0] in ("input_ids", "token_ids"):
        yield _tokens(found, row.get("loss_mask"), config.vocab_size)
        return
    if not isinstance(found, list) or not found:
        raise DataError(f"{named[0]} must be a list of turns")
    messages = [_message(turn, *KEYS[named[0]]) for turn in found]
    yield from _turns(tokenizer, config, messages)


def _tokens(ids: Any, mask: Any, vocab_size: int) -> Document:
    if not isinstance(ids, list) or not isinstance(mask, list):
        raise DataError("token ids need a loss_mask, and both must be lists")
    if len(ids) != len(mask):
        raise DataError(f"{len(ids)} token ids, but a loss_mask of {len(mask)}")
    if any(m not in (0, 1) for m in mask):
        raise DataError("loss_mask must hold 0 and 1 only")
    if len(ids) < 2:
        raise DataError(f"a document of {len(ids)} tokens; there must be at least two")
    if not any(mask):
        raise DataError("its loss mask is empty: nothing in it is to be learnt")
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise DataError(f"token id {token!r} is outside the vocabulary of {vocab_size}")
    return Document(np.asarray(ids, np.int32), np.asarray(mask, bool))


def _message(turn: Any, speaker: str, text: str) -> dict[str, Any]:
    """Returns a turn as a chat message, with all that it says beside."""
    if not isinstance(turn, Mapping) or not {speaker, text} <= set(turn):
        raise DataError(f"a turn must be an object with {speaker} and {text}")
    role, content = turn[speaker], turn[text]
    if speaker == "from":
        if role not in SPEAKERS:
            raise DataError(f"a turn is from {role!r}, not from one of {', '.join(SPEAKERS)}")
        role = SPEAKERS[role]
    if not isinstance(content, str):
        raise DataError(f"a turn's {text} must be text, got {content!r}")
    return {**turn, "role": role, "content": content}


def _turns(
    tokenizer: Any, config: TargetConfig, messages: list[dict[str, Any]]
) -> Iterator[Document]:
    """Yields a document for each turn of the assistant that answers something."""
    turns = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    if not turns:
        raise DataError("the assistant answers nothing in it, so there is nothing to learn")
    for turn in turns:
        (prompt,) = encode_prompts([messages[:turn]], tokenizer, config.vocab_size)
        try:
            rendered = tokenizer.apply_chat_template(messages[: turn + 1], return_dict=True)
        except (jinja2.TemplateError, TypeError) as error:
            raise DataError(f"turn {turn}: the chat template refuses it: {error}") from error
        whole = list(rendered["input_ids"])
        if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
            raise DataError(
                f"turn {turn}: with the answer, the chat template does not render the prompt as "
                "it does without; give input_ids and loss_mask instead"
            )
        # What the template puts after the end of the turn is no answer.
        ends = [i for i in range(len(prompt), len(whole)) if whole[i] in config.eos_token_ids]
        stop = ends[0] + 1 if ends else len(whole)
        mask = np.arange(stop) >= len(prompt)
        yield Document(np.asarray(whole[:stop], np.int32), mask)


def _template(tokenizer: Any) -> Any:
    return tokenizer.chat_template if tokenizer is not None else None
