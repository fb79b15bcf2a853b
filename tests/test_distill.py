"""Data that the target writes: what it would say anyway, and the same after an interruption."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TARGET, random_target
from tiny_tokenizer import TEMPLATE, byte_tokenizer

import peagle_jax
from peagle_jax import SamplingParams, distill
from peagle_jax.distill import Written, seed_of, write_answers, write_prompts
from peagle_jax.load import LoadedTarget
from peagle_jax.prompts import PromptError
from peagle_jax.training.dataset import Dataset, Writer
from peagle_jax.training.folders import DataError

# Alike in their beginning, as chats with one system message are.
ENDS = ([1], [2, 3, 4], [5] * 20, [6, 1], [60, 61, 62], [9, 9], [30], [3] * 7)
PROMPTS = [[7, 8, 9, *rest] for rest in ENDS]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95)
EOS_TOKENS = (10, 11, 12)
# Of few shapes, which share compiled programs.
SHAPE: dict[str, Any] = {"max_new_tokens": 40, "batch_size": 4}


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    """A target with a tokenizer, which ends some of its sampled answers."""
    config = dataclasses.replace(
        TARGET, num_layers=1, sliding_windows=(None,), eos_token_ids=EOS_TOKENS
    )
    return dataclasses.replace(random_target(config), tokenizer=byte_tokenizer())


def answers_of(folder: Path) -> dict[tuple[int, ...], list[int]]:
    """Returns the answers in a dataset by their prompts; checks that they alone are learnt."""
    dataset = Dataset.read(folder)
    found = {}
    for index in range(len(dataset)):
        ids, mask = dataset[index].input_ids.tolist(), dataset[index].loss_mask
        begin = int(np.argmax(mask))
        assert not mask[:begin].any() and mask[begin:].all()
        found[tuple(ids[:begin])] = ids[begin:]
    return found


@pytest.mark.parametrize(
    ("sampling", "count"), [(None, 8), pytest.param(SAMPLED, 4, marks=pytest.mark.slow)]
)
def test_answers_are_those_of_generate(
    target: LoadedTarget, tmp_path: Path, sampling: SamplingParams | None, count: int
) -> None:
    """Whatever batch they were in; EOS is learnt too."""
    prompts, params = PROMPTS[:count], sampling or SamplingParams()
    written = write_answers(target, prompts, tmp_path / "d", sampling=sampling, seed=3, **SHAPE)
    found = answers_of(tmp_path / "d")
    seeded = [dataclasses.replace(params, seed=seed_of(3, place)) for place in range(count)]
    expected = peagle_jax.generate(target, prompts, sampling=seeded, **SHAPE)
    assert found == {
        tuple(prompt): completion.token_ids
        for prompt, completion in zip(prompts, expected, strict=True)
    }
    assert written.documents == count
    assert written.tokens == sum(map(len, found.values()))
    if sampling:
        ends = {c.finish_reason for c in expected}
        assert ends == {"stop", "length"}  # or it would not be looked at
    assert len(set(map(tuple, found.values()))) > 1


def test_the_order_of_prompts_does_not_matter_to_greedy_answers(
    target: LoadedTarget, tmp_path: Path
) -> None:
    for name, prompts in (("a", PROMPTS), ("b", PROMPTS[::-1])):
        write_answers(target, prompts, tmp_path / name, **SHAPE)
    assert answers_of(tmp_path / "a") == answers_of(tmp_path / "b")


def files_of(folder: Path) -> dict[str, bytes]:
    paths = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    return {str(p.relative_to(folder)): p.read_bytes() for p in paths}


def test_a_killed_run_is_completed(
    target: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same bytes, without answering again what was answered."""
    options: dict[str, Any] = dict(SHAPE)
    write_answers(target, PROMPTS, tmp_path / "whole", **options)
    write, written = Writer.write, []

    def killed(self: Writer, index: int, documents: Any) -> None:
        if written:
            raise KeyboardInterrupt
        write(self, index, documents)
        written.append(index)

    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            write_answers(target, PROMPTS, tmp_path / "killed", **options)
    rest = write_answers(target, PROMPTS, tmp_path / "killed", **options)
    assert rest.documents == 4
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")
    done = write_answers(target, PROMPTS, tmp_path / "killed", **options)
    assert (done.documents, done.tokens) == (0, 0)
    with pytest.raises(DataError, match="max_new_tokens was 40 and is 17"):
        write_answers(target, PROMPTS, tmp_path / "killed", **{**options, "max_new_tokens": 17})
    with pytest.raises(DataError, match="prompts was"):
        write_answers(target, PROMPTS[1:], tmp_path / "killed", **options)
    with pytest.raises(DataError, match="target was"):
        write_answers(random_target(target.config, 1), PROMPTS, tmp_path / "killed", **options)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompts": [[1, 96]]}, "prompt 0: token id 96 is outside"),
        ({"prompts": [[1] * 256]}, "prompt 0: 256 tokens leave no room"),
        ({"prompts": []}, "at least one prompt"),
        ({"sampling": SamplingParams(stop=["x"])}, "stop strings"),
        ({"sampling": SamplingParams(bad_token_ids=[96])}, "bad_token_ids"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    ],
)
def test_bad_arguments(
    target: LoadedTarget, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    arguments: dict[str, Any] = {"prompts": PROMPTS, "folder": tmp_path / "d", **changes}
    with pytest.raises(ValueError, match=said):
        write_answers(target, **arguments)
    assert not (tmp_path / "d").exists()


def write(target: LoadedTarget, path: Path, count: int = 12, **options: Any) -> Written:
    return write_prompts(target, count, path, **{**SHAPE, "seed": 1, **options})


def rows_of(path: Path) -> list[str]:
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    for row in rows:
        assert set(row) == {"id", "messages"}
        assert [message["role"] for message in row["messages"]] == ["user"]
    return [row["messages"][0]["content"] for row in rows]


def test_prompts(target: LoadedTarget, tmp_path: Path) -> None:
    """What the target says after a user's turn is opened, up to its end; each once."""
    written = write(target, tmp_path / "p.jsonl")
    texts = rows_of(tmp_path / "p.jsonl")
    assert 0 < len(texts) == written.documents <= 12
    assert len(set(texts)) == len(texts)
    assert written.tokens > len(texts)
    # Those of `generate`, fed what the template puts before a user's words ("u.").
    tokenizer = target.tokenizer
    opening, (end,) = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in ("u.", "\n"))
    params = [
        SamplingParams(temperature=1.0, seed=seed_of(1, i), stop_token_ids=[end]) for i in range(12)
    ]
    out = peagle_jax.generate(target, [opening] * 12, sampling=params, **SHAPE)
    said = [c.token_ids for c in out]
    expected = [tokenizer.decode(ids[:-1]).strip() for ids in said if ids[-1] == end]
    assert texts == list(dict.fromkeys(text for text in expected if text))


