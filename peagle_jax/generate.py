"""`generate`: text in, text out, and how many passes of the target it took."""

import dataclasses
import numbers
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from peagle_jax.config import ConfigError, DrafterConfig, TargetConfig
from peagle_jax.decoding import (
    Generation,
    NoDraft,
    ParallelDraft,
    Proposer,
    Request,
    capacity_for,
    generate_tokens,
)
from peagle_jax.load import LoadedDrafter, LoadedTarget, Source, load_drafter, load_target
from peagle_jax.models import KVCache
from peagle_jax.prompts import PromptError, Prompts, encode_prompts

# Drafts a round unless the caller or the head says otherwise.
DEFAULT_SPECULATIVE_TOKENS = 5
MIN_PROMPT_BUCKET = 32


@dataclasses.dataclass(frozen=True)
class Completion:
    """The answer to one prompt.

    Attributes:
      text: what the tokens say, without special tokens; None without a tokenizer.
      token_ids: generated tokens, the ending EOS included.
      finish_reason: "stop" at an EOS token, "length" at `max_new_tokens` or the context's end.
      prompt_token_ids: what the target was given.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]
    prompt_token_ids: list[int]


@dataclasses.dataclass(frozen=True)
class Metrics:
    """What a call of `generate` cost, over all its prompts.

    Attributes:
      num_generated_tokens: tokens emitted. The first of each prompt comes from the prefill, the
        others from rounds.
      num_rounds: rounds (one draft, one verification), counted for each prompt by itself.
      acceptance_length: tokens emitted per round, 1 + accepted drafts, between 1 and K + 1;
        tokens cut off by an EOS or by `max_new_tokens` do not count. None without rounds.
      acceptance_per_position: share of the rounds that accepted drafts 0..i, for each i < K
        (unconditional, so its sum is `acceptance_length - 1`). Empty without rounds.
      seconds: running time of the program, prefill included, compilation excluded.
      tokens_per_second: `num_generated_tokens / seconds`.
      compile_seconds: time spent compiling programs for new shapes.
    """

    num_generated_tokens: int
    num_rounds: int
    acceptance_length: float | None
    acceptance_per_position: list[float]
    seconds: float
    tokens_per_second: float
    compile_seconds: float


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


def generate(
    target: Source | LoadedTarget,
    prompts: Prompts,
    *,
    drafter: Source | LoadedDrafter | None = None,
    max_new_tokens: int = 256,
    num_speculative_tokens: int | None = None,
    exact: bool = False,
    batch_size: int = 8,
    progress: bool = False,
) -> GenerationResult:
    """Generates greedily. With a drafter the tokens are the same, in fewer passes of the target.

    Args:
      target: folder (native or Hugging Face), hub id, or what `load_target` returned.
      prompts: one string, or a list of strings, of chat-message lists (the chat template is
        applied) or of token-id lists.
      drafter: folder, hub id, or what `load_drafter` returned; None decodes plainly, through
        the same code.
      max_new_tokens: tokens to generate per prompt at most; the context's end ends it earlier.
      num_speculative_tokens: K, drafts per round; by default 5, or fewer if the head was
        trained for fewer.
      exact: plain decoding in the K + 1 row program that a drafter's verification runs. In
        exact arithmetic it changes nothing; in floating point, products of different row counts
        round differently, and a near tie of the top two logits may fall either way. With
        `exact=True` plain and speculative tokens are equal bit for bit whatever the weights,
        if both calls name the same `num_speculative_tokens`. It costs K + 1 rows per token. No
        effect with a drafter.
      batch_size: prompts that run together.
      progress: show a progress bar on standard error, if that is a terminal.

    Returns:
      one `Completion` per prompt, and `metrics`.

    Raises:
      LoadError, CheckpointError, ConvertError, ConfigError: a model cannot be loaded, or the
        drafter does not fit the target.
      PromptError: a prompt is empty, too long for the context, or not text.
      ValueError: another argument is out of range.
    """
    _check_at_least("max_new_tokens", max_new_tokens, 1)
    _check_at_least("batch_size", batch_size, 1)
    if num_speculative_tokens is not None:
        _check_at_least("num_speculative_tokens", num_speculative_tokens, 1)
    if isinstance(target, LoadedDrafter) or isinstance(drafter, LoadedTarget):
        raise ValueError("target and drafter are mixed up: give load_target(...) as target")
    if not isinstance(target, LoadedTarget):
        target = load_target(target)
    if drafter is not None and not isinstance(drafter, LoadedDrafter):
        drafter = load_drafter(drafter, target_layers=target.config.num_layers)
    proposer = _proposer(target.config, drafter, num_speculative_tokens, exact)

    encoded = encode_prompts(prompts, target.tokenizer, target.config.vocab_size)
    context = target.config.max_position_embeddings
    for index, ids in enumerate(encoded):
        if len(ids) >= context:
            raise PromptError(
                f"prompt {index}: {len(ids)} tokens leave no room in the target's context of "
                f"{context}; shorten it to at most {context - 1}"
            )
    batches = [encoded[i : i + batch_size] for i in range(0, len(encoded), batch_size)]
    runs = []
    with tqdm(total=len(encoded), unit="prompt", disable=None if progress else True) as bar:
        for batch in batches:
            run = run_batch(target, proposer, batch, max_new_tokens)
            runs.append(run)
            bar.update(len(batch))
            bar.set_postfix_str(f"{_metrics([run], proposer).tokens_per_second:.1f} tok/s")
    completions = [c for run in runs for c in _completions(target, run)]
    return GenerationResult(completions, _metrics(runs, proposer))


def make_proposer(drafter: LoadedDrafter, num_speculative_tokens: int) -> ParallelDraft:
    """Returns the decoding program's proposer for a loaded drafter."""
    return ParallelDraft(drafter.weights, num_speculative_tokens, drafter.config.aux_boundaries)


