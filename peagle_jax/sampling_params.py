"""How one prompt is to be answered, by the names that vLLM and transformers use."""

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from peagle_jax.detokenize import check_stop_strings

MAX_LOGPROBS = 100
# Of what changes logits, so that everything computed from them is finite in float32.
MOST = 1e10


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling, logits processors and stops of one prompt. The defaults are plain greedy decoding.

    Processors apply in vLLM's order: allowed and bad ids, minimum length and bias, penalties,
    temperature, min-p, top-k, top-p.

    Attributes:
      temperature: 0 is greedy; else logits are divided by it.
      top_k: keep the k most likely tokens; 0 or -1 for all.
      top_p: keep the smallest set of tokens that has this probability, in (0, 1].
      min_p: drop tokens less likely than this share of the most likely one, in [0, 1].
      repetition_penalty: divides (multiplies, if negative) the logits of tokens that the prompt
        or the answer holds; 1 for none.
      presence_penalty: subtracted from the logits of tokens that the answer holds.
      frequency_penalty: subtracted once for each time that the answer holds the token.
      logit_bias: added to the logits of these token ids.
      allowed_token_ids: no other token is generated.
      bad_token_ids: tokens that are not generated.
      min_new_tokens: no EOS or stop token is generated before so many tokens.
      seed: of the random numbers, 0..2^64-1. The same request with the same seed and models gives
        the same tokens whatever else is in its batch. None draws one.
      stop: strings that end the answer where they occur; they are cut off.
      include_stop_str_in_output: do not cut them off.
      stop_token_ids: tokens that end the answer beside the model's EOS tokens.
      ignore_eos: EOS tokens do not end the answer.
      logprobs: report the log-probability of every generated token and of so many of the most
        likely ones, before any processor. None for no report.

    Raises:
      ValueError: a value is out of range; it names it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_token_ids: Sequence[int] = ()
    min_new_tokens: int = 0
    seed: int | None = None
    stop: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        check_stop_strings(self.stop)
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -MOST, MOST)
        _number("temperature", self.temperature, 0, MOST)
        _number("repetition_penalty", self.repetition_penalty, 1 / MOST, MOST)
        _number("top_p", self.top_p, 0, 1, above=True)
        _number("min_p", self.min_p, 0, 1)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _integer("min_new_tokens", self.min_new_tokens, 0, 2**31 - 1)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**64 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.logit_bias, Mapping | None):
            raise ValueError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}")
        for token, bias in (self.logit_bias or {}).items():
            _integer("logit_bias: a token id", token, 0, 2**31 - 1)
            _number(f"logit_bias[{token}]", bias, -MOST, MOST)
        for name in ("allowed_token_ids", "bad_token_ids", "stop_token_ids"):
            ids = getattr(self, name)
            if ids is None and name == "allowed_token_ids":
                continue
            if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
                raise ValueError(f"{name} must be a list of token ids, got {ids!r}")
            for token in ids:
                _integer(f"{name}: a token id", token, 0, 2**31 - 1)
        if self.allowed_token_ids is not None and not self._left():
            raise ValueError(
                "allowed_token_ids leaves no token: give at least one that is not in bad_token_ids"
            )

    def check_for(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Checks the token ids against a target.

        Raises:
          ValueError: an id lies outside the vocabulary, or nothing may be generated.
        """
        for name in ("logit_bias", "allowed_token_ids", "bad_token_ids", "stop_token_ids"):
            for token in getattr(self, name) or ():
                _integer(f"{name}: a token id", token, 0, vocab_size - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, min(MAX_LOGPROBS, vocab_size))
        left = set(range(vocab_size)) if self.allowed_token_ids is None else self._left()
        left -= set(self.bad_token_ids)
        if self.min_new_tokens:
            left -= self.stop_ids(eos_token_ids)
        if not left:
            raise ValueError(
                "no token may be generated: bad_token_ids, allowed_token_ids and, before "
                "min_new_tokens, the stop tokens leave none"
            )

    def stop_ids(self, eos_token_ids: Sequence[int]) -> set[int]:
        """Returns every token that ends the answer."""
        return {*self.stop_token_ids, *(() if self.ignore_eos else eos_token_ids)}

    @property
    def has_penalties(self) -> bool:
        """Whether tokens pay for having occurred."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1, 0, 0)

    @property
    def has_bias(self) -> bool:
        """Whether some tokens' logits are changed whatever occurred."""
        return bool(self.logit_bias or self.bad_token_ids) or self.allowed_token_ids is not None

    @property
    def is_plain_greedy(self) -> bool:
        """Whether every token is simply the target's most likely one."""
        changed = self.has_penalties or self.has_bias or self.min_new_tokens
        return not changed and self.temperature == 0

    def _left(self) -> set[int]:
        return set(self.allowed_token_ids or ()) - set(self.bad_token_ids)


def _number(name: str, value: Any, least: float, most: float, above: bool = False) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    # NaN compares with nothing.
    if not is_number or not least <= value <= most or (above and value == least):
        bound = f"{'above' if above else 'at least'} {least:g} and at most {most:g}"
        raise ValueError(f"{name} must be a number, {bound}, got {value!r}")


def _integer(name: str, value: Any, least: int, most: int) -> None:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or not least <= value <= most:
        raise ValueError(f"{name} must be an integer in {least}..{most}, got {value!r}")
