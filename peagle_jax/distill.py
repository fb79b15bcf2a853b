"""Self-distillation data: what the target says, for a drafter to learn.

A drafter guesses what its target would say, so the best text to learn from is the target's own:
its answers to prompts, and, where there are no prompts, its own guesses at what a user would ask
(sampled after the chat template's opening of a user's turn, as in Magpie, arXiv 2406.08464).
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm

from peagle_jax.batch import Batch, PromptPrefix, read_prompt_prefix
from peagle_jax.decoding import NoDraft
from peagle_jax.load import LoadedTarget
from peagle_jax.prompts import PromptError, Prompts, check_room, encode_prompts
from peagle_jax.sampling_params import SamplingParams
from peagle_jax.training.dataset import Document, Recipe, Writer
from peagle_jax.training.folders import DataError, exclusive
from peagle_jax.training.identity import identity

# Rounds between two looks at which answers are done and need no place in the batch any more.
ROUNDS_PER_LOOK = 16
# Stands for what a user says while the chat template is looked at.
PLACEHOLDER = "PEAGLEPLACEHOLDER"


@dataclasses.dataclass(frozen=True)
class Written:
    """What a run wrote.

    Attributes:
      documents: answers or prompts.
      tokens: generated tokens in them.
      seconds: of generation, compilation included.
    """

    documents: int
    tokens: int
    seconds: float


def write_answers(
    target: LoadedTarget,
    prompts: Prompts,
    folder: str | os.PathLike[str],
    *,
    sampling: SamplingParams | None = None,
    max_new_tokens: int = 1024,
    batch_size: int = 64,
    seed: int = 0,
    progress: bool = False,
) -> Written:
    """Answers prompts, and writes a dataset of prompts and answers of which the answers are learnt.

    An interrupted run goes on where it was, batch by batch. Prompts of similar length run
    together, and a batch shrinks as its answers end.

    Args:
      target: the model that answers.
      prompts: as for `generate`.
      folder: where the dataset goes; see `peagle_jax.training.dataset`.
      sampling: how to answer; None is greedy. Its own seed is not used.
      max_new_tokens: tokens of an answer at most.
      batch_size: prompts that run together, a shard of the dataset.
      seed: of sampled answers; an answer depends on it and on its prompt's place alone, and is
        what `generate` says with `seed_of(seed, place)`.
      progress: show a progress bar on standard error, if that is a terminal.

    Raises:
      PromptError: a prompt is empty, too long for the context, or not text.
      DataError: the folder holds something else, another run writes to it, or the disk is full.
      ValueError: another argument is out of range.
    """
    params = _checked(target, sampling or SamplingParams(), max_new_tokens, batch_size)
    encoded = encode_prompts(prompts, target.tokenizer, target.config.vocab_size)
    check_room(encoded, target.config.max_position_embeddings)
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
    parts = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    settings = {
        "command": "generate",
        "target": _fingerprint(identity(target.weights)),
        "prompts": _fingerprint(encoded),
        "sampling": {**dataclasses.asdict(params), "seed": seed},
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
    }
    writer = Writer(folder, Recipe(target.config.vocab_size, len(parts), settings))
    with exclusive(writer.folder):
        todo = writer.missing()
        prefix = _shared_prefix(target, encoded) if todo else None
        tokens = documents = 0
        started = time.perf_counter()
        done = len(order) - sum(len(parts[index]) for index in todo)
        with _bar(len(order), done, "answer", progress) as bar:
            for index in todo:
                part = parts[index]
                seeded = [dataclasses.replace(params, seed=seed_of(seed, i)) for i in part]
                asked = [encoded[i] for i in part]
                answers = answer(target, asked, seeded, max_new_tokens, prefix)
                writer.write(index, [_document(*pair) for pair in zip(asked, answers, strict=True)])
                documents += len(part)
                tokens += sum(map(len, answers))
                bar.update(len(part))
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - started):.0f} tok/s")
    return Written(documents, tokens, time.perf_counter() - started)


def write_prompts(
    target: LoadedTarget,
    count: int,
    path: str | os.PathLike[str],
    *,
    opening: str = "",
    sampling: SamplingParams | None = None,
    max_new_tokens: int = 256,
    batch_size: int = 64,
    seed: int = 0,
    progress: bool = False,
) -> Written:
    """Lets the target write what a user would ask, as JSON lines of chat messages.

    A prompt that does not end by itself, or that is there already, is not kept. A run that is
    started again goes on where it was, or with a larger `count` where it ended.

    Args:
      target: a chat model.
      count: how often it is asked; so many prompts are written at most.
      path: the file.
      opening: how every prompt begins.
      sampling: how to draw; None is at temperature 1.
      max_new_tokens: tokens of a prompt at most.
      batch_size: prompts that run together.
      seed: of the draws.
      progress: show a progress bar on standard error, if that is a terminal.

    Raises:
      PromptError: the target has no chat template.
      DataError: the file holds something else, or the disk is full.
    """
    path = Path(path)
    ids, end = _user_turn(target, opening)
    params = sampling or SamplingParams(temperature=1.0)
    params = dataclasses.replace(params, stop_token_ids=(*params.stop_token_ids, end))
    params = _checked(target, params, max_new_tokens, batch_size)
    if len(ids) >= target.config.max_position_embeddings:
        raise PromptError(f"an opening of {len(ids)} tokens leaves no room in the target's context")
    settings = identity(target.weights), ids, end, dataclasses.asdict(params), max_new_tokens, seed
    name = f"self-{_fingerprint(settings)[:8]}"
    tokens = documents = 0
    started = time.perf_counter()
    with _appending(path) as file:
        rows = list(_rows_of(file, path, name))
        file.truncate(rows[-1][1] if rows else 0)
        # The last batch that is there may not be whole, so it is asked for again.
        begin = rows[-1][0] // batch_size * batch_size if rows else 0
        seen = {text for _, _, text in rows}
        prefix = _shared_prefix(target, [ids])
        with _bar(count, min(begin, count), "prompt", progress) as bar:
            for first in range(begin, count, batch_size):
                part = range(first, min(first + batch_size, count))
                seeded = [dataclasses.replace(params, seed=seed_of(seed, i)) for i in part]
                turns = answer(target, [ids] * len(part), seeded, max_new_tokens, prefix)
                for index, turn in zip(part, turns, strict=True):
                    tokens += len(turn)
                    text = (opening + target.tokenizer.decode(turn[:-1])).strip()
                    if turn[-1] == end and text and text not in seen:
                        seen.add(text)
                        documents += 1
                        messages = [{"role": "user", "content": text}]
                        row = {"id": f"{name}-{index}", "messages": messages}
                        file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
                bar.update(len(part))
                bar.set_postfix_str(f"{tokens / (time.perf_counter() - started):.0f} tok/s")
    return Written(documents, tokens, time.perf_counter() - started)


def answer(
    target: LoadedTarget,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    max_new_tokens: int,
    prefix: PromptPrefix | None = None,
) -> list[list[int]]:
    """Returns the answers to prompts of one batch, which shrinks as answers end.

    Args:
      target: the model that answers.
      prompts: token ids.
      params: of each prompt.
      max_new_tokens: tokens of an answer at most.
      prefix: what all prompts begin with, and no prompt is.
    """
    known = len(prefix.token_ids) if prefix else 0
    rests = [prompt[known:] for prompt in prompts]
    batch = Batch(target, NoDraft(), rests, params, max_new_tokens, prefix)
    answers: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))  # the prompt of each row
    while alive:
        generation = batch.run(ROUNDS_PER_LOOK)
        for row, prompt in enumerate(alive):
            if generation.done[row]:
                made = slice(len(prompts[prompt]), int(generation.lengths[row]))
                answers[prompt] = generation.tokens[row, made].tolist()
        rows = [row for row in range(len(alive)) if not generation.done[row]]
        if rows and 2 * len(rows) <= len(generation.done):
            batch.keep(rows)
            alive = [alive[row] for row in rows]
        elif not rows:
            alive = []
    return answers


def _shared_prefix(target: LoadedTarget, prompts: Sequence[list[int]]) -> PromptPrefix | None:
    """Reads what all prompts begin with (a system message, most often), but no whole prompt."""
    first, last = min(prompts), max(prompts)
    most = min(map(len, prompts)) - 1
    same = next((i for i in range(most) if first[i] != last[i]), most)
    return read_prompt_prefix(target, None, NoDraft(), first[:same]) if same else None


def _document(prompt: list[int], answer: list[int]) -> Document:
    mask = np.repeat([False, True], [len(prompt), len(answer)])
    return Document(np.asarray([*prompt, *answer], np.int32), mask)


def _user_turn(target: LoadedTarget, opening: str) -> tuple[list[int], int]:
    """Returns the tokens that open a user's turn, and the one that ends it."""
    tokenizer = target.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise PromptError("the target has no chat template, so it has no user's turn to open")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PLACEHOLDER}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = text.partition(PLACEHOLDER)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    ids, ends = encode(before + opening), encode(after)
    if not ids or not ends:
        raise PromptError("the target's chat template does not mark where a user's turn ends")
    return ids, ends[0]


