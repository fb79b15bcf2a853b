"""The benchmark for GPUs, on a CPU: with toy shapes, that it runs and that its checks are met.

And with kernels of one line, that a failure, the end of the time and the end of the process each
cost no more than they have to.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner, Result
from conftest import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu.py"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, without programs and ceilings."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import gpu

    monkeypatch.setenv("NPROC", "2")  # the script sets it
    monkeypatch.setattr(gpu, "programs", lambda *_: None)
    monkeypatch.setattr(gpu, "ceilings", lambda *_: {"copy": 1e9, "flops": 1e9})
    return gpu


def case(name: str, kernel: Callable[..., Any]) -> Any:
    """A case of the function `x + y`, timed."""
    from gpu_kernels import Case, Work

    def inputs(key: jax.Array) -> tuple[jax.Array, ...]:
        return jax.random.normal(key, (8,)), jnp.arange(8.0)

    return Case(name, inputs, kernel, lambda x, y: x + y, Work(size=96, flops=8))


def right(x: jax.Array, y: jax.Array) -> jax.Array:
    return y + x


def wrong(x: jax.Array, y: jax.Array) -> jax.Array:
    return x + y + 1


def broken(x: jax.Array, y: jax.Array) -> jax.Array:
    raise RuntimeError("no such tile\nand more")


def run(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, output: Path, *cases: Any) -> Result:
    monkeypatch.setattr(gpu, "kernel_cases", lambda *_: list(cases))
    return CliRunner().invoke(gpu.main, ["--tiny", "--output", str(output)])


def test_a_failure_is_a_row_and_the_others_run(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cases = case("first", broken), case("second", wrong), case("third", right)
    done = run(gpu, monkeypatch, tmp_path / "report.json", *cases)
    report = json.loads((tmp_path / "report.json").read_text())
    first, second, third = report["kernels"]
    assert first == {"name": "first", "right": False, "problem": "RuntimeError: no such tile"}
    assert not second["right"] and second["error"] > 0.1 and second["seconds"]["pallas"] > 0
    assert third["right"] and third["seconds"]["xla"] > 0 and third["in_l2"]
    assert done.exit_code == 1 and "wrong: first, second" in done.output
    assert "first" in done.output and "FAILED  RuntimeError: no such tile" in done.output
    assert report["ended"] and report["skipped"] == []


def test_a_failing_time_and_a_missing_rival(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernel's is a failure; a rival's, said beside the times, is none."""
    import dataclasses

    from gpu_kernels import Rival, tuple_of

    def unfit(found: jax.Array) -> jax.Array:
        return found[:1]

    first = dataclasses.replace(case("first", right), feed=unfit)
    second = dataclasses.replace(case("second", right), cudnn=Rival(broken, tuple_of))
    done = run(gpu, monkeypatch, tmp_path / "report.json", first, second)
    report = json.loads((tmp_path / "report.json").read_text())
    first, second = report["kernels"]
    assert not first["right"] and first["problem"].startswith("TypeError: ")
    assert second["right"] and second["seconds"]["cudnn"] is None
    assert second["missing"] == {"cudnn": "RuntimeError: no such tile"}
    assert done.exit_code == 1 and "wrong: first\n" in done.output


