"""The native checkpoint: every bit comes back, or one error says what is wrong and what to do."""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DRAFTER, TARGET
from flax import nnx

from peagle_jax import checkpoint
from peagle_jax.checkpoint import CheckpointError
from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.load import LoadedDrafter, LoadedTarget
from peagle_jax.models import Drafter, Target

Arrays = dict[str, jax.Array]


def random_arrays(config: Any) -> Arrays:
    """Returns arrays of the config's names and shapes."""
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray((9 * rng.standard_normal(wanted.shape)).astype(wanted.dtype))
        for name, wanted in checkpoint.abstract_parameters(config).items()
    }


def cast(arrays: Arrays, dtype: str) -> Arrays:
    """Returns the arrays with the floating ones in another dtype."""
    return {
        name: jnp.asarray(np.asarray(a).astype(jnp.dtype(dtype)))
        if jnp.issubdtype(a.dtype, jnp.floating)
        else a
        for name, a in arrays.items()
    }


def arrays_of(module: nnx.Module) -> Arrays:
    """Returns a module's arrays by the names of the checkpoint."""
    flat = nnx.to_flat_state(nnx.state(module))
    return {".".join(map(str, path)): variable.get_value() for path, variable in flat}


def load(folder: Path, config_type: type[Any], dtype: str | None = None) -> Arrays:
    """Loads by default in the stored dtype."""
    module: type[Any] = Target if config_type is TargetConfig else Drafter
    config, stored = checkpoint.read_config(folder, config_type)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return arrays_of(checkpoint.load(module, folder, config, jnp.dtype(dtype or stored), device))


def assert_identical(arrays: Arrays, expected: Arrays) -> None:
    assert set(arrays) == set(expected)
    for name, value in expected.items():
        assert (arrays[name].dtype, arrays[name].shape) == (value.dtype, value.shape), name
        assert np.asarray(arrays[name]).tobytes() == np.asarray(value).tobytes(), name


TARGET_ARRAYS = random_arrays(TARGET)
# Full vocabulary and shared tables: no d2t, no embedding, no lm_head, no mask_hidden.
SHARING = dataclasses.replace(
    DRAFTER, draft_vocab_size=96, own_embedding=False, own_lm_head=False, mask_token_id=None
)
CONFIGS: dict[str, Any] = {"target": TARGET, "drafter": DRAFTER, "sharing": SHARING}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's checkpoint with a tokenizer file; not to be changed."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "merges.txt").write_text("a b\n")
    files = {"merges.txt": folder / "merges.txt"}
    checkpoint.save(folder / "target", TARGET, TARGET_ARRAYS, files)
    return folder / "target"


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(saved, tmp_path / "copied"))


# Round trip


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bit_comes_back(model: str, dtype: str, tmp_path: Path) -> None:
    config = CONFIGS[model]
    stored = cast(random_arrays(config), dtype)
    checkpoint.save(tmp_path / "new" / "out", config, stored)
    assert checkpoint.read_config(tmp_path / "new" / "out", type(config)) == (
        config,
        jnp.dtype(dtype),
    )
    assert_identical(load(tmp_path / "new" / "out", type(config)), stored)
    other = {"float32": "bfloat16", "bfloat16": "float32"}[dtype]
    assert_identical(load(tmp_path / "new" / "out", type(config), other), cast(stored, other))
    header = json.loads((tmp_path / "new" / "out" / "config.json").read_text())
    assert (header["format"], header["format_version"]) == ("peagle_jax", checkpoint.FORMAT_VERSION)
    kind = "target" if config is TARGET else "drafter"
    assert (header["kind"], header["dtype"]) == (kind, dtype)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["out"]


