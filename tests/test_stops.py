"""Every way to end an answer, against decoding one token at a time and reading everything anew."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TARGET, random_drafter, random_target
from tiny_tokenizer import byte_tokenizer

import peagle_jax
from peagle_jax import SamplingParams
from peagle_jax.decoding import Proposer, ScriptedDraft
from peagle_jax.load import LoadedTarget
from peagle_jax.models import masked

CONTEXT, ROWS, LENGTH, LOGPROBS = 72, 4, 32, 3
_RNG = np.random.default_rng(0)
PROMPTS = [_RNG.integers(0, 90, n).tolist() for n in _RNG.integers(1, LENGTH + 1, 48)]
BATCHES = 52  # of ROWS prompts, for each K


@pytest.fixture(scope="module")
def talking() -> LoadedTarget:
    """A random target with a byte-level tokenizer, and a context that answers run into."""
    config = dataclasses.replace(TARGET, max_position_embeddings=CONTEXT, eos_token_ids=(90, 91))
    return dataclasses.replace(random_target(config), tokenizer=byte_tokenizer())


class Naive:
    """One full forward per token, no cache; the end is looked for after every token."""

    def __init__(self, target: LoadedTarget, prompts: Sequence[list[int]]):
        """Decodes the prompts together as far as the context goes, and remembers every row."""
        self.target = target
        self._rows: dict[tuple[int, ...], np.ndarray] = {}

        @jax.jit
        def logits(tokens: jax.Array, at: jax.Array) -> jax.Array:
            model = target.weights.merge()
            causal = jnp.tril(jnp.ones((1, CONTEXT, CONTEXT), bool))
            attend = masked([causal] * model.config.num_layers)
            positions = jnp.broadcast_to(jnp.arange(CONTEXT), tokens.shape)
            x, *_ = model(tokens, positions, attend)
            return model.logits(jnp.take_along_axis(x, at[:, None, None], axis=1))[:, 0]

        self._logits = logits
        sequences = [list(prompt) for prompt in prompts]
        while growing := [ids for ids in sequences if len(ids) < CONTEXT]:
            self._read(sequences)
            for ids in growing:
                ids.append(int(np.argmax(self.row(ids))))

    def _read(self, sequences: Sequence[list[int]]) -> None:
        padded = np.zeros((len(sequences), CONTEXT), np.int32)
        for row, ids in enumerate(sequences):
            padded[row, : len(ids)] = ids
        rows = np.asarray(self._logits(padded, np.array([len(ids) - 1 for ids in sequences])))
        self._rows.update(zip(map(tuple, sequences), rows, strict=True))

    def row(self, ids: list[int]) -> np.ndarray:
        """Returns the logits after the tokens."""
        if tuple(ids) not in self._rows:
            self._read([ids])
        return self._rows[tuple(ids)]

    def answer(self, prompt: list[int], params: SamplingParams, most: int) -> "Expected":
        stops, ids, text = params.stop_ids(self.target.config.eos_token_ids), [], ""
        entries = []
        while True:
            row = self.row([*prompt, *ids])
            allowed = row.copy()
            if len(ids) < params.min_new_tokens:
                allowed[list(stops)] = -np.inf
            ids.append(int(np.argmax(allowed)))
            entries.append((ids[-1], row - np.logaddexp.reduce(row.astype(np.float64))))
            text = self.target.tokenizer.decode(ids, skip_special_tokens=True)
            if found := [(text.index(s), len(s), s) for s in params.stop if s in text]:
                begin, length, stop = min(found)
                kept = begin + length * params.include_stop_str_in_output
                return Expected(ids, text[:kept], "stop", stop, entries)
            if ids[-1] in stops:
                return Expected(ids, text, "stop", ids[-1], entries)
            if len(ids) == most or len(prompt) + len(ids) == CONTEXT:
                return Expected(ids, text, "length", None, entries)


@dataclasses.dataclass
class Expected:
    ids: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    entries: list[tuple[int, np.ndarray]]  # each token, and log-probabilities there


@pytest.fixture(scope="module")
def naive(talking: LoadedTarget) -> Naive:
    return Naive(talking, PROMPTS)


def scripted(
    monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]], full: list[list[int]], kept: Any
) -> None:
    """Has `generate` draft these continuations, right as often as `kept` says, or the head's own.

    Args:
      monkeypatch: pytest's.
      prompts: the prompts.
      full: what follows each; nothing for the head's own drafts.
      kept: drafts that are right, round by round.
    """
    tokens = np.full((len(prompts), 2 * CONTEXT), -1, np.int32)
    for row, (prompt, ids) in enumerate(zip(prompts, full, strict=True)):
        tokens[row, len(prompt) : len(prompt) + len(ids)] = ids
    module = sys.modules["peagle_jax.generate"]
    make = module.make_proposer

    def proposer(*arguments: Any) -> Proposer:
        kept_in = jnp.asarray(np.resize(kept, 8), jnp.int32)
        return ScriptedDraft(jnp.asarray(tokens), kept_in, make(*arguments))

    monkeypatch.setattr(module, "make_proposer", proposer)


def random_case(
    rng: np.random.Generator, naive: Naive, prompt: list[int]
) -> tuple[SamplingParams, list[int]]:
    """Returns settings under which something is likely to end the answer, and how it would go on.

    Stop strings are cut from what the target says, at any place and of any length.
    """
    free = naive.answer(prompt, SamplingParams(ignore_eos=True), 50)
    stop = []
    for _ in range(rng.integers(0, 3)):
        begin = rng.integers(0, max(1, len(free.text) - 1))
        piece = free.text[begin : begin + rng.integers(1, 7)]
        if piece and "\ufffd" not in piece:
            stop.append(piece)
    if rng.random() < 0.2:
        stop.append("never said")
    few = rng.random() < 0.5
    return (
        SamplingParams(
            stop=stop,
            include_stop_str_in_output=bool(rng.random() < 0.3),
            stop_token_ids=[] if few else [int(rng.choice(free.ids)), int(rng.integers(0, 96))],
            ignore_eos=bool(rng.random() < 0.4),
            min_new_tokens=int(rng.integers(0, 12)) if rng.random() < 0.3 else 0,
            logprobs=int(rng.integers(0, LOGPROBS + 1)),
        ),
        free.ids,
    )


@pytest.mark.parametrize(
    "num_drafts", [3, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 4, 5))]
)
def test_any_end_is_that_of_decoding_one_token_at_a_time(
    num_drafts: int, talking: LoadedTarget, naive: Naive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """208 cases for each K: tokens, text, log-probabilities, reason and rounds end together."""
    rng = np.random.default_rng(num_drafts)
    head = random_drafter()
    reasons: list[Any] = []
    for batch in range(BATCHES):
        prompts = [PROMPTS[i] for i in rng.integers(0, len(PROMPTS), ROWS)]
        cases = [random_case(rng, naive, prompt) for prompt in prompts]
        most = int(rng.integers(1, 45))
        params = [case[0] for case in cases]
        params[0] = dataclasses.replace(params[0], logprobs=LOGPROBS)  # so that shapes agree
        if not any(p.min_new_tokens for p in params):
            params[1] = dataclasses.replace(params[1], min_new_tokens=1)
        expected = [naive.answer(p, own, most) for p, own in zip(prompts, params, strict=True)]
        full = [case[1] if batch % 3 else [] for case in cases]
        with monkeypatch.context() as patched:
            scripted(patched, prompts, full, rng.integers(0, num_drafts + 1, 8))
            answers = peagle_jax.generate(
                talking,
                prompts,
                drafter=head,
                sampling=params,
                max_new_tokens=most,
                num_speculative_tokens=num_drafts,
            )
        for prompt, own, want, got in zip(prompts, params, expected, answers, strict=True):
            assert got.prompt_token_ids == prompt
            assert got.token_ids == want.ids
            assert (got.text, got.stop_reason) == (want.text, want.stop_reason)
            assert got.finish_reason == want.finish_reason
            check_logprobs(got, want, own.logprobs)
            acceptance = got.acceptance
            assert acceptance.num_generated_tokens == len(want.ids)
            total = sum(acceptance.acceptance_per_position) * acceptance.num_rounds
            assert round(total) + acceptance.num_rounds == len(want.ids) - 1
            reasons.append(want.stop_reason)
        assert answers.metrics.num_generated_tokens == sum(len(w.ids) for w in expected)
        rounds = [a.acceptance.num_rounds for a in answers]
        assert answers.metrics.num_rounds == sum(rounds)
    kinds = [type(reason) for reason in reasons]
    assert min(kinds.count(kind) for kind in (int, str, type(None))) >= 15


def check_logprobs(got: peagle_jax.Completion, want: Expected, count: int | None) -> None:
    assert got.logprobs is not None and len(got.logprobs) == len(want.ids)
    for entry, (token, row) in zip(got.logprobs, want.entries, strict=True):
        assert entry.token_id == token
        assert abs(entry.logprob - row[token]) < 1e-5
        assert [i for i, _ in entry.top] == np.argsort(-row, kind="stable")[:count].tolist()
        assert all(abs(value - row[i]) < 1e-5 for i, value in entry.top)


def test_a_stop_string_spans_tokens_and_rounds(
    talking: LoadedTarget, naive: Naive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same stop of several tokens, with the border of the rounds at every place of it."""
    prompt = PROMPTS[0]
    free = naive.answer(prompt, SamplingParams(ignore_eos=True), 40)
    texts = [talking.tokenizer.decode(free.ids[:n], skip_special_tokens=True) for n in range(41)]
    end = next(
        n
        for n in range(8, 40)
        if len(stop := texts[n].removeprefix(texts[n - 4])) >= 4
        and "\ufffd" not in stop
        and texts[n].startswith(texts[n - 4])
        and stop not in texts[n - 1]
    )
    stop = texts[end][len(texts[end - 4]) :]
    head, borders = random_drafter(), set()
    for offset in range(4):  # a first round of offset + 1 tokens, then rounds of 4
        with monkeypatch.context() as patched:
            scripted(patched, [prompt], [free.ids], [offset, *[3] * 7])
            [got] = peagle_jax.generate(
                talking,
                [prompt],
                drafter=head,
                sampling=SamplingParams(stop=[stop], ignore_eos=True),
                max_new_tokens=40,
                num_speculative_tokens=3,
            )
        assert (got.text, got.stop_reason) == (texts[end - 4], stop)
        assert got.token_ids == free.ids[:end]
        assert got.acceptance.num_rounds == 1 + -(-(end - 2 - offset) // 4)
        borders.add((end - 2 - offset) % 4)
    assert len(borders) == 4


def test_the_earliest_end_wins(talking: LoadedTarget, naive: Naive) -> None:
    """Of a token and a string that end at the same token it is the string, as in the text."""
    prompt = PROMPTS[1]
    free = naive.answer(prompt, SamplingParams(ignore_eos=True), 30)
    texts = [talking.tokenizer.decode(free.ids[:n], skip_special_tokens=True) for n in range(31)]
    at, string = next(  # a token that is new, and completes a string that is new
        (n, texts[n][-2:])
        for n in range(5, 30)
        if free.ids[n - 1] not in free.ids[: n - 1]
        and texts[n][-2:].isascii()
        and texts[n][-2:] not in texts[n - 1]
    )
    token = free.ids[at - 1]

    def ends(most: int = 30, **settings: Any) -> tuple[int, str, Any]:
        params = SamplingParams(ignore_eos=True, **settings)
        [got] = peagle_jax.generate(talking, [prompt], sampling=params, max_new_tokens=most)
        return len(got.token_ids), got.finish_reason, got.stop_reason

    assert ends(stop_token_ids=[token]) == (at, "stop", token)
    assert ends(stop=[string]) == (at, "stop", string)
    assert ends(stop_token_ids=[token], stop=[string]) == (at, "stop", string)
    assert ends(stop_token_ids=[token, free.ids[2]], stop=[string])[0] <= 3
    assert ends(most=at, stop_token_ids=[token]) == (at, "stop", token)
    assert ends(most=at - 1, stop_token_ids=[token], stop=[string]) == (at - 1, "length", None)


def test_stop_strings_need_a_tokenizer(target: LoadedTarget) -> None:
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        peagle_jax.generate(target, [[5]], sampling=SamplingParams(stop=["a"]))
