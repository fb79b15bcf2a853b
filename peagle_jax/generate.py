"""`generate` and `stream`: text in, text out, and how many passes of the target it took."""

import dataclasses
import numbers
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from peagle_jax.batch import Batch, PromptPrefix, read_prompt_prefix
from peagle_jax.config import ConfigError, DrafterConfig, TargetConfig
from peagle_jax.decoding import (
    AutoregressiveDraft,
    Generation,
    NoDraft,
    ParallelDraft,
    Proposer,
)
from peagle_jax.detokenize import TextStream, decode
from peagle_jax.load import LoadedDrafter, LoadedTarget, Source, load_drafter, load_target
from peagle_jax.prompts import Prompt, PromptError, Prompts, encode_prompts
from peagle_jax.results import (
    Acceptance,
    Completion,
    GenerationResult,
    Metrics,
    Piece,
    TokenLogprobs,
)
from peagle_jax.sampling_params import SamplingParams

Drafting = Literal["auto", "parallel", "autoregressive"]
DraftSampling = Literal["greedy", "sample"]

# Drafts a round unless the caller or the head says otherwise.
DEFAULT_SPECULATIVE_TOKENS = 5
# Rounds between two looks for a stop string: few enough that little is generated in vain, many
# enough that the looks cost little.
STOP_STRING_ROUNDS = 16


