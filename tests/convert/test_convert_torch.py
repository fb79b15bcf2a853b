"""Torch's `.bin` files: what torch is asked for, and every way in which they cannot be read.

Torch is no part of the test environment; a stand-in module with the few names that are used takes
its place. Real files were read once by hand.
"""

import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from convert_sources import (
    BF16,
    LLAMA,
    PEAGLE,
    Tensors,
    assert_identical,
    drafter_tensors,
    expected_drafter,
    expected_target,
    read_native,
    target_tensors,
    write,
)
from safetensors.numpy import save_file

from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.convert import ConvertError, convert_drafter, convert_target
from peagle_jax.convert.source import open_source


class StandIn:
    """A torch tensor, as far as the reader uses one."""

    def __init__(self, values: np.ndarray):
        self.values = values
        self.shape = values.shape
        self.dtype = f"torch.{values.dtype.name}"

    def detach(self) -> "StandIn":
        return self

    def contiguous(self) -> "StandIn":
        return StandIn(np.ascontiguousarray(self.values))

    def reshape(self, size: int) -> "StandIn":
        return StandIn(self.values.reshape(size))

    def view(self, dtype: str) -> "StandIn":
        assert dtype == "torch.uint8" and self.values.flags.c_contiguous
        return StandIn(self.values.view(np.uint8))

    def numpy(self) -> np.ndarray:
        assert self.dtype == "torch.uint8", "NumPy has no bfloat16"
        return self.values


Load = Callable[..., Any]


def install(monkeypatch: pytest.MonkeyPatch, load: Load) -> None:
    """Puts a stand-in for torch in place."""
    torch: Any = types.ModuleType("torch")
    torch.load, torch.Tensor, torch.uint8 = load, StandIn, "torch.uint8"
    monkeypatch.setitem(sys.modules, "torch", torch)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the stand-in returns for each file name; it may be read in one way only."""
    held: dict[str, Any] = {}

    def load(path: Path, **options: Any) -> Any:
        assert options == {"map_location": "cpu", "weights_only": True, "mmap": True}
        value = held[path.name]
        if isinstance(value, Exception):
            raise value
        return value

    install(monkeypatch, load)
    return held


def put(folder: Path, held: dict[str, Any], name: str, tensors: Tensors) -> None:
    (folder / name).write_bytes(b"a pickle")
    held[name] = {key: StandIn(value) for key, value in tensors.items()}


def folder_without_weights(folder: Path, config: dict[str, Any]) -> Path:
    write(folder, config, {"fc.weight": np.ones(1, np.float32)})
    (folder / "model.safetensors").unlink()
    return folder


def test_head_in_pytorch_model_bin(files: dict[str, Any], tmp_path: Path) -> None:
    tensors = drafter_tensors()
    tensors["fc.weight"] = np.asfortranarray(tensors["fc.weight"])  # a view with strides
    put(folder_without_weights(tmp_path / "hf", PEAGLE), files, "pytorch_model.bin", tensors)
    convert_drafter(tmp_path / "hf", tmp_path / "out")
    arrays = read_native(tmp_path / "out", DrafterConfig)[1]
    assert_identical(arrays, expected_drafter(tensors, 2, "midlayer"))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_target_in_shards(dtype: Any, files: dict[str, Any], tmp_path: Path) -> None:
    tensors = {name: value.astype(dtype) for name, value in target_tensors(LLAMA).items()}
    folder = write(tmp_path / "hf", LLAMA, tensors, shards=2)
    for shard, file in enumerate(sorted(folder.glob("*.safetensors"))):
        names = list(tensors)[shard::2]
        put(folder, files, f"{file.stem}.bin", {name: tensors[name] for name in names})
        file.unlink()
    index = folder / "model.safetensors.index.json"
    text = index.read_text().replace(".safetensors", ".bin")
    (folder / "pytorch_model.bin.index.json").write_text(text)
    index.unlink()
    convert_target(folder, tmp_path / "out")
    stored = {n: v if dtype == BF16 else v.astype(np.float32) for n, v in tensors.items()}
    arrays = read_native(tmp_path / "out", TargetConfig)[1]
    assert_identical(arrays, expected_target(stored, 2))


def test_safetensors_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: Path, **options: Any) -> Any:
        raise AssertionError(f"{path} was read")

    install(monkeypatch, load)
    folder = write(tmp_path / "hf", LLAMA, target_tensors(LLAMA))
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    assert open_source(folder).tensors.keys() == target_tensors(LLAMA).keys()


def test_without_torch_the_error_names_extra_and_alternative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import then fails as if it were not there
    folder = folder_without_weights(tmp_path / "hf", PEAGLE)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    with pytest.raises(
        ConvertError, match=r"model\.bin .*install peagle-jax\[torch\], or save .* as safetensors"
    ):
        convert_drafter(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("the pickle was run",))


def test_a_pickle_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    folder = folder_without_weights(tmp_path / "hf", PEAGLE)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(ConvertError, match="torch"):
        open_source(folder)


@pytest.mark.parametrize(
    ("held", "named"),
    [
        (pickle.UnpicklingError("Weights only load failed.\nIn two ways"), "more than tensors"),
        (
            RuntimeError("PytorchStreamReader failed\nmore"),
            r"cut off, .*\(PytorchStream.* failed\)",
        ),
        (OSError("no permission"), r"\(no permission\)"),
        ([1], "holds a list, not a dictionary"),
        ({"step": 3, "x": StandIn(np.ones(1))}, "no tensors: 'step'; save the model's state_dict"),
        ({"state_dict": {}}, "no tensors: 'state_dict'"),
    ],
)
def test_files_that_are_no_state_dict(
    held: Any, named: str, files: dict[str, Any], tmp_path: Path
) -> None:
    folder = folder_without_weights(tmp_path / "hf", PEAGLE)
    put(folder, files, "pytorch_model.bin", {})
    files["pytorch_model.bin"] = held
    with pytest.raises(ConvertError, match=rf"pytorch_model\.bin.*{named}") as caught:
        open_source(folder)
    assert "\n" not in str(caught.value)


def test_a_dtype_that_is_not_read_is_named(files: dict[str, Any], tmp_path: Path) -> None:
    tensors = drafter_tensors()
    tensors["norm.weight"] = tensors["norm.weight"].astype(np.float64)
    put(folder_without_weights(tmp_path / "hf", PEAGLE), files, "pytorch_model.bin", tensors)
    with pytest.raises(ConvertError, match=r"norm\.weight is torch\.float64, expected BF16"):
        convert_drafter(tmp_path / "hf", tmp_path / "out")


def test_a_shard_that_lacks_a_tensor(files: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_without_weights(tmp_path / "hf", PEAGLE)
    put(folder, files, "pytorch_model-00001-of-00001.bin", {"a": np.ones(1, np.float32)})
    index = '{"weight_map": {"b": "pytorch_model-00001-of-00001.bin"}}'
    (folder / "pytorch_model.bin.index.json").write_text(index)
    with pytest.raises(ConvertError, match=r"b is not in .*a in .* is not in the index"):
        open_source(folder)


def test_other_safetensors_do_not_hide_the_bin(files: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_without_weights(tmp_path / "hf", PEAGLE)
    put(folder, files, "pytorch_model.bin", drafter_tensors())
    save_file({"x": np.ones(1, np.float32)}, folder / "adapter_model.safetensors")
    assert "x" not in open_source(folder).tensors
