"""Folders that are not whole: one clear error each, that names the file."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from convert_sources import LLAMA, target_tensors, write
from safetensors.numpy import load_file, save_file

from peagle_jax.convert import ConvertError, convert_target
from peagle_jax.convert import source as source_module
from peagle_jax.convert.source import open_source

TENSORS = target_tensors(LLAMA)
INDEX = "model.safetensors.index.json"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write(tmp_path / "hf", LLAMA, TENSORS)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write(tmp_path / "hf", LLAMA, TENSORS, shards=3)


def refused(folder: Path, message: str) -> None:
    """The error must come from the converter's entry, and nothing may be left behind."""
    destination = folder.parent / "out"
    with pytest.raises(ConvertError, match=message):
        convert_target(folder, destination)
    assert not destination.exists()
    assert not list(folder.parent.glob(".out*"))


def test_no_folder(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere: no such folder")


def test_a_file_is_no_folder(single: Path) -> None:
    refused(single / "config.json", "no such folder")


def test_no_config(single: Path) -> None:
    (single / "config.json").unlink()
    refused(single, r"has no config\.json")


@pytest.mark.parametrize("text", ['{"model_type": ', "", "\xff", "[1, 2]", "null"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_bad_json(text: str, name: str, single: Path) -> None:
    (single / name).write_bytes(text.encode("latin-1"))
    refused(single, rf"/{name}")


def test_no_weights(single: Path) -> None:
    (single / "model.safetensors").unlink()
    refused(single, r"has neither model\.safetensors nor")


def test_only_an_adapter(single: Path) -> None:
    (single / "model.safetensors").rename(single / "adapter_model.safetensors")
    refused(single, r"adapter_model\.safetensors is not named as a whole model")


@pytest.mark.parametrize("name", ["model.bin", "model.pth", "model.gguf"])
def test_other_formats_are_named(name: str, single: Path) -> None:
    (single / "model.safetensors").rename(single / name)
    refused(single, rf"{name}.*does not read.*safetensors")


def cut(data: bytes) -> bytes:
    return data[:-1]


def cut_in_the_header(data: bytes) -> bytes:
    return data[:50]


def empty(data: bytes) -> bytes:
    return b""


def too_long(data: bytes) -> bytes:
    return data + b"\0"


def huge_header(data: bytes) -> bytes:
    return struct.pack("<Q", 1 << 60) + data[8:]


def header_is_no_json(data: bytes) -> bytes:
    return data[:8] + b"x" + data[9:]


def shape_does_not_fit(data: bytes) -> bytes:
    return data.replace(b'"shape":[16]', b'"shape":[17]', 1)


@pytest.mark.parametrize(
    "damage",
    [
        *(cut, cut_in_the_header, empty, too_long, huge_header, header_is_no_json),
        shape_does_not_fit,
    ],
)
@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_damaged_safetensors(
    damage: Callable[[bytes], bytes], layout: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(layout)
    path = sorted(folder.glob("*.safetensors"))[-1]
    data = damage(path.read_bytes())
    assert data != path.read_bytes()
    path.write_bytes(data)
    refused(folder, rf"{path.name} is cut off or damaged")


def test_a_git_lfs_pointer_is_no_safetensors(single: Path) -> None:
    (single / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    refused(single, r"model\.safetensors is cut off or damaged")


def test_a_file_that_shrinks_after_its_header_was_read(single: Path) -> None:
    source = open_source(single)
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    last = max(source.tensors.values(), key=lambda t: t.offset)
    with pytest.raises(ConvertError, match=rf"ends inside {last.name}"):
        last.read()


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00001-of-00003.safetensors").unlink()
    refused(sharded, r"names files that are missing: model-00001-of-00003\.safetensors")


def test_tensor_absent_from_its_shard(sharded: Path) -> None:
    path = sharded / "model-00002-of-00003.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, path)
    refused(sharded, rf"{name} is not in {path.name}")


def test_tensor_that_the_index_does_not_name(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    shard = index["weight_map"].pop("model.norm.weight")
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, rf"model\.norm\.weight in {shard} is not in the index")


@pytest.mark.parametrize("weight_map", [None, {}, [1]])
def test_index_without_a_map(weight_map: object, sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(sharded, "has no weight_map")


@pytest.mark.parametrize("shard", ["../hf/model-00001-of-00003.safetensors", "/etc/passwd", 3])
def test_index_may_not_lead_out_of_the_folder(shard: object, sharded: Path) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": shard}}))
    refused(sharded, "is no file name in the folder")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.bool_])
def test_reading_in_its_own_dtype(dtype: type, tmp_path: Path) -> None:
    values = np.arange(12).reshape(3, 4).astype(dtype)
    source = open_source(write(tmp_path, LLAMA, {"x": values, "y": values[:, :1].copy()}))
    assert source.tensors["x"].read().dtype == values.dtype
    assert source.tensors["x"].read().tobytes() == values.tobytes()


def test_reading_in_chunks_and_casting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_CHUNK_BYTES", 1000)
    values = np.random.default_rng(0).standard_normal((3, 401), np.float32).astype(np.float16)
    source = open_source(write(tmp_path, LLAMA, {"a": np.ones(3, np.float16), "x": values}))
    assert [start for start, _ in source.tensors["x"].chunks()] == [0, 500, 1000]
    out = np.empty(values.size, np.float32)
    source.tensors["x"].read_into(out)
    np.testing.assert_array_equal(out, values.astype(np.float32).reshape(-1))