def check_pair(target: TargetConfig, drafter: DrafterConfig) -> None:
    """Checks that a drafter was made for such a target.

    Raises:
      ConfigError: hidden size, vocabulary or boundaries do not fit.
    """
    if drafter.target_hidden_size != target.hidden_size:
        raise ConfigError(
            f"the drafter reads features of a target with hidden size "
            f"{drafter.target_hidden_size}, this target has {target.hidden_size}: they do not "
            "belong together"
        )
    if drafter.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the drafter has a vocabulary of {drafter.vocab_size}, this target one of "
            f"{target.vocab_size}: they do not belong together"
        )
    if not all(0 <= b <= target.num_layers for b in drafter.aux_boundaries):
        raise ConfigError(
            f"the drafter reads the target at boundaries {drafter.aux_boundaries}, but this "
            f"target has boundaries 0..{target.num_layers}: they do not belong together"
        )


def _proposer(
    target: TargetConfig, drafter: LoadedDrafter | None, wanted: int | None, exact: bool
) -> Proposer:
    if drafter is None:
        return NoDraft((wanted or DEFAULT_SPECULATIVE_TOKENS) if exact else 0)
    check_pair(target, drafter.config)
    most = drafter.config.max_draft_tokens
    drafts = wanted or min(DEFAULT_SPECULATIVE_TOKENS, most or DEFAULT_SPECULATIVE_TOKENS)
    if most is not None and drafts > most:
        reason = (
            f"it was trained for {most} drafts per pass"
            if drafter.config.mask_token_id is not None
            else "it is an EAGLE-3 head, without mask slots for parallel drafts"
        )
        raise ValueError(
            f"num_speculative_tokens {drafts} is more than the drafter allows: {reason}"
        )
    return make_proposer(drafter, drafts)


