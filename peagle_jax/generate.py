"""`generate` and `stream`: text in, text out, and how many passes of the target it took."""

import numbers
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from peagle_jax.answers import Answers, Job
from peagle_jax.batch import PromptPrefix, read_prompt_prefix
from peagle_jax.config import ConfigError, DrafterConfig, TargetConfig
from peagle_jax.decoding import AutoregressiveDraft, NoDraft, ParallelDraft, Proposer
from peagle_jax.load import LoadedDrafter, LoadedTarget, Source, load_drafter, load_target
from peagle_jax.profile import draft_share
from peagle_jax.prompts import Prompt, Prompts, check_room, encode_prompts
from peagle_jax.results import Completion, GenerationResult, Metrics, Piece
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
    profile: bool = False,
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
        what follows: token ids, or strings, which are tokenized on their own and without the
        token that begins a text.
      exact: plain decoding in the K + 1 row program that a drafter's verification runs. In
        exact arithmetic it changes nothing; in floating point, products of different row counts
        round differently, and a near tie of the top two logits may fall either way. With
        `exact=True` plain and speculative greedy tokens are equal bit for bit whatever the
        weights, if both calls name the same `num_speculative_tokens`. It costs K + 1 rows per
        token. No effect with a drafter.
      batch_size: prompts that run together.
      profile: time the drafter after the last batch, for `metrics.draft_share`. The first time it
        compiles two programs more.
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
    rounds_of: list[np.ndarray] = []
    seconds = compile_seconds = 0.0
    share = None
    with tqdm(total=len(job.prompts), unit="prompt", disable=None if progress else True) as bar:
        for begin in range(0, len(job.prompts), batch_size):
            answers = Answers(job, slice(begin, begin + batch_size), as_stream=False)
            for _ in answers.pieces(STOP_STRING_ROUNDS if answers.has_texts else None):
                pass
            completions += answers.completions
            rounds_of += answers.rounds_of
            seconds += answers.batch.seconds
            compile_seconds += answers.batch.compile_seconds
            bar.update(len(answers.completions))
            bar.set_postfix_str(f"{sum(map(len, rounds_of)) / seconds:.1f} tok/s")
    if profile and drafter is not None:
        share = draft_share(answers.batch)
    drafts = job.proposer.num_drafts
    return GenerationResult(
        completions, Metrics.of_run(rounds_of, drafts, seconds, compile_seconds, share)
    )


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
      pieces; an answer's last one holds its `Completion`, and the very last one the `Metrics`.
      The texts of an answer's pieces are together its text.

    Raises:
      as `generate`, before the first piece.
    """
    _check_at_least("rounds_per_piece", rounds_per_piece, 1)
    job = _prepare(
        target, prompts, drafter, sampling, max_new_tokens, num_speculative_tokens, drafting,
        draft_sampling, prefix, exact=False,
    )  # fmt: skip
    return Answers(job, slice(None), as_stream=True).pieces(rounds_per_piece)


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
    check_room([ids], target.config.max_position_embeddings)
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
) -> Job:
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
        raise ValueError(
            "the prefix was made with another target or drafter: give prefill and generate the "
            "same loaded ones"
        )
    encoded = encode_prompts(
        prompts, target.tokenizer, config.vocab_size, continued=prefix is not None
    )
    known = len(prefix.token_ids) if prefix else 0
    check_room(encoded, config.max_position_embeddings, known)
    params = _params_of(sampling, len(encoded))
    for each in params:
        each.check_for(config.vocab_size, config.eos_token_ids)
        if each.stop and target.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, which the target does not have")
    return Job(target, proposer, encoded, params, max_new_tokens, prefix)


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


def _check_at_least(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def _check_one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
