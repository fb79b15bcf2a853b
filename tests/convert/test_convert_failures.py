"""A full disk, a killed run and too little memory: what must hold when things go wrong."""

import signal
from pathlib import Path

import pytest
from convert_sources import (
    LLAMA,
    assert_identical,
    expected_target,
    random_bits,
    read_native,
    run_python,
    target_tensors,
    write,
)

from peagle_jax import checkpoint
from peagle_jax.config import TargetConfig
from peagle_jax.convert import ConvertError, to_native

TENSORS = target_tensors(LLAMA)


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


# Ends itself as the system ends a process that is killed: nothing is cleaned up.
KILLED = """
    import os, pathlib, signal, sys, threading
    from peagle_jax import checkpoint
    from peagle_jax.convert import source, to_native

    folder, out, moment = sys.argv[1:]
    models = pathlib.Path(out).parent

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    read_into, tensors = source.Tensor.read_into, []

    def read_and_die(self, part):
        read_into(self, part)
        tensors.append(self)
        if len(tensors) == 5:
            die()

    def die_at_the_first_bytes():
        while not any(p.is_file() and p.stat().st_size for p in models.rglob("*")):
            pass
        die()

    save = checkpoint.ocp.save

    def save_and_die(*args):
        save(*args)
        die()

    if moment == "reading":
        source.Tensor.read_into = read_and_die
    elif moment == "writing":
        threading.Thread(target=die_at_the_first_bytes, daemon=True).start()
    else:
        checkpoint.ocp.save = save_and_die
    to_native(folder, out)
"""


@pytest.mark.parametrize("moment", ["reading", "writing", "written"])
def test_a_killed_run_leaves_nothing_that_loads(moment: str, tmp_path: Path) -> None:
    large = LLAMA | {"vocab_size": 40_000, "hidden_size": 512}
    tensors = target_tensors(large, random_bits(0))
    source = write(tmp_path / "hf", large, tensors)
    out = tmp_path / "models" / "out"
    out.parent.mkdir()
    with run_python(KILLED, source, out, moment) as process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, errors
    left = list(out.parent.iterdir())
    assert bool(left) == (moment != "reading")
    assert not any(checkpoint.is_native(folder) for folder in left)
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.read_config(out, TargetConfig)
    to_native(source, out)
    assert_identical(read_native(out, TargetConfig)[1], expected_target(tensors, 2))
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
