"""The demo: what it says, and that it fails when the tokens differ."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import DEMO_DRAFTER, DEMO_TARGET, GOLDEN, ROOT

import peagle_jax

DEMO = ROOT / "examples" / "demo.py"
TARGET = GOLDEN / "targets" / "llama_gqa"
DRAFTER = GOLDEN / "drafters" / "norm_before_fc"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_JAX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_models_are_the_projects(demo: ModuleType) -> None:
    defaults = {option.name: option.default for option in demo.main.params}
    assert Path(defaults["target"]) == DEMO_TARGET
    assert Path(defaults["drafter"]) == DEMO_DRAFTER and DEMO_DRAFTER.is_dir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "prompt 0: the target has no chat template"),
        (["--target", "./nowhere"], "./nowhere: no such folder"),
        (["--drafter", "./nowhere"], "./nowhere: no such folder"),
        (["--drafter", str(DEMO_DRAFTER)], "is [2, 15, 28], supported is distinct layer ids 0..4"),
        (["--max-new-tokens", "0"], "max_new_tokens must be an integer of at least 1"),
    ],
)
def test_errors_take_one_line(arguments: list[str], message: str, demo: ModuleType) -> None:
    good = ["--target", str(TARGET), "--drafter", str(DRAFTER)]
    result = CliRunner().invoke(demo.main, [*good, *arguments])
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout) == (1, "")
    *progress, last = result.stderr.splitlines()
    assert last.startswith("Error: ") and message in last
    assert all(line.endswith("...") for line in progress)


def completed(ids: list[int], accepted: float, speed: float) -> peagle_jax.GenerationResult:
    counts = (4, 3, accepted, [accepted - 1])
    acceptance = peagle_jax.Acceptance(*counts)
    completion = peagle_jax.Completion("An answer.", ids, "length", None, [1, 2], None, acceptance)
    metrics = peagle_jax.Metrics(*counts, 4 / speed, speed, 0.0)
    return peagle_jax.GenerationResult([completion], metrics)


@pytest.mark.parametrize(("drafted", "says", "code"), [([5, 6], "yes", 0), ([5, 7], "NO", 1)])
def test_it_says_whether_the_tokens_are_identical(
    drafted: list[int], says: str, code: int, demo: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs are stand-ins, with a median speed of 20 and of 40."""
    asked: list[Any] = []
    speeds = (10.0, 30.0, 20.0, 25.0, 15.0)

    def generate(target: Any, prompts: Any, **options: Any) -> peagle_jax.GenerationResult:
        asked.append((prompts, options["drafter"] is not None, options["max_new_tokens"]))
        speed = speeds[(len(asked) - 1) // 2]
        if options["drafter"] is None:
            return completed([5, 6], 1.0, speed)
        return completed(drafted, 1.5, 2 * speed)

    monkeypatch.setattr(peagle_jax, "generate", generate)
    arguments = ["--target", str(TARGET), "--drafter", str(DRAFTER), "--prompt", "Why?"]
    result = CliRunner().invoke(demo.main, [*arguments, "--max-new-tokens", "4"])
    assert result.exit_code == code, result.stderr
    chat = [[{"role": "user", "content": "Why?"}]]
    assert asked == [(chat, False, 4), (chat, True, 4)] * demo.REPEATS
    out = result.stdout.splitlines()
    assert out[-1] == f"tokens identical: {says}"
    assert out[-2].startswith("acceptance length 1.50, speed 2.00 times plain")
    assert "> Why?" in out and "An answer." in out
    rows = {line.split()[0]: line.split()[1:] for line in out if line.startswith(("plain", "P-E"))}
    assert rows == {"plain": ["4", "3", "1.00", "20.0"], "P-EAGLE": ["4", "3", "1.50", "40.0"]}


@pytest.mark.slow
def test_the_real_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `make demo` runs it, with the user's own cache."""
    if not DEMO_TARGET.is_dir():
        pytest.skip("the demo's target is not there: make model")
    monkeypatch.undo()
    run = subprocess.run(
        [sys.executable, str(DEMO)], cwd=os.sep, capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stderr
    out = run.stdout.splitlines()
    assert out[-1] == "tokens identical: yes"
    length = float(out[-2].split("acceptance length ")[1].split(",")[0])
    assert 1.0 < length <= 4.0
    assert "36" in run.stdout  # dollars for 12 pens
