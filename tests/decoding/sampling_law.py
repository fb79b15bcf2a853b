"""The law of sampled sequences, by float64 enumeration, and models small enough to enumerate.

`Settings.law` is written from vLLM's order of processors, one token at a time and without a batch,
apart from the package's code. `TableTarget` and `TableDraft` are looked up in tables, so that the
decoding program runs as it is on hundreds of thousands of sequences at once.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from peagle_jax.decoding import Penalties, Sampling
from peagle_jax.decoding.draft import Committed, Proposal, _choose
from peagle_jax.models import Drafter, KVCache


@dataclasses.dataclass(frozen=True)
class Settings:
    """How one sequence is sampled."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    min_new_tokens: int = 0
    bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    allowed: Sequence[int] | None = None
    bad: Sequence[int] = ()
    stops: Sequence[int] = ()

    def scores(
        self, logits: np.ndarray, prompt: Sequence[int], output: Sequence[int]
    ) -> np.ndarray:
        """Returns what the next token is the argmax of where the temperature is 0."""
        z = np.array(logits, np.float64)
        if self.allowed is not None:
            z[[t for t in range(len(z)) if t not in self.allowed]] = -np.inf
        z[list(self.bad)] = -np.inf
        if len(output) < self.min_new_tokens:
            z[list(self.stops)] = -np.inf
        for token, bias in self.bias.items():
            z[token] += bias
        for token in {*prompt, *output}:
            z[token] = z[token] / self.repetition if z[token] > 0 else z[token] * self.repetition
        for token in set(output):
            z[token] -= self.frequency * list(output).count(token) + self.presence
        return z

    def law(self, logits: np.ndarray, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
        """Returns the probabilities `[V]` of the next token."""
        return self.law_and_margin(logits, prompt, output)[0]

    def law_and_margin(
        self, logits: np.ndarray, prompt: Sequence[int], output: Sequence[int]
    ) -> tuple[np.ndarray, float]:
        """Returns the law, and how near any token is to being cut or kept the other way."""
        z = self.scores(logits, prompt, output)
        if self.temperature < 1e-5:
            one = np.zeros_like(z)
            one[np.argmax(z)] = 1
            return one, np.inf
        z = z / self.temperature
        p = softmax(z)
        margins = np.abs(p / p.max() - self.min_p)[(p > 0) & (p < p.max())]
        z[p < self.min_p * p.max()] = -np.inf
        if self.top_k > 0:
            z[z < np.sort(z)[-min(self.top_k, len(z))]] = -np.inf
        if self.top_p < 1:
            ascending = np.argsort(z, kind="stable")
            below = np.cumsum(softmax(z)[ascending])
            cut = below <= 1 - self.top_p
            cut[-1] = False
            margins = np.append(margins, np.abs(below[:-1] - (1 - self.top_p)))
            least = z[ascending][~cut].min()
            z[z < least] = -np.inf  # ties with the least likely one stay, as with top-k
        return softmax(z), min(margins, default=np.inf)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def as_sampling(
    settings: Sequence[Settings], vocab: int, seeds: np.ndarray, bare: bool = False
) -> Sampling:
    """Returns settings as arrays, over and over until there are as many as seeds `[B, 2]`.

    Args:
      settings: some; B is a multiple of their number.
      vocab: V.
      seeds: `[B, 2]`.
      bare: leave out what is None by default.
    """
    times = len(seeds) // len(settings)

    def column(name: str, dtype: Any) -> jax.Array:
        return jnp.asarray(np.tile([getattr(s, name) for s in settings], times), dtype)

    bias = np.zeros((len(settings), vocab), np.float32)
    for row, each in zip(bias, settings, strict=True):
        if each.allowed is not None:
            row[[t for t in range(vocab) if t not in each.allowed]] = -np.inf
        row[list(each.bad)] = -np.inf
        for token, value in each.bias.items():
            row[token] += value
    names = ("repetition", "presence", "frequency")
    return Sampling(
        seeds=jnp.asarray(seeds, jnp.uint32),
        temperature=column("temperature", jnp.float32),
        top_k=column("top_k", jnp.int32),
        top_p=column("top_p", jnp.float32),
        min_p=column("min_p", jnp.float32),
        min_new_tokens=column("min_new_tokens", jnp.int32),
        bias=None if bare else jnp.asarray(np.tile(bias, (times, 1))),
        penalties=None if bare else Penalties(*(column(name, jnp.float32) for name in names)),
    )


def stop_ids(settings: Sequence[Settings], batch: int) -> jax.Array:
    """Returns the stop tokens `[B, 2]` that go with `as_sampling`."""
    stops = np.full((len(settings), 2), -1, np.int32)
    for row, each in zip(stops, settings, strict=True):
        row[: len(each.stops)] = each.stops
    return jnp.asarray(np.tile(stops, (batch // len(settings), 1)))


def sequence_law(
    logits_after: Callable[[tuple[int, ...]], np.ndarray],
    settings: Settings,
    prompt: Sequence[int],
    budget: int,
) -> dict[tuple[int, ...], float]:
    """Returns the probability of every answer, by enumeration.

    Args:
      logits_after: the target's logits `[V]` after the prompt and these tokens.
      settings: how it is sampled.
      prompt: the prompt.
      budget: tokens of an answer, unless a stop token ends it.
    """
    ended: dict[tuple[int, ...], float] = {}
    open_ = {(): 1.0}
    for _ in range(budget):
        longer: dict[tuple[int, ...], float] = {}
        for output, chance in open_.items():
            law = settings.law(logits_after(output), prompt, output)
            for token in np.flatnonzero(law):
                into = ended if token in settings.stops else longer
                into[(*output, int(token))] = chance * law[token]
        open_ = longer
    return {**ended, **open_}


def fit(answers: np.ndarray, law: Mapping[tuple[int, ...], float], stops: Sequence[int]) -> float:
    """Returns the p-value of Pearson's chi-square test that `answers` `[N, n]` have the law.

    Answers that are expected less than 10 times are counted together. One that the law rules out
    gives 0.
    """
    size = int(answers.max()) + 1
    digits = size ** np.arange(answers.shape[1], dtype=np.int64)
    codes, counts = np.unique(answers.astype(np.int64) @ digits, return_counts=True)
    seen: dict[tuple[int, ...], int] = {}
    rows = codes[:, None] // digits % size
    for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
        ends = [i for i, token in enumerate(row) if token in stops]
        answer = tuple(row[: ends[0] + 1] if ends else row)
        seen[answer] = seen.get(answer, 0) + count
    if not seen.keys() <= law.keys():
        return 0.0
    expected = np.array(list(law.values())) * len(answers)
    observed = np.array([seen.get(answer, 0) for answer in law], float)
    rare = expected < 10
    expected = np.append(expected[~rare], expected[rare].sum())
    observed = np.append(observed[~rare], observed[rare].sum())
    expected, observed = expected[expected > 0], observed[expected > 0]
    if len(expected) == 1:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, len(expected) - 1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableTarget:
    """Stands in for a target: logits `[P, V, V]` by position and token there."""

    table: jax.Array

    def merge(self) -> "TableTarget":
        return self

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, attend: Any, boundaries: Any
    ) -> tuple[jax.Array, None, KVCache]:
        del attend, boundaries
        return jnp.stack([positions, tokens], axis=-1), None, KVCache((), ())

    def logits(self, x: jax.Array) -> jax.Array:
        return self.table[x[..., 0], x[..., 1]]


class _Vocabulary:
    """The part of a drafter that knows the draft vocabulary, here the first D of V ids and more."""

    to_target_ids = Drafter.to_target_ids
    over_target_ids = Drafter.over_target_ids

    def __init__(self, ids: jax.Array, vocab: int):
        self.config = types.SimpleNamespace(draft_vocab_size=ids.shape[0], vocab_size=vocab)
        self.d2t = ids - jnp.arange(ids.shape[0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableDraft:
    """Stands in for a head: logits `[P, V, D]` by position and last known token.

    Attributes:
      table: the logits.
      ids: `[D]`, the target's ids of the draft vocabulary.
      num_drafts: K.
      one_pass: all K drafts know the last committed token only, as in P-EAGLE; otherwise each
        follows the one before it, as in EAGLE-3.
      sample: as for the package's heads.
      tells: "true" is the package's; the others deceive the verification. "dense" drafts what is
        most likely and says it was drawn; "nothing" draws and does not say so; "unmapped" says it
        in ids of the draft vocabulary.
    """

    table: jax.Array
    ids: jax.Array
    num_drafts: int = dataclasses.field(metadata={"static": True})
    one_pass: bool = dataclasses.field(metadata={"static": True})
    sample: bool = dataclasses.field(metadata={"static": True})
    tells: Literal["true", "dense", "nothing", "unmapped"] = dataclasses.field(
        default="true", metadata={"static": True}
    )
    aux_boundaries: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    def start(self, target: Any, cache: Any) -> Any:
        del target
        return cache

    def propose(self, target: Any, state: Any, seen: Committed, sampling: Sampling) -> Proposal:
        del target
        vocabulary = _Vocabulary(self.ids, self.table.shape[1])
        last = jnp.take_along_axis(seen.tokens, seen.length[:, None] - 1, axis=1)  # [B, 1]
        drafts: list[jax.Array] = []
        laws: list[jax.Array | None] = []
        for step in range(self.num_drafts):
            at = seen.length[:, None] + step
            logits = self.table[at, last]  # [B, 1, D]
            draft, law = _choose(vocabulary, logits, at, sampling, self.sample)  # type: ignore
            if self.tells == "dense":
                draft = vocabulary.to_target_ids(jnp.argmax(logits, axis=-1).astype(jnp.int32))
            elif self.tells == "nothing":
                law = None
            elif self.tells == "unmapped":
                law = jax.nn.softmax(logits / sampling.temperature[:, None, None])
                missing = self.table.shape[1] - law.shape[-1]
                law = jnp.pad(law, ((0, 0), (0, 0), (0, missing)))
            drafts.append(draft)
            laws.append(law)
            if not self.one_pass:
                last = draft
        joined = None if laws[0] is None else jnp.concatenate(laws, axis=1)  # type: ignore
        return jnp.concatenate(drafts, axis=1), joined, state