def generate(
    target: Source | LoadedTarget,
    prompts: Prompts,
    *,
    drafter: Source | LoadedDrafter | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    max_new_tokens: int = 256,
    num_speculative_tokens: int | None = None,
    drafting: Drafting = "auto",
    draft_sampling: DraftSampling = "greedy",
    prefix: PromptPrefix | None = None,
    exact: bool = False,
    batch_size: int = 8,
    progress: bool = False,
) -> GenerationResult:
    """Generates. With a drafter greedy tokens, and the law of sampled ones, are the same.

    Args:
      target: folder (native or Hugging Face), hub id, or what `load_target` returned.
      prompts: one string, or a list of strings, of chat-message lists (the chat template is
        applied) or of token-id lists.
      drafter: folder, hub id, or what `load_drafter` returned; None decodes plainly, through
        the same code.
      sampling: for all prompts, or one for each; None is greedy.
      max_new_tokens: tokens to generate per prompt at most; the context's end ends it earlier.
      num_speculative_tokens: K, drafts per round; by default 5, or fewer if the head was
        trained for fewer.
      drafting: "parallel" makes the K drafts in one pass (P-EAGLE), "autoregressive" in K
        (EAGLE-3); "auto" is parallel for heads that have mask slots.
      draft_sampling: "greedy" drafts what is most likely, "sample" draws drafts of sampled
        answers at their temperature. The answers' law is the target's either way.
      prefix: what `prefill` made of the tokens that all prompts begin with; the prompts are then
        what follows, and strings are tokenized on their own.
      exact: plain decoding in the K + 1 row program that a drafter's verification runs. In
        exact arithmetic it changes nothing; in floating point, products of different row counts
        round differently, and a near tie of the top two logits may fall either way. With
        `exact=True` plain and speculative greedy tokens are equal bit for bit whatever the
        weights, if both calls name the same `num_speculative_tokens`. It costs K + 1 rows per
        token. No effect with a drafter.
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
    _check_at_least("batch_size", batch_size, 1)
    job = _prepare(
        target, prompts, drafter, sampling, max_new_tokens, num_speculative_tokens, drafting,
        draft_sampling, prefix, exact,
    )  # fmt: skip
    completions: list[Completion] = []
    batches: list[Batch] = []
    rounds_of: list[np.ndarray] = []
    with tqdm(total=len(job.prompts), unit="prompt", disable=None if progress else True) as bar:
        for begin in range(0, len(job.prompts), batch_size):
            answers = _Answers(job, slice(begin, begin + batch_size), as_stream=False)
            for _ in answers.pieces(STOP_STRING_ROUNDS if answers.has_texts else None):
                pass
            completions += answers.completions
            rounds_of += answers.rounds_of
            batches.append(answers.batch)
            bar.update(len(answers.completions))
            speed = _metrics(batches, rounds_of, job.proposer).tokens_per_second
            bar.set_postfix_str(f"{speed:.1f} tok/s")
    return GenerationResult(completions, _metrics(batches, rounds_of, job.proposer))


def stream(
    target: Source | LoadedTarget,
    prompts: Prompts,
    *,
    rounds_per_piece: int = 1,
    drafter: Source | LoadedDrafter | None = None,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    max_new_tokens: int = 256,
    num_speculative_tokens: int | None = None,
    drafting: Drafting = "auto",
    draft_sampling: DraftSampling = "greedy",
    prefix: PromptPrefix | None = None,
) -> Iterator[Piece]:
    """Generates as `generate` does, and yields text as rounds complete.

    The prompts run in one batch. The program is dispatched once for every `rounds_per_piece`
    rounds, and goes on from donated state.

    Args:
      target: as for `generate`, and so are the others.
      prompts: as for `generate`.
      rounds_per_piece: rounds between two pieces of an answer.
      drafter: as for `generate`.
      sampling: as for `generate`.
      max_new_tokens: as for `generate`.
      num_speculative_tokens: as for `generate`.
      drafting: as for `generate`.
      draft_sampling: as for `generate`.
      prefix: as for `generate`.

    Yields:
      pieces; an answer's last one holds its `Completion`. The texts of an answer's pieces are
      together its text.

    Raises:
      as `generate`, before the first piece.
    """
    _check_at_least("rounds_per_piece", rounds_per_piece, 1)
    job = _prepare(
        target, prompts, drafter, sampling, max_new_tokens, num_speculative_tokens, drafting,
        draft_sampling, prefix, exact=False,
    )  # fmt: skip
    return _Answers(job, slice(None), as_stream=True).pieces(rounds_per_piece)


def prefill(
    target: Source | LoadedTarget,
    prompt: Prompt,
    *,
    drafter: Source | LoadedDrafter | None = None,
) -> PromptPrefix:
    """Reads what many prompts begin with, once.

    Args:
      target: as for `generate`.
      prompt: a string, chat messages or token ids. Messages end where the assistant's turn opens.
      drafter: as for `generate`; the prefix can only be used with the same one.

    Raises:
      as `generate`.
    """
    target, drafter = _load(target, drafter)
    ids = encode_prompts([prompt], target.tokenizer, target.config.vocab_size)[0]
    _check_room(0, len(ids), target.config.max_position_embeddings)
    proposer: Proposer = NoDraft()
    if drafter is not None:
        check_pair(target.config, drafter.config)
        proposer = make_proposer(drafter, 1)
    return read_prompt_prefix(target, drafter, proposer, ids)


def make_proposer(
    drafter: LoadedDrafter,
    num_speculative_tokens: int,
    drafting: Drafting = "auto",
    draft_sampling: DraftSampling = "greedy",
) -> ParallelDraft | AutoregressiveDraft:
    """Returns the decoding program's proposer for a loaded drafter."""
    parallel = drafter.config.mask_token_id is not None and drafting != "autoregressive"
    return (ParallelDraft if parallel else AutoregressiveDraft)(
        drafter.weights,
        num_speculative_tokens,
        drafter.config.aux_boundaries,
        draft_sampling == "sample",
    )


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


@dataclasses.dataclass(frozen=True)
class _Job:
    """A checked call: models, prompts as token ids (after the prefix), settings of each."""

    target: LoadedTarget
    proposer: Proposer
    prompts: list[list[int]]
    params: list[SamplingParams]
    max_new_tokens: int
    prefix: PromptPrefix | None