def _checked(
    target: LoadedTarget, params: SamplingParams, max_new_tokens: int, batch_size: int
) -> SamplingParams:
    params.check_for(target.config.vocab_size, target.config.eos_token_ids)
    if params.stop:
        raise ValueError("stop strings would end texts that the target would go on with")
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return params


@contextlib.contextmanager
def _appending(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to read and to append to, which no other run writes to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
    except BlockingIOError:
        raise DataError(
            f"another run is writing to {path}: wait for it, or name another file"
        ) from None
    except OSError as error:
        raise DataError(f"cannot write {path} ({error}); run again to go on from here") from error


def _rows_of(file: BinaryIO, path: Path, name: str) -> Iterator[tuple[int, int, str]]:
    """Yields place, end in the file and text of the prompts of an earlier run."""
    file.seek(0)
    end = 0
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            return  # an interrupted run did not finish it
        end += len(line)
        try:
            row = json.loads(line)
            own, place = row["id"].rsplit("-", 1)
            text = row["messages"][0]["content"]
        except (ValueError, LookupError, TypeError, AttributeError):
            own = ""
        if own != name:
            raise DataError(
                f"{path}, line {number}, is not of a run with these settings; name another file"
            )
        yield int(place), end, text


def seed_of(seed: int, place: int) -> int:
    """Returns the seed of one answer of a run, 64 bits."""
    return int(np.random.SeedSequence([seed, place]).generate_state(1, np.uint64)[0])


def _fingerprint(content: Any) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def _bar(total: int, done: int, unit: str, progress: bool) -> Any:
    shown: Callable[..., Any] = tqdm
    return shown(total=total, initial=done, unit=unit, disable=None if progress else True)
