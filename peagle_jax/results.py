"""What `generate` and `stream` give back."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np

from peagle_jax.acceptance import count_accepted


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """What the drafts of one answer, or of several, were worth.

    Attributes:
      num_generated_tokens: tokens emitted. The first of each prompt comes from the prefill, the
        others from rounds.
      num_rounds: rounds (one draft, one verification), counted for each prompt by itself.
      acceptance_length: tokens emitted per round, 1 + accepted drafts, between 1 and K + 1;
        tokens cut off by a stop or by `max_new_tokens` do not count. None without rounds.
      acceptance_per_position: share of the rounds that accepted drafts 0..i, for each i < K
        (unconditional, so its sum is `acceptance_length - 1`). Empty without rounds.
    """

    num_generated_tokens: int
    num_rounds: int
    acceptance_length: float | None
    acceptance_per_position: list[float]

    @classmethod
    def of(cls, emitted_in: Sequence[np.ndarray], num_drafts: int, **more: Any) -> Self:
        """Counts from the rounds `[n]` that each answer's tokens come from (`count_accepted`)."""
        counts = [count_accepted(rounds, num_drafts) for rounds in emitted_in]
        rounds = sum(count for count, _ in counts)
        accepted = sum((kept for _, kept in counts), np.zeros((num_drafts,), np.int64))
        return cls(
            num_generated_tokens=sum(map(len, emitted_in)),
            num_rounds=rounds,
            acceptance_length=1 + float(accepted.sum()) / rounds if rounds else None,
            acceptance_per_position=[float(n) / rounds for n in accepted] if rounds else [],
            **more,
        )


@dataclasses.dataclass(frozen=True)
class Metrics(Acceptance):
    """What a call of `generate` cost, over all its prompts.

    Attributes:
      seconds: running time of the program, prefill included, compilation excluded.
      tokens_per_second: `num_generated_tokens / seconds`.
      compile_seconds: time spent compiling programs for new shapes.
      draft_share: share of a round's time that drafting takes, the rest being verification, as
        timed after the last batch (`generate(profile=True)`); None unless asked for, or without a
        drafter.
    """

    seconds: float
    tokens_per_second: float
    compile_seconds: float
    draft_share: float | None = None

    @classmethod
    def of_run(
        cls,
        emitted_in: Sequence[np.ndarray],
        num_drafts: int,
        seconds: float,
        compile_seconds: float,
        draft_share: float | None = None,
    ) -> Self:
        """As `of`, with what it cost."""
        return cls.of(
            emitted_in,
            num_drafts,
            seconds=seconds,
            tokens_per_second=sum(map(len, emitted_in)) / seconds,
            compile_seconds=compile_seconds,
            draft_share=draft_share,
        )


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one generated token, under the target's row before any processor.

    Attributes:
      token_id: the generated token.
      logprob: its own.
      top: the most likely tokens with theirs, most likely first.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Completion:
    """The answer to one prompt.

    Attributes:
      text: what the tokens say, without special tokens; None without a tokenizer.
      token_ids: generated tokens, the ending stop token included.
      finish_reason: "stop" at an EOS or stop token or a stop string, "length" at
        `max_new_tokens` or the context's end.
      stop_reason: the token id or the string that ended it; None for "length".
      prompt_token_ids: what the target was given.
      logprobs: one entry per generated token, if asked for.
      acceptance: rounds and accepted drafts of this answer.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    prompt_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    acceptance: Acceptance


@dataclasses.dataclass(frozen=True)
class GenerationResult(Sequence[Completion]):
    """Completions in the order of the prompts, and the metrics of the whole call."""

    completions: list[Completion]
    metrics: Metrics

    def __getitem__(self, index: Any) -> Any:
        """Returns the completion of the prompt at `index`."""
        return self.completions[index]

    def __len__(self) -> int:
        """Returns the number of prompts."""
        return len(self.completions)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of an answer, as `stream` yields it.

    Attributes:
      index: of the prompt.
      text: the new text; never half a character, never text past a stop. None without a tokenizer.
      token_ids: the new tokens. Their text may come with a later piece.
      completion: the whole answer, with its last piece.
      metrics: of the whole call, with its last piece.
    """

    index: int
    text: str | None
    token_ids: list[int]
    completion: Completion | None = None
    metrics: Metrics | None = None