def test_an_opening(target: LoadedTarget, tmp_path: Path) -> None:
    write(target, tmp_path / "p.jsonl", opening="the ab")
    texts = rows_of(tmp_path / "p.jsonl")
    assert texts and all(text.startswith("the ab") for text in texts)


@pytest.mark.parametrize("cut", [0, 1, 40, 0.5, 0.9, -1])
def test_prompts_go_on(target: LoadedTarget, tmp_path: Path, cut: float) -> None:
    """Cut off anywhere, in a line or within a batch, the file becomes what it would have been."""
    whole, path = tmp_path / "whole.jsonl", tmp_path / "p.jsonl"
    write(target, whole)
    text = whole.read_bytes()
    path.write_bytes(text[: int(cut if cut in (0, 1, 40, -1) else cut * len(text))])
    write(target, path)
    assert path.read_bytes() == text


def test_more_prompts_and_fewer(target: LoadedTarget, tmp_path: Path) -> None:
    """A larger count goes on where the smaller ended, in the middle of a batch too."""
    path, whole = tmp_path / "p.jsonl", tmp_path / "whole.jsonl"
    write(target, whole)
    write(target, path, count=7)
    write(target, path)
    assert path.read_bytes() == whole.read_bytes()
    write(target, path, count=2)
    assert path.read_bytes() == whole.read_bytes()


def test_prompts_are_found_again_whatever_they_hold(
    target: LoadedTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unicode has more ends of lines than files have."""
    monkeypatch.setattr(
        target.tokenizer.__class__, "decode", lambda self, ids, **_: f"a\u2028b\x85{list(ids)}"
    )
    write(target, tmp_path / "p.jsonl")
    text = (tmp_path / "p.jsonl").read_bytes()
    write(target, tmp_path / "p.jsonl")
    assert (tmp_path / "p.jsonl").read_bytes() == text
    assert "\u2028" in rows_of(tmp_path / "p.jsonl")[0]


def test_bad_prompts_files(target: LoadedTarget, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    for line in ('{"messages": []}', "[1]", '{"id": 3}', "\xff"):
        path.write_text(line + "\n", encoding="latin-1")
        with pytest.raises(DataError, match=r"p.jsonl, line 1, is not of a run with these"):
            write(target, path)
        assert path.read_text(encoding="latin-1") == line + "\n"
    path.unlink()
    write(target, path)
    before = path.read_bytes()
    with pytest.raises(DataError, match="is not of a run with these settings"):
        write(target, path, seed=2)
    assert path.read_bytes() == before
    with pytest.raises(DataError, match="cannot write"):
        write(target, tmp_path)
    with distill._appending(path), pytest.raises(DataError, match="another run is writing"):
        write(target, path)


@pytest.mark.parametrize("template", [None, "{{ messages | length }}"])
def test_targets_without_a_users_turn(
    target: LoadedTarget, tmp_path: Path, template: str | None
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    changed = dataclasses.replace(target, tokenizer=tokenizer)
    with pytest.raises(PromptError, match="chat template"):
        write(changed, tmp_path / "p.jsonl")
    assert not (tmp_path / "p.jsonl").exists()
    assert TEMPLATE.startswith("{%")
