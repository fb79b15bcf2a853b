"""One batch from prompts to completions, with the stops that only the text shows."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from peagle_jax.batch import Batch, PromptPrefix
from peagle_jax.decoding import Generation, Proposer
from peagle_jax.detokenize import TextStream, decode
from peagle_jax.load import LoadedTarget
from peagle_jax.results import Acceptance, Completion, Metrics, Piece, TokenLogprobs
from peagle_jax.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked call: models, prompts as token ids (after the prefix), settings of each."""

    target: LoadedTarget
    proposer: Proposer
    prompts: list[list[int]]
    params: list[SamplingParams]
    max_new_tokens: int
    prefix: PromptPrefix | None


class Answers:
    """One batch from prompts to completions, with the stops that only the text shows.

    Attributes:
      batch: what runs on the device.
      rounds_of: per answer, the round `[n]` that each of its tokens comes from.
    """

    def __init__(self, job: Job, part: slice, as_stream: bool):
        self._job = job
        self._params = job.params[part]
        prompts = job.prompts[part]
        self.batch = Batch(
            job.target, job.proposer, prompts, self._params, job.max_new_tokens, job.prefix
        )
        tokenizer = job.target.tokenizer
        self._texts = [
            TextStream(tokenizer, p.stop, include_stop_str_in_output=p.include_stop_str_in_output)
            if tokenizer is not None and (as_stream or p.stop)
            else None
            for p in self._params
        ]
        self._shown = [""] * len(prompts)
        self._ends = [len(prompt) for prompt in self.batch.prompts]  # of the tokens looked at
        self._completions: list[Completion | None] = [None] * len(prompts)
        self.rounds_of = [np.zeros((0,), np.int32)] * len(prompts)

    @property
    def has_texts(self) -> bool:
        """Whether texts have to be looked at while they grow."""
        return any(text is not None for text in self._texts)

    @property
    def completions(self) -> list[Completion]:
        """The answers that are complete."""
        return [completion for completion in self._completions if completion is not None]

    def pieces(self, rounds: int | None) -> Iterator[Piece]:
        """Runs until all answers are complete, looking at them every so many rounds."""
        while None in self._completions:
            generation = self.batch.run(rounds)
            pieces = [
                self._look(row, generation)
                for row, completion in enumerate(self._completions)
                if completion is None
            ]
            cut = [p.index for p in pieces if p.completion and not generation.done[p.index]]
            if cut:
                self.batch.stop(cut)
            if None not in self._completions:
                pieces[-1] = dataclasses.replace(pieces[-1], metrics=self._metrics())
            for piece in pieces:
                if piece.completion or piece.text or piece.token_ids:
                    yield piece

    def _metrics(self) -> Metrics:
        spent = self.batch.seconds, self.batch.compile_seconds
        return Metrics.of_run(self.rounds_of, self._job.proposer.num_drafts, *spent)

    def _look(self, row: int, generation: Generation) -> Piece:
        """Takes a row's new tokens, and completes its answer if they end it."""
        stream, begin = self._texts[row], self._ends[row]
        new = generation.tokens[row, begin : int(generation.lengths[row])].tolist()
        text = None
        if stream is not None:
            before = stream.num_tokens
            text = stream.feed(new)
            new = new[: stream.num_tokens - before]
        self._ends[row] += len(new)
        ended = bool(generation.done[row]) or (stream is not None and stream.stopped is not None)
        if stream is not None:
            text = (text or "") + (stream.finish() if ended else "")
            self._shown[row] += text
        if ended:
            self._completions[row] = self._complete(row, generation)
        return Piece(row, text, new, self._completions[row])

    def _complete(self, row: int, generation: Generation) -> Completion:
        """Returns the answer of a row whose tokens have all been looked at."""
        prompt, params, stream = self.batch.prompts[row], self._params[row], self._texts[row]
        made = slice(len(prompt), self._ends[row])
        ids = generation.tokens[row, made].tolist()
        tokenizer = self._job.target.tokenizer
        text = None if tokenizer is None else self._shown[row]
        if stream is None and tokenizer is not None:
            text = decode(tokenizer, ids)
        reason: int | str | None = stream.stopped if stream else None
        if reason is None and ids[-1] in params.stop_ids(self._job.target.config.eos_token_ids):
            reason = ids[-1]
        self.rounds_of[row] = np.asarray(generation.emitted_in[row, made])
        return Completion(
            text=text,
            token_ids=ids,
            finish_reason="length" if reason is None else "stop",
            stop_reason=reason,
            prompt_token_ids=prompt,
            logprobs=_logprobs(generation, row, made, params.logprobs),
            acceptance=Acceptance.of([self.rounds_of[row]], self._job.proposer.num_drafts),
        )


def _logprobs(
    generation: Generation, row: int, made: slice, count: int | None
) -> list[TokenLogprobs] | None:
    if count is None:
        return None
    kept = generation.logprobs
    assert kept is not None
    columns = (
        generation.tokens[row, made].tolist(),
        kept.chosen[row, made].tolist(),
        kept.top_ids[row, made, :count].tolist(),
        kept.top[row, made, :count].tolist(),
    )
    return [
        TokenLogprobs(token, own, list(zip(ids, top, strict=True)))
        for token, own, ids, top in zip(*columns, strict=True)
    ]
