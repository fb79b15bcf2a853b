"""How `gpu.py` times whole programs: rounds on random weights, with scripted acceptance."""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from gpu_report import Budget, Report

from peagle_jax.batch import Batch
from peagle_jax.config import TargetConfig
from peagle_jax.decoding import (
    AutoregressiveDraft,
    NoDraft,
    ParallelDraft,
    Proposer,
    ScriptedDraft,
)
from peagle_jax.load import LoadedTarget
from peagle_jax.models import Drafter, Frozen, Target
from peagle_jax.presets import usual_drafter
from peagle_jax.profile import draft_share
from peagle_jax.sampling_params import SamplingParams

# Drafts accepted in the rounds of the script, over and over: acceptance length 3 of K = 3 and more.
SCRIPT = (3, 1, 2, 3, 1, 2)
# The acceptance length may be that much off the script's, of 1.
TOLERANCE = 0.02
WAYS = {"plain": 0, "EAGLE-3 K=3": 3, "P-EAGLE K=3": 3, "P-EAGLE K=5": 5, "P-EAGLE K=7": 7}

Head = ParallelDraft | AutoregressiveDraft


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What programs are timed.

    Attributes:
      targets: name to config.
      batches: B.
      prompt: tokens.
      rounds: of a timing.
    """

    targets: dict[str, TargetConfig]
    batches: tuple[int, ...]
    prompt: int
    rounds: int


@dataclasses.dataclass(frozen=True)
class Models:
    """A target with random weights and a head for each way but "plain"."""

    target: LoadedTarget
    heads: dict[str, Head]

    @classmethod
    def random(cls, name: str, config: TargetConfig, dtype: jnp.dtype) -> "Models":
        """Makes a P-EAGLE head of four layers, and an EAGLE-3 head of one."""
        parallel = usual_drafter(config, 4)
        single = dataclasses.replace(usual_drafter(config, 1), mask_token_id=None)
        weights, boundaries = randomised(Drafter, parallel, dtype), parallel.aux_boundaries
        heads: dict[str, Head] = {
            way: ParallelDraft(weights, k, boundaries)
            for way, k in WAYS.items()
            if way.startswith("P-EAGLE")
        }
        weights, boundaries = randomised(Drafter, single, dtype), single.aux_boundaries
        heads["EAGLE-3 K=3"] = AutoregressiveDraft(weights, 3, boundaries)
        return cls(LoadedTarget(config, randomised(Target, config, dtype), None, Path(name)), heads)


class Cell:
    """The ways of one target at one batch: compiled side by side, then timed one after the other.

    The script's tokens are those of plain decoding in the same K + 1 row program. So they are
    accepted as the script says, unless near ties, of which random weights in bfloat16 have many,
    fall out differently in another program; from there on a sequence accepts next to nothing.
    """

    def __init__(
        self,
        models: Callable[[], Models],
        ways: Sequence[str],
        batch: int,
        sizes: Sizes,
        bandwidth: float,
        budget: Budget,
    ):
        """Compiles nothing yet.

        Args:
          models: makes them, or returns those that were made.
          ways: of `WAYS`.
          batch: B.
          sizes: of prompts and rounds.
          bandwidth: bytes per second that weights are read with at best.
          budget: nothing is waited for longer.
        """
        self._models, self._ways, self._batch, self._sizes = models, ways, batch, sizes
        self._bandwidth, self._budget = bandwidth, budget
        self._most = (sizes.rounds + 8) * (max(SCRIPT) + 1)
        self._pool = concurrent.futures.ThreadPoolExecutor()
        self._plain: float | None = None

    @functools.cached_property
    def _exact(self) -> dict[int, concurrent.futures.Future[np.ndarray]]:
        """Tokens of plain decoding, by K."""
        counts = sorted({WAYS[way] for way in self._ways if way != "plain"})
        return {k: self._pool.submit(self._plain_tokens, k) for k in counts}

    @functools.cached_property
    def _warm(self) -> dict[str, concurrent.futures.Future[None]]:
        """Programs that are compiled, by way."""
        return {way: self._pool.submit(self._warmed, way) for way in self._ways}

    def measure(self, way: str) -> Report:
        """Times rounds of a way, and tells how the script was kept."""
        models, sizes, batch = self._models(), self._sizes, self._batch
        waiting: list[concurrent.futures.Future[Any]] = [
            *self._exact.values(),
            *self._warm.values(),
        ]
        if concurrent.futures.wait(waiting, timeout=self._budget.left).not_done:
            raise TimeoutError("programs are not compiled")
        self._warm[way].result()
        k = WAYS[way]
        run = self._run(self._proposer(way, self._exact[k].result() if k else None))
        run.run(0)
        before, tokens = run.seconds, self._length(run)
        run.run(sizes.rounds)
        seconds = (run.seconds - before) / sizes.rounds
        accepted = (self._length(run) - tokens) / batch / sizes.rounds
        if not k:
            self._plain = seconds
        scripted = [min(SCRIPT[i % len(SCRIPT)], k) + 1 for i in range(sizes.rounds)]
        expected = sum(scripted) / sizes.rounds
        drafting = seconds * draft_share(run) if k else 0.0
        verifying = seconds - drafting
        config = models.target.config
        bound = read_bytes(models.target.weights, config, batch * (k + 1)) / self._bandwidth
        return {
            "right": True,
            "round_ms": 1e3 * seconds,
            "draft_ms": 1e3 * drafting,
            "verify_ms": 1e3 * verifying,
            "round_in_plain_steps": seconds / self._plain if self._plain else None,
            "bound_ms": 1e3 * bound,
            "verify_of_bound": bound / verifying if verifying > 0 else None,  # noise on a CPU
            "acceptance_length": accepted,
            "expected_acceptance_length": expected,
            "as_scripted": abs(accepted - expected) <= TOLERANCE * expected,
            "tokens_per_second": accepted * batch / seconds,
        }

    def close(self) -> None:
        """Compiles no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, proposer: Proposer) -> Batch:
        target, count = self._models().target, self._batch
        vocabulary = target.config.vocab_size
        prompts = [
            np.random.default_rng(i).integers(1, vocabulary - 1, self._sizes.prompt).tolist()
            for i in range(count)
        ]
        params = SamplingParams(ignore_eos=True)
        return Batch(target, proposer, prompts, [params] * count, self._most)

    def _proposer(self, way: str, tokens: np.ndarray | None) -> Proposer:
        """Returns what drafts; without tokens of a script the head's own drafts are taken."""
        if way == "plain":
            return NoDraft()
        slots = 2 * (self._sizes.prompt + self._most) + 512  # more than a sequence ever has
        known = np.full((self._batch, slots), -1, np.int32)
        if tokens is not None:
            known[:, : tokens.shape[1]] = tokens[: self._batch]
        script = jnp.asarray(SCRIPT, jnp.int32)
        return ScriptedDraft(jnp.asarray(known), script, self._models().heads[way])

    def _plain_tokens(self, k: int) -> np.ndarray:
        return np.asarray(self._run(NoDraft(k)).run().tokens)

    def _warmed(self, way: str) -> None:
        run = self._run(self._proposer(way, None))
        run.run(0)
        run.run(1)
        if way != "plain":
            draft_share(run)

    def _length(self, run: Batch) -> int:
        return int(run.generation.lengths[: self._batch].sum())


