"""The benchmark for GPUs, on a CPU with toy shapes: that it runs, and that its checks are met."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow


def test_it_runs_with_toy_shapes(tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    script = ROOT / "benchmarks" / "gpu.py"
    subprocess.run([sys.executable, script, "--tiny", "--output", output], check=True)
    report = json.loads(output.read_text())
    assert all(entry["right"] for entry in report["kernels"])
    assert {entry["name"].split()[0] for entry in report["kernels"]} == {
        "verify",
        "prefill",
        "cod",
        "mxfp4",
    }
    ways = {entry["way"]: entry for entry in report["program"]}
    assert set(ways) == {
        "plain",
        "EAGLE-3 K=3",
        *(f"P-EAGLE K={k}" for k in (3, 5, 7)),
    }
    # The script's drafts are accepted as it says.
    lengths = [entry["acceptance_length"] for way, entry in ways.items() if way != "plain"]
    assert min(lengths) > 2


def test_without_a_gpu_it_says_so() -> None:
    script = ROOT / "benchmarks" / "gpu.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "--tiny" in done.stderr