def _check_at_least(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


@dataclasses.dataclass(frozen=True)
class BatchRun:
    """One run of the program for one batch, with its outcome on the host.

    Attributes:
      prompts: token ids given.
      eos_ids: those of the target.
      generation: the program's output; rows past the prompts only fill the bucket.
      seconds: running time of the program, prefill included.
      compile_seconds: time spent compiling it, 0 where it was compiled before.
    """

    prompts: list[list[int]]
    eos_ids: tuple[int, ...]
    generation: Generation
    seconds: float
    compile_seconds: float

    def new_tokens(self) -> Iterator[list[int]]:
        """Yields each prompt's generated tokens."""
        for row, prompt in enumerate(self.prompts):
            stop = int(self.generation.lengths[row])
            yield self.generation.tokens[row, len(prompt) : stop].tolist()


def run_batch(
    target: LoadedTarget, proposer: Proposer, prompts: list[list[int]], max_new_tokens: int
) -> BatchRun:
    """Pads a batch of checked prompts to its bucket and runs the program once."""
    config = target.config
    rows = _power_of_two(len(prompts))
    length = _power_of_two(max(MIN_PROMPT_BUCKET, *map(len, prompts)))
    tokens = np.zeros((rows, length), np.int32)
    lengths = np.ones((rows,), np.int32)
    budgets = np.zeros((rows,), np.int32)  # 0: rows that only fill the bucket are done at once
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
        budgets[row] = min(max_new_tokens, config.max_position_embeddings - len(prompt))
    eos = np.asarray(config.eos_token_ids or (-1,), np.int32)
    request = Request(*map(jnp.asarray, (tokens, lengths, budgets, eos)))
    most = max(length, min(length + max_new_tokens, config.max_position_embeddings))
    capacity = capacity_for(most, proposer.num_drafts)
    dtype = target.weights.merge().embedding[...].dtype
    caches = (
        KVCache.zeros(config, rows, capacity, dtype, block=proposer.num_drafts + 1),
        proposer.new_cache(rows, capacity, dtype),
    )

    started = time.perf_counter()
    program = _compiled(target, proposer, request, *caches, capacity=capacity)
    compiled = time.perf_counter()
    generation, *_ = program(target.weights, proposer, request, *caches)
    generation = jax.device_get(generation)
    finished = time.perf_counter()
    return BatchRun(
        prompts, config.eos_token_ids, generation, finished - compiled, compiled - started
    )


_programs: dict[Hashable, Any] = {}


def _compiled(target: LoadedTarget, *arguments: Any, capacity: int) -> Any:
    """Returns the program for the shapes of these arguments, compiled at its first use."""
    leaves, structure = jax.tree.flatten((target.weights, *arguments))
    key = (structure, capacity, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
    if key not in _programs:
        lowered = generate_tokens.lower(target.weights, *arguments, capacity=capacity)
        _programs[key] = lowered.compile()
    return _programs[key]


def _completions(target: LoadedTarget, run: BatchRun) -> Iterator[Completion]:
    for prompt, ids in zip(run.prompts, run.new_tokens(), strict=True):
        text = None
        if target.tokenizer is not None:
            text = target.tokenizer.decode(ids, skip_special_tokens=True)
        yield Completion(text, ids, "stop" if ids[-1] in run.eos_ids else "length", prompt)


def _metrics(runs: list[BatchRun], proposer: Proposer) -> Metrics:
    generated = sum(len(ids) for run in runs for ids in run.new_tokens())
    rounds = sum(int(run.generation.active_rounds.sum()) for run in runs)
    per_position = np.zeros((proposer.num_drafts,), np.int64)
    for run in runs:
        per_position += run.generation.accepted_per_position.sum(axis=0)
    seconds = sum(run.seconds for run in runs)
    return Metrics(
        num_generated_tokens=generated,
        num_rounds=rounds,
        acceptance_length=1 + float(per_position.sum()) / rounds if rounds else None,
        acceptance_per_position=[float(n) / rounds for n in per_position] if rounds else [],
        seconds=seconds,
        tokens_per_second=generated / seconds,
        compile_seconds=sum(run.compile_seconds for run in runs),
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
