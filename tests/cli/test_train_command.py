"""`peagle-jax train` and `data features`: from flags and files to a head, or to one message."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_models import WORDS, make_target, own_cache
from click.testing import CliRunner, Result

import peagle_jax
from peagle_jax.cli import main
from peagle_jax.training.dataset import Document, Recipe, Writer
from peagle_jax.training.settings import TrainSettings
from peagle_jax.training.trainer import Log

COMMAND = Path(sys.executable).parent / "peagle-jax"
MASK = len(WORDS) - 1


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One for all tests: they run the same programs."""
    with pytest.MonkeyPatch.context() as patch:
        yield from own_cache(tmp_path_factory.mktemp("cache"), patch)


def data(folder: Path, vocabulary: int = len(WORDS), longest: int = 20) -> Path:
    rng = np.random.default_rng(0)
    made = [
        Document(rng.integers(3, MASK, n).astype(np.int32), np.arange(n) >= 3)
        for n in rng.integers(6, longest, 12)
    ]
    Writer(folder, Recipe(vocabulary, 1, {"longest": longest})).write(0, made)
    return folder


@pytest.fixture
def config(target: Path, tmp_path: Path) -> Path:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"w1 w2"\n{"token_ids": [5, 6, 7]}\n')
    settings: dict[str, Any] = {
        "target": str(target),
        "data": [str(data(tmp_path / "data"))],
        "output": str(tmp_path / "run"),
        "num_layers": 1,
        "num_depths": 2,
        "mask_token_id": MASK,
        "row_tokens": 32,
        "rows_per_step": 1,
        "steps": 4,
        "warmup_steps": 1,
        "dtype": "float32",
        "save_every": 1,
        "generate_every": 4,
        "generate_prompts": str(prompts),
        "generate_tokens": 8,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    (tmp_path / "run.toml").write_text("\n".join(lines))
    return tmp_path / "run.toml"


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


def entries(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_a_run(config: Path, target: Path, tmp_path: Path) -> None:
    """Prints the head's folder; what is measured on the way is what the saved head does."""
    result = invoke("train", "--config", config)
    assert result.exit_code == 0, result.output
    head = tmp_path / "run" / "head"
    assert result.stdout == f"{head}\n"
    first, second, third = result.stderr.splitlines()
    assert first.startswith("12 documents, ") and first.endswith("steps an epoch")
    assert second == "the draft vocabulary covers 100.00% of the supervised tokens"
    assert third.endswith("weights train")
    (measured,) = (e for e in entries(tmp_path / "run") if e["kind"] == "generation")
    out = peagle_jax.generate(
        str(target),
        [[{"role": "user", "content": "w1 w2"}], [5, 6, 7]],
        drafter=str(head),
        max_new_tokens=8,
        num_speculative_tokens=2,
    )
    assert measured["acceptance_length"] == out.metrics.acceptance_length
    assert measured["acceptance_per_position"] == out.metrics.acceptance_per_position
    # Started again: found before anything is loaded.
    result = invoke("train", "--config", config, "--target", "nothing")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"Error: {head} exists, so this run is complete: name another output to train another "
        "head\n"
    )


@pytest.mark.slow
def test_features(config: Path, tmp_path: Path) -> None:
    """Written with the run's own configuration, they give the same run."""
    plain = ["train", "--config", config, "--generate-every", 0]
    assert invoke(*plain).exit_code == 0
    options = ["--out", tmp_path / "f", "--stored-dtype", "float32"]
    result = invoke("data", "features", "--config", config, *options)
    assert result.exit_code == 0, result.output
    assert "rows of 32 tokens" in result.stdout and result.stderr == ""
    result = invoke(*plain, "--features", tmp_path / "f", "--output", tmp_path / "run2")
    assert result.exit_code == 0, result.output
    losses = [[e["loss"] for e in entries(tmp_path / name)] for name in ("run", "run2")]
    assert losses[0] == losses[1]
    result = invoke(
        *plain, "--features", tmp_path / "f", "--output", tmp_path / "3", "--row-tokens", 40
    )
    assert result.exit_code == 1
    assert "row_tokens was 32 and is 40" in result.stderr
    assert not (tmp_path / "3").exists()


def test_ctrl_c(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, no traceback; the run goes on from the last state."""
    write = Log.write

    def interrupted(self: Log, kind: str, step: int, *rest: Any) -> None:
        write(self, kind, step, *rest)
        if step == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Log, "write", interrupted)
        result = invoke("train", "--config", config, "--generate-every", 0)
    assert result.exit_code == 1
    assert result.stderr.endswith(
        "Interrupted: run it again to go on from the last checkpoint.\n\nAborted!\n"
    ) or result.stderr.endswith("from the last checkpoint.\nAborted!\n")
    assert [p.name for p in sorted((tmp_path / "run" / "checkpoints").iterdir())] == ["1", "2"]
    assert invoke("train", "--config", config, "--generate-every", 0).exit_code == 0
    assert [e["step"] for e in entries(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--learning-rate", "-1"], "learning_rate must be positive"),
        (["--target", "nothing"], "nothing: no such folder"),
        (["--data", "nothing"], "nothing is no dataset"),
        (["--features", "nothing"], "nothing holds no features"),
        (["--validation", "nothing"], "nothing is no dataset"),
        (["--row-tokens", "8"], "raise row_tokens"),
        (["--aux-boundaries", "99"], "aux_boundaries (99,) are not among"),
        (["--draft-vocab-size", "97"], "draft_vocab_size 97 is not in 1..96"),
        (["--mask-token-id", "96"], "mask_token_id 96 is outside"),
        (["--num-layers", "9", "--layers-from-target"], "layers_from_target: the target has"),
        (["--generate-prompts", "nothing"], "cannot read nothing"),
        (["--data", "wide"], "the data is for a vocabulary of 97 tokens, the target has 96"),
        (["--generate-prompts", "long.jsonl"], "leave no room in the target's context"),
        (["--generate-prompts", "own.jsonl"], "rows with settings of their own"),
    ],
)
def test_one_message(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    """Before anything is written."""
    monkeypatch.chdir(tmp_path)
    data(Path("wide"), len(WORDS) + 1)
    Path("long.jsonl").write_text(json.dumps({"token_ids": [5] * 5000}) + "\n")
    Path("own.jsonl").write_text('{"prompt": "w1", "sampling": {"temperature": 1}}\n')
    result = invoke("train", "--config", config, *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("Error: ") and said in result.stderr
    assert not (tmp_path / "run").exists()


def test_no_mask_token(config: Path) -> None:
    """The tokenizer uses every row of the embedding."""
    text = config.read_text()
    config.write_text("\n".join(x for x in text.splitlines() if "mask_token_id" not in x))
    result = invoke("train", "--config", config)
    assert "no unused row for the mask token: name mask_token_id" in result.stderr


def test_help_tells_every_setting() -> None:
    result = invoke("train", "--help")
    shown = " ".join(result.output.split())
    for field, value in TrainSettings.__dataclass_fields__.items():
        assert f"--{field.replace('_', '-')}" in shown
        if isinstance(value.default, int | float) and value.default is not True:
            assert f"[default: {value.default}]" in shown
    assert "Repeat." in shown


@pytest.mark.slow
def test_sigint_and_nothing_else_on_stderr(config: Path, tmp_path: Path) -> None:
    """The installed command: neither Orbax nor JAX says anything, and Ctrl-C ends it."""
    command = [str(COMMAND), "train", "--config", str(config), "--generate-every", "0"]
    process = subprocess.Popen(
        [*command, "--steps", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < 5:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(2)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert len(err.strip().splitlines()) <= 6 and "Traceback" not in err
    assert err.strip().endswith("Aborted!")
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "b")], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{tmp_path / 'b' / 'head'}\n"
    assert len(done.stderr.splitlines()) == 3