def test_every_result_is_written_when_it_is_there(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before each step, all that came before is in the file, and the step's name."""
    output, seen = tmp_path / "report.json", []
    for step in ("check", "time"):
        original = getattr(gpu.Bench, step)

        def looked(bench: Any, some: Any, original: Any = original) -> Any:
            seen.append(json.loads(output.read_text()))
            return original(bench, some)

        monkeypatch.setattr(gpu.Bench, step, looked)
    done = run(gpu, monkeypatch, output, case("first", right), case("second", right))
    assert done.exit_code == 0, done.output
    assert all(report["ceilings"]["copy"] == 1e9 for report in seen)
    assert [report["running"] for report in seen] == [
        "check first",
        "check second",
        "time first",
        "time second",
    ]
    assert [len(report.get("kernels", [])) for report in seen] == [0, 1, 2, 2]
    assert "seconds" in seen[3]["kernels"][0] and "seconds" not in seen[3]["kernels"][1]
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert "running" not in json.loads(output.read_text())


def test_the_end_of_the_time_skips_and_says_so(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A clock that stands still until the second check is done: then it is over."""
    from gpu_report import Budget

    now, check = [0.0], gpu.Bench.check
    begun: list[str] = []

    def slow(bench: Any, some: Any) -> Any:
        begun.append(some.name)
        found = check(bench, some)
        now[0] = 300.0 if some.name == "second" else 0.0
        return found

    monkeypatch.setattr(gpu, "Budget", lambda seconds: Budget(seconds, lambda: now[0]))
    monkeypatch.setattr(gpu.Bench, "check", slow)
    monkeypatch.setattr(gpu.Bench, "time", lambda _, some: begun.append(some.name))
    cases = [case(name, right) for name in ("first", "second", "third")]
    done = run(gpu, monkeypatch, tmp_path / "report.json", *cases)
    report = json.loads((tmp_path / "report.json").read_text())
    assert begun == [entry["name"] for entry in report["kernels"]] == ["first", "second"]
    left_out = ["check third", "time first", "time second", "time third"]
    assert report["skipped"] == left_out
    assert f"skipped: {', '.join(left_out)}" in done.output
    assert done.exit_code == 0


def test_only_what_is_named_runs(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cases = [case(name, right) for name in ("verify a", "verify b", "cod a")]
    monkeypatch.setattr(gpu, "kernel_cases", lambda *_: cases)
    output = tmp_path / "report.json"
    CliRunner().invoke(gpu.main, ["--tiny", "--only", "fy b", "--only", "cod", "--output", output])
    report = json.loads(output.read_text())
    assert [entry["name"] for entry in report["kernels"]] == ["verify b", "cod a"]


def constants(of: Any) -> list[Any]:
    """Returns the arrays and numbers that a program holds, those in its loops and calls too."""
    if isinstance(of, (list, tuple)):
        return [x for one in of for x in constants(one)]
    if not hasattr(of, "eqns"):
        return []
    literals = [x.val for eqn in of.eqns for x in eqn.invars if hasattr(x, "val")]
    inner = [constants(value) for eqn in of.eqns for value in eqn.params.values()]
    return [*getattr(of, "consts", ()), *literals, *(x for some in inner for x in some)]


@pytest.mark.parametrize("name", ["verify gpt-oss B=16", "prefill gpt-oss", "cod forward", "mxfp4"])
def test_real_arrays_are_no_constants(gpu: ModuleType, name: str) -> None:
    """Neither in what checks nor in what is timed, at the sizes of real models."""
    cases = [case for case in gpu.kernel_cases(False, jnp.dtype(jnp.bfloat16)) if case.work]
    found = next(case for case in cases if case.name.startswith(name))
    key = jax.random.key(0)
    ways = {name: way for name, way in found.ways().items() if name != "cudnn"}  # not to be had
    programs = [(found.error, found.inputs)]
    programs += [
        (found.repeated(way, 3), lambda key, way=way: way.arranged(*found.inputs(key)))
        for way in ways.values()
    ]
    for program, inputs in programs:
        held = constants(jax.make_jaxpr(program)(*jax.eval_shape(inputs, key)))
        # Those of a kernel's body are its arguments.
        sizes = [np.size(x) for x in held if not isinstance(x, jax.core.Tracer)]
        assert max(sizes) < 100


@pytest.mark.slow
def test_it_runs_with_toy_shapes(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    command = [sys.executable, SCRIPT, "--tiny", "--seconds", "3600", "--output", output]
    subprocess.run(command, check=True)
    report = json.loads(output.read_text())
    assert all(entry["right"] for entry in report["kernels"])
    assert {entry["name"].split()[0] for entry in report["kernels"]} == {
        "verify",
        "prefill",
        "cod",
        "mxfp4",
    }
    ways = {
        f"{target} B={batch} {way}": way
        for target in ("llama-3.1-8b", "gpt-oss-20b")
        for batch in (1, 2)
        for way in ("plain", "EAGLE-3 K=3", *(f"P-EAGLE K={k}" for k in (3, 5, 7)))
    }
    entries = {entry["name"]: entry for entry in report["program"]}
    assert set(entries) == set(ways)
    for name, entry in entries.items():  # the script's drafts are accepted as it says
        assert entry["right"] and entry["as_scripted"]
        length = 1 if ways[name] == "plain" else 3
        assert entry["acceptance_length"] == entry["expected_acceptance_length"] == length
    assert report["skipped"] == []


@pytest.mark.slow
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 1
    assert "--tiny" in done.stderr
