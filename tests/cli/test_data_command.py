"""`peagle-jax data`: prompts, answers and chats from the command line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_models import WORDS, make_target, own_cache
from click.testing import CliRunner, Result

from peagle_jax.cli import main
from peagle_jax.training.dataset import Dataset


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        yield from own_cache(tmp_path_factory.mktemp("cache"), patch)


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["data", *map(str, arguments)])


def test_from_prompts_to_answers(target: Path, tmp_path: Path) -> None:
    """Prompts that the target writes are what `generate` takes; a second run has nothing to do."""
    common = ["--target", target, "--batch-size", 4, "--max-new-tokens", 12]
    asked = tmp_path / "p.jsonl"
    ask = ["prompts", *common, "--count", 8, "--out", asked, "--opening", "w5 w6"]
    result = invoke(*ask)
    assert result.exit_code == 0, result.output
    assert "prompts, " in result.stdout and result.stderr == ""
    before = asked.read_bytes()
    assert (
        invoke("prompts", *common, "--count", 8, "--out", asked, "--opening", "w5 w6").exit_code
        == 0
    )
    assert asked.read_bytes() == before
    lines(asked, "w1 w2", {"messages": [{"role": "user", "content": "w1 w3"}]})
    options = ["generate", *common, "--prompts", asked, "--chat", "--out", tmp_path / "d"]
    result = invoke(*options)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("2 answers, ") and result.stderr == ""
    dataset = Dataset.read(tmp_path / "d")
    for index, word in enumerate(("w2", "w3")):
        begin = [WORDS.index(w) for w in ("user", "w1", word, "assistant")]
        document = dataset[index]
        assert document.input_ids[:4].tolist() == begin
        assert document.loss_mask.tolist() == [n >= 4 for n in range(len(document.input_ids))]
    assert invoke(*options).stdout == f"{tmp_path / 'd'} is complete\n"


def test_prepare(target: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]
    ids = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    file = lines(tmp_path / "c.jsonl", {"messages": chat}, ids)
    options = ["--target", target, "--chats", file]
    result = invoke("prepare", *options, "--out", tmp_path / "d", "--max-tokens", 9)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("2 documents of ")
    assert "0 cut at 9, 0 dropped" in result.stdout
    assert len(Dataset.read(tmp_path / "d")) == 2


def test_one_message(target: Path, tmp_path: Path) -> None:
    """Each kind of wrong input; nothing is written."""
    bad = lines(tmp_path / "bad.jsonl", {"messages": [{"role": "user", "content": "w1"}]})
    own = lines(tmp_path / "own.jsonl", {"prompt": "w1", "sampling": {"temperature": 1}})
    good = lines(tmp_path / "good.jsonl", "w1")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    out = ["--out", tmp_path / "out"]
    generate, prepare = ["generate", "--target", target], ["prepare", "--target", target]
    for arguments, said in (
        ([*prepare, "--chats", bad, *out], "bad.jsonl, line 1: the assistant answers nothing"),
        ([*generate, "--prompts", own, *out], "rows with settings of their own"),
        ([*generate, "--prompts", good, *out, "--stop", "x"], "stop strings"),
        ([*generate, "--prompts", good, "--out", tmp_path / "full"], "name another folder"),
        ([*generate, "--prompts", good, "--out", good], "good.jsonl exists and has no"),
        (["generate", "--target", "no", "--prompts", good, *out], "no: no such folder"),
    ):
        result = invoke(*arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        assert len(result.stderr.splitlines()) == 1
        assert said in result.stderr
    for arguments, said in (
        ([*generate, "--prompts", good, *out, "--batch-size", 0], "x>=1"),
        ([*prepare, "--chats", good, *out, "--max-tokens", 1], "x>=2"),
        ([*prepare, "--chats", tmp_path / "none", *out], "does not exist"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert said in result.stderr
    assert not (tmp_path / "out").exists()


def test_no_chat_template(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    target = make_target(tmp_path / "m", template=None)
    chat = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    file = lines(tmp_path / "c.jsonl", {"messages": chat})
    options = ["--target", target, "--out", tmp_path / "d"]
    for arguments in (["prompts"], ["prepare", "--chats", file], ["generate", "--prompts", file]):
        result = invoke(*arguments, *options)
        assert result.exit_code == 1
        assert "the target has no chat template" in result.stderr
        assert not (tmp_path / "d").exists()
