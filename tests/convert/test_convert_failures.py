"""A full disk, a killed run and too little memory: what must hold when things go wrong."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from convert_sources import (
    LLAMA,
    assert_identical,
    expected_target,
    random_bits,
    read_native,
    target_tensors,
    write,
)

from peagle_jax import checkpoint
from peagle_jax.config import TargetConfig
from peagle_jax.convert import ConvertError, to_native

TENSORS = target_tensors(LLAMA)


def run_python(program: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts a Python program on the CPU that imports what this process imports."""
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", textwrap.dedent(program), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        ValueError("RESOURCE_EXHAUSTED: No space left on device\nmore"),  # TensorStore's
    ],
)
def test_full_disk(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "hf", LLAMA, TENSORS)
    save = checkpoint.ocp.save

    def save_and_fail(*args: object) -> None:
        save(*args)
        raise error

    monkeypatch.setattr(checkpoint.ocp, "save", save_and_fail)
    with pytest.raises(ConvertError, match=r"cannot write .*out: .*No space left on device$"):
        to_native(tmp_path / "hf", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
    monkeypatch.undo()
    to_native(tmp_path / "hf", tmp_path / "out")


KILLED = """
    import pathlib, sys, time
    from peagle_jax import checkpoint
    from peagle_jax.convert import to_native

    save = checkpoint.ocp.save

    def save_and_wait(*args):
        save(*args)
        print("written", flush=True)
        time.sleep(600)

    checkpoint.ocp.save = save_and_wait
    to_native(sys.argv[1], sys.argv[2])
"""


def test_a_killed_run_leaves_nothing_that_loads(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", LLAMA, TENSORS)
    out = tmp_path / "models" / "out"
    with run_python(KILLED, source, out) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
        process.communicate()
    left = list(out.parent.iterdir())
    assert left and not any(checkpoint.is_native(folder) for folder in left)
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.read_config(out, TargetConfig)
    to_native(source, out)
    assert_identical(read_native(out, TargetConfig)[1], expected_target(TENSORS, 2))
    assert list(out.parent.iterdir()) == [out]


# Memory

MEASURED = """
    import sys
    from peagle_jax.convert import to_native

    def peak():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

    to_native(sys.argv[1], sys.argv[2])
    before = peak()
    done = to_native(sys.argv[3], sys.argv[4], sys.argv[5])
    print(peak() - before, done.array_bytes // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_peak_memory_is_the_output(dtype: str, tmp_path: Path) -> None:
    """A copy of the model, or of its tables (half of it), would show."""
    large = LLAMA | {
        "vocab_size": 16_000,
        "hidden_size": 1024,
        "intermediate_size": 5000,
        "head_dim": 64,
    }
    write(tmp_path / "small", LLAMA, TENSORS)
    write(tmp_path / "large", large, target_tensors(large, random_bits(0)), shards=2)
    folders = [tmp_path / n for n in ("small", "small-out", "large", "large-out")]
    with run_python(MEASURED, *folders, dtype) as process:
        out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    grown, output = map(int, out.split())  # KiB
    assert output > 120 * 1024
    assert grown <= output + 24 * 1024, f"{grown} KiB for an output of {output} KiB"