def _prepare(
    target: Source | LoadedTarget,
    prompts: Prompts,
    drafter: Source | LoadedDrafter | None,
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    max_new_tokens: int,
    num_speculative_tokens: int | None,
    drafting: Drafting,
    draft_sampling: DraftSampling,
    prefix: PromptPrefix | None,
    exact: bool,
) -> _Job:
    """Loads what is not loaded, and finds everything that is wrong before anything runs."""
    _check_at_least("max_new_tokens", max_new_tokens, 1)
    if num_speculative_tokens is not None:
        _check_at_least("num_speculative_tokens", num_speculative_tokens, 1)
    _check_one_of("drafting", drafting, ("auto", "parallel", "autoregressive"))
    _check_one_of("draft_sampling", draft_sampling, ("greedy", "sample"))
    target, drafter = _load(target, drafter)
    config = target.config
    proposer = _proposer(config, drafter, num_speculative_tokens, drafting, draft_sampling, exact)
    if prefix is not None and not (
        prefix.target.weights is target.weights
        and (prefix.drafter and prefix.drafter.weights) is (drafter and drafter.weights)
    ):
        raise ValueError("the prefix was made with another target or drafter: call prefill again")
    encoded = encode_prompts(prompts, target.tokenizer, config.vocab_size)
    known = len(prefix.token_ids) if prefix else 0
    for index, ids in enumerate(encoded):
        _check_room(index, known + len(ids), config.max_position_embeddings)
    params = _params_of(sampling, len(encoded))
    for each in params:
        each.check_for(config.vocab_size, config.eos_token_ids)
        if each.stop and target.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, which the target does not have")
    return _Job(target, proposer, encoded, params, max_new_tokens, prefix)


def _load(
    target: Source | LoadedTarget, drafter: Source | LoadedDrafter | None
) -> tuple[LoadedTarget, LoadedDrafter | None]:
    if isinstance(target, LoadedDrafter) or isinstance(drafter, LoadedTarget):
        raise ValueError("target and drafter are mixed up: give load_target(...) as target")
    if not isinstance(target, LoadedTarget):
        target = load_target(target)
    if drafter is not None and not isinstance(drafter, LoadedDrafter):
        drafter = load_drafter(drafter, target_layers=target.config.num_layers)
    return target, drafter


def _params_of(
    sampling: SamplingParams | Sequence[SamplingParams] | None, prompts: int
) -> list[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * prompts
    if not isinstance(sampling, Sequence) or not all(
        isinstance(each, SamplingParams) for each in sampling
    ):
        raise ValueError("sampling must be SamplingParams, or a list of one for each prompt")
    if len(sampling) != prompts:
        raise ValueError(f"{len(sampling)} SamplingParams for {prompts} prompts")
    return list(sampling)


def _proposer(
    target: TargetConfig,
    drafter: LoadedDrafter | None,
    wanted: int | None,
    drafting: Drafting,
    draft_sampling: DraftSampling,
    exact: bool,
) -> Proposer:
    if drafter is None:
        return NoDraft((wanted or DEFAULT_SPECULATIVE_TOKENS) if exact else 0)
    check_pair(target, drafter.config)
    if drafting == "parallel" and drafter.config.mask_token_id is None:
        raise ValueError(
            "drafting='parallel' needs mask slots, and this is an EAGLE-3 head, which has none: "
            "use drafting='autoregressive'"
        )
    most = None if drafting == "autoregressive" else drafter.config.num_depths
    drafts = wanted or min(DEFAULT_SPECULATIVE_TOKENS, most or DEFAULT_SPECULATIVE_TOKENS)
    if most is not None and drafts > most:
        raise ValueError(
            f"num_speculative_tokens {drafts} is more than the drafter allows: it was trained for "
            f"{most} drafts per pass"
        )
    return make_proposer(drafter, drafts, drafting, draft_sampling)


def _check_room(index: int, length: int, context: int) -> None:
    if length >= context:
        raise PromptError(
            f"prompt {index}: {length} tokens leave no room in the target's context of {context}; "
            f"shorten it to at most {context - 1}"
        )


def _check_at_least(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def _check_one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


class _Answers:
    """One batch from prompts to completions, with the stops that only the text shows.

    Attributes:
      batch: what runs on the device.
      rounds_of: per answer, the round `[n]` that each of its tokens comes from.
    """

    def __init__(self, job: _Job, part: slice, as_stream: bool):
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
            for piece in pieces:
                if piece.completion or piece.text or piece.token_ids:
                    yield piece

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


def _metrics(
    batches: Sequence[Batch], rounds_of: Sequence[np.ndarray], proposer: Proposer
) -> Metrics:
    seconds = sum(batch.seconds for batch in batches)
    return Metrics.of(
        rounds_of,
        proposer.num_drafts,
        seconds=seconds,
        tokens_per_second=sum(map(len, rounds_of)) / seconds,
        compile_seconds=sum(batch.compile_seconds for batch in batches),
    )
