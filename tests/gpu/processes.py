"""Compilation in a process of its own: a kernel that a device cannot run aborts it."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

COMPILER = ROOT / ".cache" / "cuda"


def compiled(device: str, *arguments: str, script: str = "programs.py") -> dict[str, Any]:
    """Returns the report that a script of this folder makes for a device."""
    found = COMPILER.is_dir() or importlib.util.find_spec("jax_cuda13_plugin")
    if device != "cpu" and not found:
        pytest.skip("JAX's CUDA plugin and ptxas are not there: make compiler")
    path = os.pathsep.join([str(COMPILER), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / script), device, *arguments],
        env={**os.environ, "PYTHONPATH": path, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
