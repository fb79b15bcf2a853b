"""A batch of prompts on the device: padding, programs compiled once for each shape, rounds."""

import dataclasses
import functools
import secrets
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.decoding import (
    Generation,
    NoDraft,
    Penalties,
    Prefix,
    Proposer,
    Request,
    Sampling,
    State,
    capacity_for,
    continue_generation,
    generate_tokens,
    read_prefix,
)
from peagle_jax.load import LoadedDrafter, LoadedTarget
from peagle_jax.models import KVCache, spread
from peagle_jax.sampling_params import SamplingParams

MIN_PROMPT_BUCKET = 32
MIN_STOP_IDS = 4
ALL_ROUNDS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class PromptPrefix:
    """What many prompts begin with, read once: `prefill` makes it, `generate` takes it.

    Attributes:
      token_ids: the tokens.
      target_cache: the target's KV cache over them, batch 1.
      draft_cache: the drafter's, or nothing.
      read: how far the caches go, and the feature that waits for the next token.
      target: the model it is of.
      drafter: the head it is of, or None.
    """

    token_ids: list[int]
    target_cache: KVCache
    draft_cache: Any
    read: Prefix
    target: LoadedTarget
    drafter: LoadedDrafter | None


def read_prompt_prefix(
    target: LoadedTarget, drafter: LoadedDrafter | None, proposer: Proposer, ids: list[int]
) -> PromptPrefix:
    """Reads token ids into caches of their own."""
    rows = _power_of_two(max(MIN_PROMPT_BUCKET, len(ids)))
    tokens = np.zeros((1, rows), np.int32)
    tokens[0, : len(ids)] = ids
    dtype = _dtype(target)
    caches = (
        KVCache.zeros(target.config, 1, rows, dtype, block=1),
        proposer.new_cache(1, rows, dtype),
    )
    arguments = (target.weights, proposer, jnp.asarray(tokens), jnp.int32(len(ids)), *caches)
    program = _compiled(read_prefix, *arguments, prompt_rows=rows)
    target_cache, draft_state, read = program(*arguments)
    draft_cache = () if drafter is None else draft_state.cache
    return PromptPrefix(ids, target_cache, draft_cache, read, target, drafter)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Shapes of a batch's program, which batches of similar size share.

    Attributes:
      rows: B, sequences.
      prompt_rows: rows of each sequence that the prefill reads, after what is known of all.
      capacity: C, slots of a sequence in a layer without a window.
    """

    rows: int
    prompt_rows: int
    capacity: int

    @classmethod
    def of(
        cls,
        num_prompts: int,
        longest: int,
        max_new_tokens: int,
        context: int,
        num_drafts: int,
        known: int = 0,
    ) -> Self:
        """Rounds up to powers of two.

        Args:
          num_prompts: of the batch.
          longest: tokens of its longest prompt, without those that are known.
          max_new_tokens: tokens to generate at most.
          context: tokens at which every sequence ends.
          num_drafts: K.
          known: tokens of the prefix that all prompts share.
        """
        prompt_rows = _power_of_two(max(MIN_PROMPT_BUCKET, longest))
        read = known + prompt_rows
        most = max(read, min(read + max_new_tokens, context))
        return cls(_power_of_two(num_prompts), prompt_rows, capacity_for(most, num_drafts))


class Batch:
    """Prompts that are answered together.

    Attributes:
      prompts: the prompts' token ids, those of the prefix included.
      models: target, proposer and request, as the programs take them.
      state: where it stands, on the device; None before the first `run`.
      generation: the sequences so far, on the host; rows past the prompts only fill the bucket.
      seconds: running time of programs so far, prefill included.
      compile_seconds: time spent compiling so far.
    """

    generation: Generation

    def __init__(
        self,
        target: LoadedTarget,
        proposer: Proposer,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        max_new_tokens: int,
        prefix: PromptPrefix | None = None,
    ):
        """Pads checked prompts (those after the prefix, where there is one) to their bucket."""
        config = target.config
        self.seconds = self.compile_seconds = 0.0
        self._target, self._proposer, self._prefix = target, proposer, prefix
        known = prefix.token_ids if prefix else []
        self.prompts = [[*known, *prompt] for prompt in prompts]
        self._bucket = Bucket.of(
            len(prompts),
            max(map(len, prompts)),
            max_new_tokens,
            config.max_position_embeddings,
            proposer.num_drafts,
            len(known),
        )
        request = self._make_request(config, params, max_new_tokens)
        self.models = (target.weights, proposer, request)
        wanted = [p.logprobs for p in params if p.logprobs is not None]
        self._num_logprobs = max(wanted) if wanted else None
        self.state: State | None = None

    def _make_request(
        self, config: TargetConfig, params: Sequence[SamplingParams], max_new_tokens: int
    ) -> Request:
        rows = self._bucket.rows
        tokens = np.zeros((rows, self._bucket.capacity), np.int32)
        lengths = np.ones((rows,), np.int32)
        budgets = np.zeros((rows,), np.int32)  # 0: rows that only fill are done at once
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt)] = prompt
            lengths[row] = len(prompt)
            budgets[row] = min(max_new_tokens, config.max_position_embeddings - len(prompt))
        if self._prefix:  # rows that only fill hold the prefix too, and one token
            tokens[len(self.prompts) :, : len(self._prefix.token_ids)] = self._prefix.token_ids
            lengths[len(self.prompts) :] = len(self._prefix.token_ids) + 1
        ids = [sorted(p.stop_ids(config.eos_token_ids)) for p in params]
        stop_ids = np.full((rows, _power_of_two(max(MIN_STOP_IDS, *map(len, ids)))), -1)
        for row, stops in enumerate(ids):
            stop_ids[row, : len(stops)] = stops
        sampling = None
        if not all(p.is_plain_greedy for p in params):
            sampling = _sampling(params, rows, config.vocab_size)
        return Request(
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray(lengths),
            budgets=jnp.asarray(budgets),
            stop_ids=jnp.asarray(stop_ids, jnp.int32),
            sampling=sampling,
        )

    def run(self, rounds: int | None = None) -> Generation:
        """Reads the prompts at the first call, and runs so many rounds, or all there are.

        Returns:
          the sequences, on the host.
        """
        if self.state is None:
            last = jnp.int32(ALL_ROUNDS if rounds is None else rounds)
            read = self._prefix.read if self._prefix else None
            if read is not None and read.feature is not None:
                feature = jnp.broadcast_to(
                    read.feature, (self._bucket.rows, *read.feature.shape[1:])
                )
                read = dataclasses.replace(read, feature=feature)
            arguments: tuple[Any, ...] = (*self.models, *self._caches(), last, read)
            call = functools.partial(
                self._timed,
                generate_tokens,
                prompt_rows=self._bucket.prompt_rows,
                num_logprobs=self._num_logprobs,
            )
        else:
            done = int(self.generation.rounds)
            last = jnp.int32(ALL_ROUNDS if rounds is None else done + rounds)
            arguments = (*self.models, self.state, last)
            call = functools.partial(self._timed, continue_generation)
        self.state, self.generation = call(*arguments)
        return self.generation

    def stop(self, rows: Sequence[int]) -> None:
        """Ends the answers of these rows where they stand."""
        assert self.state is not None
        done = self.state.generation.done.at[jnp.asarray(rows, jnp.int32)].set(True)
        generation = dataclasses.replace(self.state.generation, done=done)
        self.state = dataclasses.replace(self.state, generation=generation)

    def keep(self, rows: Sequence[int]) -> None:
        """Drops all rows but these, the others' memory and time with them.

        Only a batch without a drafter can do so: drafters keep what has no row of its own.

        Args:
          rows: rows of `generation`, whose number is rounded up to a power of two; the row that
            fills it up must be done.
        """
        assert self.state is not None and isinstance(self._proposer, NoDraft)
        size = _power_of_two(len(rows))
        filling = [] if size == len(rows) else [int(np.argmax(self.generation.done))]
        kept = jnp.asarray([*rows, *filling * (size - len(rows))], jnp.int32)
        target, proposer, request = self.models
        request, self.state = _take_rows((request, self.state), kept)
        self.models = (target, proposer, request)
        self.prompts = [self.prompts[row] for row in rows]
        self.generation = jax.device_get(self.state.generation)

    def _caches(self) -> tuple[KVCache, Any]:
        """Returns empty caches, or copies of the prefix's."""
        config, rows, capacity = self._target.config, self._bucket.rows, self._bucket.capacity
        dtype, block = _dtype(self._target), self._proposer.num_drafts + 1
        prefix = self._prefix
        if prefix is None:
            target_cache = KVCache.zeros(config, rows, capacity, dtype, block)
            return target_cache, self._proposer.new_cache(rows, capacity, dtype)
        length = len(prefix.token_ids)
        target_cache = spread(prefix.target_cache, config, length, rows, capacity, block)
        if prefix.drafter is None:
            return target_cache, self._proposer.new_cache(rows, capacity, dtype)
        head: DrafterConfig = prefix.drafter.config
        block = 2 * self._proposer.num_drafts
        return target_cache, spread(prefix.draft_cache, head, length, rows, capacity, block)

    def _timed(self, function: Any, *arguments: Any, **statics: Any) -> tuple[State, Generation]:
        started = time.perf_counter()
        program = _compiled(function, *arguments, **statics)
        compiled = time.perf_counter()
        state = program(*arguments)
        generation = jax.device_get(state.generation)
        self.compile_seconds += compiled - started
        self.seconds += time.perf_counter() - compiled
        return state, generation