def test_expected_names_and_shapes_are_the_modules(
    target: LoadedTarget, drafter: LoadedDrafter
) -> None:
    for loaded in (target, drafter):
        expected = checkpoint.abstract_parameters(loaded.config)
        assert {n: (s.shape, s.dtype) for n, s in expected.items()} == {
            n: (a.shape, a.dtype) for n, a in arrays_of(loaded.weights.merge()).items()
        }
    assert expected["d2t"].dtype == jnp.int32
    optional = {"d2t", "embedding", "lm_head", "mask_hidden"}
    assert optional <= set(expected)
    assert not optional & set(checkpoint.abstract_parameters(SHARING))


def test_tokenizer_files_are_kept(saved: Path) -> None:
    assert (saved / "tokenizer" / "merges.txt").read_text() == "a b\n"


def test_the_folder_is_as_readable_as_any_other(saved: Path) -> None:
    assert saved.stat().st_mode & 0o777 == 0o755


def test_links_to_the_files_do(saved: Path, tmp_path: Path) -> None:
    """The hub's cache is made of them."""
    for file in saved.rglob("*"):
        if file.is_file():
            link = tmp_path / file.relative_to(saved)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
    assert_identical(load(tmp_path, TargetConfig), TARGET_ARRAYS)


def test_is_native(saved: Path, tmp_path: Path) -> None:
    assert checkpoint.is_native(saved)
    assert not checkpoint.is_native(tmp_path)
    assert not checkpoint.is_native(tmp_path / "nowhere")
    for text in ('{"model_type": "llama"}', '["peagle_jax"]', '"peagle_jax"', "{", ""):
        (tmp_path / "config.json").write_text(text)
        assert not checkpoint.is_native(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert not checkpoint.is_native(tmp_path)


# What cannot be read


def edit(folder: Path, **changes: Any) -> None:
    """Changes entries of config.json; None takes one out."""
    path = folder / "config.json"
    header = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in header.items() if v is not None}))


def refusal(folder: Path, config_type: type[Any] = TargetConfig) -> str:
    with pytest.raises(CheckpointError) as error:
        checkpoint.read_config(folder, config_type)
    message = str(error.value)
    assert str(folder) in message
    assert "\n" not in message
    return message


def test_the_other_kind_is_refused(saved: Path) -> None:
    assert refusal(saved, DrafterConfig) == f"{saved} holds a target, not a drafter"


@pytest.mark.parametrize("version", [0, 1, 3])
def test_another_version_is_refused(copied: Path, version: Any) -> None:
    edit(copied, format_version=version)
    message = refusal(copied)
    assert f"format version {version}, this release reads 2" in message
    assert "convert the source checkpoint again" in message


@pytest.mark.parametrize("content", [b"", b'{"format": "peagle_jax"', b"\xff\xfe\x00"])
def test_a_config_that_is_no_json(copied: Path, content: bytes) -> None:
    (copied / "config.json").write_bytes(content)
    assert f"cannot read {copied / 'config.json'}" in refusal(copied)


def test_a_folder_of_another_format(copied: Path) -> None:
    for text in ('{"model_type": "llama"}', "[1]"):
        (copied / "config.json").write_text(text)
        assert "is no native checkpoint; convert it with peagle-convert" in refusal(copied)
    (copied / "config.json").unlink()
    assert f"cannot read {copied / 'config.json'}" in refusal(copied)
    assert "No such file" in refusal(copied / "nowhere")


@pytest.mark.parametrize("key", ["format_version", "kind", "dtype", "config", "files"])
def test_a_missing_entry_of_the_config_is_named(copied: Path, key: str) -> None:
    edit(copied, **{key: None})
    assert key in refusal(copied)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def rename(path: Path) -> None:
    path.rename(path.with_name(path.name + ".bak"))


