"""From what a user names to a loaded model: folders, the cache of conversions, the hub."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import jax
import numpy as np
import pytest
from conftest import GOLDEN
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

import peagle_jax
from peagle_jax import checkpoint, convert, load
from peagle_jax.load import LoadError

HF_TARGET = GOLDEN / "targets" / "llama_gqa"
HF_DRAFTER = GOLDEN / "drafters" / "norm_before_fc"


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native target, stored in bfloat16."""
    folder = tmp_path_factory.mktemp("native") / "target"
    convert.to_native(HF_TARGET, folder, dtype="bfloat16", progress=False)
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("PEAGLE_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The sources converted so far."""
    sources = []

    def counted(real: Any) -> Any:
        def count(source: Path, *args: Any, **kwargs: Any) -> Any:
            sources.append(source)
            return real(source, *args, **kwargs)

        return count

    for name in ("convert_target", "convert_drafter"):
        monkeypatch.setattr(convert, name, counted(getattr(convert, name)))
    return sources


def test_a_damaged_cached_conversion_is_made_again(source: Path, conversions: list[Path]) -> None:
    first = peagle_jax.load_target(source)
    for damage in (
        lambda: (first.path / "params" / "_CHECKPOINT_METADATA").write_bytes(b""),
        lambda: (first.path / "config.json").write_text("{"),
        lambda: (first.path / "config.json").unlink(),
    ):
        damage()
        again = peagle_jax.load_target(source)
        assert (again.path, again.config) == (first.path, first.config)
    assert len(conversions) == 4


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A Hugging Face folder that may be changed."""
    folder = tmp_path / "hf"
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copyfile(HF_TARGET / name, folder / name)
    return folder


def bits(loaded: Any) -> list[tuple[Any, bytes]]:
    return [(a.dtype, np.asarray(a).tobytes()) for a in jax.tree.leaves(loaded.weights)]


# Folders


@pytest.mark.parametrize("kind", [str, Path])
def test_a_native_folder_is_loaded_where_it_is(
    kind: type, native: Path, conversions: list[Path], cache: Path
) -> None:
    loaded = peagle_jax.load_target(kind(native))
    assert loaded.path == native
    assert loaded.config.family == "llama" and loaded.config.num_layers == 4
    assert loaded.tokenizer is None
    assert conversions == [] and not cache.exists()


def test_a_hugging_face_folder_is_converted_once(
    source: Path, conversions: list[Path], cache: Path
) -> None:
    first = peagle_jax.load_target(source)
    assert conversions == [source]
    assert first.path.parent == cache / "models" and first.path.name.startswith("hf-")
    assert checkpoint.is_native(first.path)
    again = peagle_jax.load_target(str(source))
    assert conversions == [source]
    assert again.path == first.path and bits(again) == bits(first)
    assert list(first.path.parent.iterdir()) == [first.path]


def test_a_changed_source_is_converted_again(source: Path, conversions: list[Path]) -> None:
    first = peagle_jax.load_target(source)
    path = source / "generation_config.json"
    times = path.stat()
    changed = json.loads(path.read_text()) | {"eos_token_id": [2, 11]}
    path.write_text(json.dumps(changed))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # the size is enough
    second = peagle_jax.load_target(source)
    assert len(conversions) == 2 and first.path != second.path
    assert (first.config.eos_token_ids, second.config.eos_token_ids) == ((2,), (2, 11))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))  # so is the time
    assert peagle_jax.load_target(source).path not in (first.path, second.path)
    (source / "special_tokens_map.json").write_text("{}")  # and another file
    peagle_jax.load_target(source)
    assert len(conversions) == 4


def test_two_folders_of_one_name_do_not_mix(source: Path, tmp_path: Path) -> None:
    """Nor if their files have the same sizes and times."""
    loaded = []
    for parent, eos in (("a", 2), ("b", 3)):
        folder = Path(shutil.copytree(source, tmp_path / parent / "model"))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        for file in folder.iterdir():
            os.utime(file, ns=(0, 0))
        loaded.append(peagle_jax.load_target(folder))
    assert [3 in target.config.eos_token_ids for target in loaded] == [False, True]
    assert loaded[0].path != loaded[1].path


def test_a_drafter_is_converted_for_the_depth_of_its_target(
    tmp_path: Path, conversions: list[Path]
) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    shutil.copyfile(HF_DRAFTER / "model.safetensors", folder / "model.safetensors")
    config = json.loads((HF_DRAFTER / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(convert.ConvertError):
        peagle_jax.load_drafter(folder)
    found = [peagle_jax.load_drafter(folder, target_layers=n) for n in (8, 12, 8)]
    assert found[0].config.aux_boundaries != found[1].config.aux_boundaries
    assert found[0].path == found[2].path
    assert len(conversions) == 3  # the failed one too


def test_a_failed_conversion_leaves_nothing(source: Path, cache: Path) -> None:
    (source / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(convert.ConvertError, match=r"model\.safetensors"):
        peagle_jax.load_target(source)
    assert not cache.exists() or not any((cache / "models").iterdir())


def test_two_first_loads_at_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process finishes its conversion while this one still writes."""
    real = checkpoint._write_arrays

    def slow(*args: Any) -> None:
        monkeypatch.setattr(checkpoint, "_write_arrays", real)
        peagle_jax.load_target(source)
        real(*args)

    monkeypatch.setattr(checkpoint, "_write_arrays", slow)
    loaded = peagle_jax.load_target(source)
    assert list(loaded.path.parent.iterdir()) == [loaded.path]


def test_the_other_kind_is_refused(native: Path) -> None:
    with pytest.raises(ValueError, match="holds a target, not a drafter"):
        peagle_jax.load_drafter(native)
    with pytest.raises(ValueError, match="holds a drafter, not a target"):
        peagle_jax.load_target(HF_DRAFTER)


@pytest.mark.parametrize(
    "name", ["nowhere", "./no/where", "/no/where", "~/no/where", "a/b/c", "../no/where", "", "a\0b"]
)
def test_no_such_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[Path]
) -> None:
    """Nothing of this is asked of the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    message = "is empty" if name == "" else f"{name}: no such folder"
    for load_it in (peagle_jax.load_target, peagle_jax.load_drafter):
        with pytest.raises(ValueError) as error:
            load_it(name)
        assert message in str(error.value)


def test_a_file_is_no_folder(native: Path) -> None:
    with pytest.raises(LoadError, match=r"config\.json is a file; name the folder"):
        peagle_jax.load_target(native / "config.json")


def test_a_name_that_cannot_be_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LoadError, match="no such folder"):
        peagle_jax.load_target("a" * 300)


# The hub


class Hub:
    """Stands in for `snapshot_download`."""

    def __init__(self, answer: Path | Exception):
        self.answer = answer
        self.calls: list[str] = []

    def __call__(self, repo_id: str, **patterns: list[str]) -> str:
        self.calls.append(repo_id)
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


class Repository:
    """Stands in for `snapshot_download` of a repository, which fetches what is not there yet."""

    def __init__(self, files: dict[str, bytes], snapshot: Path):
        self.files, self.snapshot = files, snapshot
        self.fetched: list[str] = []

    def __call__(
        self, repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        for name in filter_repo_objects(
            self.files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            path = self.snapshot / name
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.files[name])
                self.fetched.append(name)
        return str(self.snapshot)


def test_a_hub_id_is_downloaded(
    source: Path, native: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[Path]
) -> None:
    hub = Hub(source)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    loaded = peagle_jax.load_target("somebody/model")
    assert conversions == [source]
    assert bits(loaded) == bits(peagle_jax.load_target(source))
    hub.answer = native
    assert peagle_jax.load_target("somebody/native").path == native
    assert hub.calls == ["somebody/model", "somebody/native"]
    assert conversions == [source]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """The target as GPT-OSS and Llama are published: the whole model in several formats."""
    files = {path.name: path.read_bytes() for path in HF_TARGET.iterdir()}
    copies = (
        "original/model.safetensors",
        "original/config.json",
        "original/dtypes.json",
        "original/consolidated.00.pth",
        "metal/model.bin",
        "metal/config.json",
        "onnx/pytorch_model.bin",
        "pytorch_model.bin",
        "training_args.bin",
        "README.md",
    )
    published = Repository(files | dict.fromkeys(copies, b"{}"), tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", published)
    return published


def test_safetensors_go_before_every_other_copy(repository: Repository) -> None:
    peagle_jax.load_target("somebody/model")
    wanted = {"config.json", "generation_config.json", "model.safetensors"}
    assert sorted(repository.fetched) == sorted(wanted & set(repository.files))


@pytest.mark.parametrize("shards", [1, 2])
def test_torch_files_are_fetched_only_without_safetensors(
    shards: int, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["pytorch_model.bin"]
    if shards == 2:
        files = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
        names = [*files, "pytorch_model.bin.index.json"]
    for name in ("model.safetensors", "pytorch_model.bin"):
        del repository.files[name]
    repository.files |= dict.fromkeys(names, b"{}")
    read = []

    def convert_target(folder: Path, destination: Path) -> None:
        read.append({path.name for path in folder.iterdir()})
        convert.to_native(HF_TARGET, destination, progress=False)

    monkeypatch.setattr(convert, "convert_target", convert_target)
    for _ in range(2):
        peagle_jax.load_target("somebody/model")
    (there,) = read
    assert set(names) <= there
    assert "training_args.bin" not in there and not any(
        name.startswith(("original", "metal", "onnx")) for name in repository.fetched
    )
    assert len(repository.fetched) == len(set(repository.fetched)) == len(there)


def test_a_native_repository_is_fetched_whole(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: (native / name).read_bytes() for name in everything(native)}
    published = Repository(files, tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", published)
    assert peagle_jax.load_target("somebody/native").path == published.snapshot
    assert sorted(published.fetched) == sorted(files)


def test_a_folder_goes_before_the_hub(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some").mkdir()
    source.rename(tmp_path / "some" / "model")
    assert peagle_jax.load_target("some/model").config.num_layers == 4


RESPONSE: Any = SimpleNamespace(headers={}, request=None, status_code=404)


@pytest.mark.parametrize(
    "failure",
    [
        LocalEntryNotFoundError("cannot find it\nand more lines"),
        HfHubHTTPError("404 Client Error: cannot find it\nand more lines", response=RESPONSE),
        ConnectionError("cannot find it"),
        OSError(28, "cannot find it"),
    ],
)
def test_a_failing_hub_is_one_error(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(failure))
    for load_it in (peagle_jax.load_target, peagle_jax.load_drafter):
        with pytest.raises(LoadError) as error:
            load_it("somebody/model")
        message = str(error.value)
        assert message.startswith("somebody/model: no such folder, and the Hugging Face hub did")
        assert "cannot find it" in message
        assert message.endswith("; name a folder, or check the id and the network")
        assert "\n" not in message


@pytest.mark.parametrize("name", ["somebody/model", "some body/mo del"])
def test_offline_and_impossible_ids(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real client, which makes no connection here."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(LoadError) as error:
        peagle_jax.load_target(name)
    assert str(error.value).startswith(f"{name}: no such folder, and the Hugging Face hub did not")
    assert "\n" not in str(error.value)


def everything(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_all_that_a_hugging_face_checkpoint_needs_is_downloaded() -> None:
    for folder in (*(GOLDEN / "targets").iterdir(), *(GOLDEN / "drafters").iterdir()):
        needed = everything(folder) - {"golden.npz"}
        assert set(filter_repo_objects(needed, allow_patterns=load.HUB_PATTERNS)) == needed
    needed = {"tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja"}
    assert set(filter_repo_objects(needed, allow_patterns=load.HUB_PATTERNS)) == needed
    useless = {"model.onnx", "pytorch_model.bin", "README.md", "model.gguf", "flax_model.msgpack"}
    assert set(filter_repo_objects(useless, allow_patterns=load.HUB_PATTERNS)) == set()


def test_all_that_a_native_checkpoint_needs_is_downloaded(source: Path, tmp_path: Path) -> None:
    names = ["tokenizer.json", "merges.txt", "vocab.json", "tokenizer.model", "chat_template.jinja"]
    for name in names:
        (source / name).write_text("")
    convert.to_native(source, tmp_path / "native", progress=False)
    needed = everything(tmp_path / "native")
    assert {f"tokenizer/{name}" for name in names} < needed
    assert set(filter_repo_objects(needed, allow_patterns=load.HUB_PATTERNS)) == needed


# Dtypes and the cache folder


@pytest.mark.parametrize(
    ("backend", "asked", "given"),
    [
        ("cpu", None, "float32"),
        ("gpu", None, "bfloat16"),  # as stored
        ("cpu", "bfloat16", "bfloat16"),
        ("gpu", "float32", "float32"),
    ],
)
def test_dtypes(
    backend: str, asked: str | None, given: str, native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = peagle_jax.load_target(native, dtype="bfloat16")
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    loaded = peagle_jax.load_target(native, dtype=asked)
    monkeypatch.undo()
    assert {str(dtype) for dtype, _ in bits(loaded)} == {given}
    for value, wanted in zip(*(jax.tree.leaves(m.weights) for m in (loaded, stored)), strict=True):
        np.testing.assert_array_equal(np.asarray(value), np.asarray(wanted).astype(given))


@pytest.mark.parametrize("dtype", ["float16", "int8", "", "fp32"])
def test_an_unknown_dtype_is_refused(dtype: str, native: Path) -> None:
    with pytest.raises(LoadError, match=f"dtype '{dtype}' is not supported; use float32 or bfl"):
        peagle_jax.load_target(native, dtype=dtype)


def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named, base, home = (str(tmp_path / name) for name in ("named", "base", "home"))
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    monkeypatch.setenv("PEAGLE_JAX_CACHE", named)
    assert load.cache_folder() == Path(named)
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("PEAGLE_JAX_CACHE")
        else:
            monkeypatch.setenv("PEAGLE_JAX_CACHE", unset)
        assert load.cache_folder() == Path(base) / "peagle_jax"
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("XDG_CACHE_HOME")
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert load.cache_folder() == Path(home) / ".cache" / "peagle_jax"