@jax.jit
def _take_rows(tree: tuple[Request, State], rows: jax.Array) -> tuple[Request, State]:
    """Returns these sequences of arrays `[B, ...]`; scalars stay."""
    return jax.tree.map(lambda x: x[rows] if x.ndim else x, tree)


_programs: dict[Hashable, Any] = {}


def _compiled(function: Any, *arguments: Any, **statics: Any) -> Callable[..., Any]:
    """Returns a jitted function compiled for the shapes of these arguments, once for each."""
    leaves, structure = jax.tree.flatten(arguments)
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    key = (function, structure, shapes, tuple(sorted(statics.items())))
    if key not in _programs:
        _programs[key] = function.lower(*arguments, **statics).compile()
    return _programs[key]


def _sampling(params: Sequence[SamplingParams], rows: int, vocab_size: int) -> Sampling:
    """Returns the settings as arrays; rows past the prompts are greedy."""
    padded = [*params, *[SamplingParams()] * (rows - len(params))]

    def column(name: str, dtype: Any) -> jax.Array:
        return jnp.asarray([getattr(p, name) for p in padded], dtype)

    seeds = [secrets.randbits(64) if p.seed is None else int(p.seed) for p in padded]
    bias = penalties = None
    if any(p.has_bias for p in padded):
        bias = jnp.asarray(np.stack([_bias(p, vocab_size) for p in padded]))
    if any(p.has_penalties for p in padded):
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        penalties = Penalties(*(column(name, jnp.float32) for name in names))
    return Sampling(
        seeds=jnp.asarray([(seed >> 32, seed & 0xFFFFFFFF) for seed in seeds], jnp.uint32),
        temperature=column("temperature", jnp.float32),
        top_k=column("top_k", jnp.int32),
        top_p=column("top_p", jnp.float32),
        min_p=column("min_p", jnp.float32),
        min_new_tokens=column("min_new_tokens", jnp.int32),
        bias=bias,
        penalties=penalties,
    )


def _bias(params: SamplingParams, vocab_size: int) -> np.ndarray:
    bias = np.zeros((vocab_size,), np.float32)
    if params.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[list(params.allowed_token_ids)] = 0
    bias[list(params.bad_token_ids)] = -np.inf
    for token, value in (params.logit_bias or {}).items():
        bias[token] += value
    return bias


def _dtype(target: LoadedTarget) -> jnp.dtype:
    return target.weights.merge().embedding[...].dtype


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