@pytest.mark.parametrize("damage", [Path.unlink, cut, empty, lengthen, rename])
def test_a_damaged_file_is_named(saved: Path, copied: Path, damage: Callable[[Path], None]) -> None:
    files = [p.relative_to(saved) for p in saved.rglob("*") if p.is_file()]
    files.remove(Path("config.json"))
    assert len(files) > 5 and Path("tokenizer/merges.txt") in files
    for file in files:
        if damage in (cut, empty) and (saved / file).stat().st_size == 0:
            continue
        damage(copied / file)
        message = refusal(copied)
        assert f"['{file}'] missing or of another size; convert it again" in message
        (copied / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(saved / file, copied / file)
    assert checkpoint.read_config(copied, TargetConfig)[0] == TARGET


def test_all_damaged_files_are_named(copied: Path) -> None:
    shutil.rmtree(copied / "params" / "state")
    message = refusal(copied)
    assert "params/state/_METADATA" in message and "params/state/manifest.ocdbt" in message


def test_files_of_others_do_not_matter(copied: Path) -> None:
    (copied / "README.md").write_text("# A model")
    (copied / "params" / "notes.txt").write_text("")
    assert_identical(load(copied, TargetConfig), TARGET_ARRAYS)


# In a process of its own: when one array fails, Orbax leaves the coroutines of the others behind,
# and Python warns of them later, in the middle of another test.
LOADS = """
import sys
from pathlib import Path
import jax
from peagle_jax import checkpoint
from peagle_jax.config import TargetConfig
from peagle_jax.models import Target

device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
for folder in map(Path, sys.argv[1:]):
    config, dtype = checkpoint.read_config(folder, TargetConfig)
    try:
        checkpoint.load(Target, folder, config, dtype, device)
    except checkpoint.CheckpointError as error:
        print(error)
    else:
        print("loaded")
"""


def outcomes_of_loading(*folders: Path, cwd: Path) -> list[str]:
    """Returns a line for each checkpoint."""
    path = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-P", "-c", LOADS, *map(str, folders)]
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


CHANGES: list[dict[str, Any]] = [
    {"intermediate_size": 40},
    {"intermediate_size": 56},
    {"num_layers": 2, "sliding_windows": [None] * 2},
    {"num_layers": 4, "sliding_windows": [None] * 4},
    {"tie_word_embeddings": True},
    {"mlp_bias": True},
]


def test_what_only_orbax_can_notice(saved: Path, tmp_path: Path) -> None:
    """Bytes changed in its metadata, and arrays that do not fit the config.

    A byte of a weight is not noticed: the stored arrays have no checksum.
    """
    folders = [saved]
    for name in ("_METADATA", "manifest.ocdbt"):
        folders.append(Path(shutil.copytree(saved, tmp_path / name)))
        path = folders[-1] / "params" / "state" / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x55
        path.write_bytes(content)
    for number, change in enumerate(CHANGES):
        folders.append(Path(shutil.copytree(saved, tmp_path / str(number))))
        header = json.loads((saved / "config.json").read_text())
        edit(folders[-1], config={**header["config"], **change})
    good, *bad = outcomes_of_loading(*folders, cwd=tmp_path)
    assert good == "loaded"
    for folder, line in zip(folders[1:], bad, strict=True):
        assert line.startswith(f"cannot load {folder / 'params'}: ")
        assert line.endswith("; convert the source checkpoint again")


def test_a_relative_path_will_do(saved: Path) -> None:
    assert outcomes_of_loading(Path("target"), cwd=saved.parent) == ["loaded"]


# What cannot be written


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lm_head": None}, r"missing \['lm_head'\], extra \[\]"),
        ({"score": jnp.ones(3)}, r"missing \[\], extra \['score'\]"),
        (
            {"embedding": jnp.ones((96, 16))},
            r"embedding is \(96, 16\), expected \(96, 32\)",
        ),
        ({"final_norm.weight": jnp.ones(32, "bfloat16")}, r"one dtype, got \['bfloat16', 'fl"),
    ],
)
def test_arrays_that_do_not_fit_are_not_written(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    arrays = {n: a for n, a in {**TARGET_ARRAYS, **changes}.items() if a is not None}
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(tmp_path / "out", TARGET, arrays)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for taken in (tmp_path / "full", tmp_path / "full" / "file"):
        with pytest.raises(CheckpointError, match=f"{taken} exists already: remove it or name an"):
            checkpoint.save(taken, TARGET, TARGET_ARRAYS)
    assert (tmp_path / "full" / "file").read_text() == "mine"
    assert [p.name for p in tmp_path.rglob("*")] == ["full", "file"]
    (tmp_path / "empty").mkdir()
    checkpoint.save(tmp_path / "empty", TARGET, TARGET_ARRAYS)
    assert checkpoint.is_native(tmp_path / "empty")


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


PLACES: list[tuple[Any, str]] = [
    (checkpoint.ocp, "save"),
    (checkpoint.shutil, "copyfile"),
    (checkpoint.Path, "write_text"),
    (checkpoint.os, "replace"),
]


@pytest.mark.parametrize(("module", "name"), PLACES, ids=[name for _, name in PLACES])
def test_a_full_disk_leaves_nothing(
    module: Any, name: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"merges.txt": saved / "tokenizer" / "merges.txt"}
    out = tmp_path / "models" / "out"
    real = getattr(module, name)

    def fail_late(*args: Any, **kwargs: Any) -> None:
        if name != "replace":
            real(*args, **kwargs)
        full_disk()

    with monkeypatch.context() as patched:
        patched.setattr(module, name, fail_late)
        with pytest.raises(CheckpointError, match=f"cannot write {out}: .*No space left"):
            checkpoint.save(out, TARGET, TARGET_ARRAYS, files)
    assert list(out.parent.iterdir()) == []
    with monkeypatch.context() as patched:
        patched.setattr(module, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(out, TARGET, TARGET_ARRAYS, files)
    assert list(out.parent.iterdir()) == []


def test_a_place_that_cannot_hold_folders(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "models" / "out"
    with pytest.raises(CheckpointError, match=f"cannot write {out}: .*Not a directory"):
        checkpoint.save(out, TARGET, TARGET_ARRAYS)


def test_leftovers_of_dead_runs_are_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    running = tmp_path / f".out.partial-{os.getpid()}-x"
    init = tmp_path / ".out.partial-1-x"  # runs always, and may belong to somebody else
    other = tmp_path / f".other.partial-{dead.pid}-x"
    stale = [tmp_path / f".out.partial-{dead.pid}-x", tmp_path / ".out.partial-x"]
    for folder in (running, init, other, *stale):
        (folder / "params").mkdir(parents=True)
        (folder / "params" / "file").touch()
    checkpoint.save(tmp_path / "out", TARGET, TARGET_ARRAYS)
    assert set(tmp_path.iterdir()) == {tmp_path / "out", running, init, other}
    assert (running / "params" / "file").exists()


def test_leftovers_of_another_users_run_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, signal: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refuse)
    (tmp_path / ".out.partial-7-x").mkdir()
    checkpoint.save(tmp_path / "out", TARGET, TARGET_ARRAYS)
    assert {p.name for p in tmp_path.iterdir()} == {"out", ".out.partial-7-x"}


def test_a_path_is_replaced_only_when_complete(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with checkpoint.atomic_directory(out) as partial:
        (partial / "file").touch()
        assert partial.parent == tmp_path and not out.exists()
    assert [p.name for p in out.iterdir()] == ["file"]
    assert list(tmp_path.iterdir()) == [out]


def test_a_run_that_was_slower_leaves_the_first_ones_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        pytest.raises(CheckpointError, match=f"cannot write {out}: .*not empty"),
        checkpoint.atomic_directory(out) as slow,
    ):
        (slow / "file").write_text("slow")
        with checkpoint.atomic_directory(out) as fast:
            (fast / "file").write_text("fast")
    assert (out / "file").read_text() == "fast"
    assert list(tmp_path.iterdir()) == [out]