def randomised(module: Any, config: Any, dtype: jnp.dtype) -> Frozen[Any]:
    """Returns a module with random weights, made on the device."""

    @jax.jit
    def make() -> Frozen[Any]:
        made = Frozen.of(module(config, dtype=dtype, rngs=nnx.Rngs(0)))
        keys = jax.random.split(jax.random.key(1), len(made.leaves))
        leaves = [
            jax.random.randint(k, x.shape, 0, 256, jnp.uint8) if _packed(x) else x
            for k, x in zip(keys, made.leaves, strict=True)
        ]
        return Frozen(leaves, made.structure)

    return make()


def _packed(x: jax.Array) -> bool:
    return x.dtype == jnp.uint8 and x.shape[-1] == 16


def read_bytes(weights: Frozen[Target], config: TargetConfig, rows: int) -> float:
    """Returns the bytes of weights that a step of so many rows reads: of experts, those in use."""
    model = weights.merge()
    total = float(sum(leaf.nbytes for leaf in weights.leaves))
    if not config.tie_word_embeddings:
        total -= model.embedding[...].nbytes
    if config.moe is None:
        return total
    idle = (1 - config.moe.num_experts_per_token / config.moe.num_experts) ** rows
    of_experts = sum(leaf.nbytes for leaf in weights.leaves if leaf.ndim > 2)
    return total - idle * of_experts
