"""Reading a Hugging Face folder: its configs, and its weights one tensor at a time.

Safetensors are read with plain reads into buffers that exist already. Mapping them would be as
fast, but their pages would count as the process's memory beside the buffers they are copied to.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from peagle_jax.convert.errors import ConvertError, listed
from peagle_jax.convert.torch_files import load_torch_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"
# OpenAI's shards, which its own code reads without an index.
_OPENAI_SHARDS = "model--?????-of-?????.safetensors"
# Formats that hold weights too, for the message to somebody who has only those.
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".ckpt")
_DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
FLOATS = ("BF16", "F16", "F32")
_CHUNK_BYTES = 16 << 20
_TRANSPOSED_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor lies.

    Attributes:
      name: as in the file.
      dtype: safetensors code, such as "BF16".
      shape: axes.
      path: its file.
      offset: bytes from the start of the file; of a mapped tensor, of those before it.
      mapped: `[bytes]` uint8 where something else opened the file, None where it is to be read.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    mapped: np.ndarray | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return self.size * self._numpy_dtype().itemsize

    def chunks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Reads the tensor flat and in order, a few megabytes at a time.

        Yields:
          index of the first element, and elements `[n]` that are valid until the next chunk.

        Raises:
          ConvertError: the dtype is not supported, or the file cannot be read.
        """
        dtype = self._numpy_dtype()
        step = max(1, _CHUNK_BYTES // dtype.itemsize)
        buffer = np.empty(min(step, self.size), dtype)
        for start in range(0, self.size, step):
            part = buffer[: min(step, self.size - start)]
            self._read_bytes(part, start)
            yield start, part

    def read_into(self, out: np.ndarray) -> None:
        """Reads the tensor, cast to the dtype of `out`, without a second copy of it.

        Args:
          out: of `size` elements, which are filled in C order whatever its strides.

        Raises:
          ConvertError: as for `chunks`.
        """
        if not out.flags.c_contiguous:
            part = np.empty(out.shape[1:], self._numpy_dtype())
            for index in range(len(out)):
                self._read_bytes(part.reshape(-1), index * part.size)
                _copy(part, out[index])
            return
        flat = out.reshape(-1)
        if self._numpy_dtype() == out.dtype:
            self._read_bytes(flat, 0)
            return
        for start, part in self.chunks():
            flat[start : start + len(part)] = part

    def read(self) -> np.ndarray:
        """Returns the tensor in its own dtype and shape; for small ones.

        Raises:
          ConvertError: as for `chunks`.
        """
        out = np.empty(self.size, self._numpy_dtype())
        self._read_bytes(out, 0)
        return out.reshape(self.shape)

    def _numpy_dtype(self) -> np.dtype:
        if self.dtype not in _DTYPES:
            raise ConvertError(f"{self.path}: {self.name} has dtype {self.dtype}, not supported")
        return _DTYPES[self.dtype]

    def _read_bytes(self, out: np.ndarray, start: int) -> None:
        """Fills `out` with the tensor's elements from index `start` on."""
        if self.mapped is not None:
            first = start * out.itemsize
            out.view(np.uint8)[...] = self.mapped[first : first + out.nbytes]
            return
        left = memoryview(out.view(np.uint8)) if out.size else memoryview(b"")
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(self.offset + start * out.itemsize)
                while left:
                    count = file.readinto(left)
                    if not count:
                        raise ConvertError(f"{self.path} ends inside {self.name}")
                    left = left[count:]
        except OSError as error:
            raise ConvertError(f"cannot read {self.path}: {error}") from error


def _copy(values: np.ndarray, out: np.ndarray) -> None:
    """Copies an array, cast to the dtype of `out`, whose axes lie in another order.

    A few rows at a time, so that what is read and what is written fit a cache, and as integers,
    because NumPy copies a value of a foreign dtype by a function call: ten times as fast.
    """
    bits = f"u{out.itemsize}"
    for start in range(0, len(out), _TRANSPOSED_ROWS):
        rows = slice(start, start + _TRANSPOSED_ROWS)
        out[rows].view(bits)[...] = values[rows].astype(out.dtype, copy=False).view(bits)


@dataclasses.dataclass(frozen=True)
class Source:
    """A Hugging Face folder with its tensors' places, of which nothing is read yet.

    Attributes:
      folder: where it is.
      config: config.json.
      generation_config: generation_config.json, empty where there is none.
      tensors: by name.
    """

    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def config_path(self) -> Path:
        """For messages."""
        return self.folder / "config.json"

    @property
    def generation_config_path(self) -> Path:
        """For messages."""
        return self.folder / "generation_config.json"


def open_source(folder: Path) -> Source:
    """Reads a folder's configs and the headers of its weights.

    Safetensors are taken where there are any, else torch's `.bin` files.

    Raises:
      ConvertError: folder or files are missing, cut off or damaged, or torch is needed and not
        installed.
    """
    if not folder.is_dir():
        raise ConvertError(f"{folder}: no such folder")
    meta = sorted(path.name for path in folder.glob("consolidated.*.pth"))
    if meta and not any(folder.glob("*.safetensors")):
        raise ConvertError(
            f"{folder} holds Meta's own files ({listed(meta, 3)}), which this release does not "
            "read (queries and keys lie in another order): get the Hugging Face safetensors of the "
            "same model"
        )
    config = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    generation_config = _read_json(generation) if generation.exists() else {}
    return Source(folder, config, generation_config, _find_tensors(folder))


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file."""
    if not path.is_file():
        raise ConvertError(f"{path.parent} has no {path.name}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConvertError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise ConvertError(f"{path} must hold a JSON object")
    return values


def _find_tensors(folder: Path) -> dict[str, Tensor]:
    if (folder / SINGLE).exists():
        return _read_header(folder / SINGLE)
    if (folder / INDEX).exists():
        return _read_sharded(folder / INDEX, _read_header)
    if (folder / TORCH_SINGLE).exists():
        return _read_torch(folder / TORCH_SINGLE)
    if (folder / TORCH_INDEX).exists():
        return _read_sharded(folder / TORCH_INDEX, _read_torch)
    if any(folder.glob(_OPENAI_SHARDS)):
        return _read_openai(folder)
    others = sorted(p.name for p in folder.iterdir() if p.suffix in _OTHER_WEIGHTS)
    unknown = sorted(p.name for p in folder.glob("*.safetensors"))
    if others:
        raise ConvertError(
            f"{folder} has no {SINGLE}, only {listed(others, 3)}, which this release does not "
            "read: save the model again as safetensors"
        )
    found = f"; {listed(unknown, 3)} is not named as a whole model" if unknown else ""
    raise ConvertError(f"{folder} has neither {SINGLE} nor {INDEX}{found}")


def _read_sharded(index: Path, read: Callable[[Path], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the tensors of all shards; index and shards must name the same ones.

    Args:
      index: the file that says which shard holds which tensor.
      read: returns the tensors of one shard.

    Raises:
      ConvertError: index or shards are damaged, missing, or do not fit together.
    """
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConvertError(f"{index} has no weight_map")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ConvertError(f"{index}: {shard!r} is no file name in the folder")
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise ConvertError(f"{index} names files that are missing: {listed(missing)}")
    headers = {shard: read(index.parent / shard) for shard in shards}
    problems = [
        f"{name} is not in {shard}"
        for name, shard in sorted(weight_map.items())
        if name not in headers[shard]
    ]
    problems += [
        f"{name} in {shard} is not in the index"
        for shard, header in headers.items()
        for name in header
        if weight_map.get(name) != shard
    ]
    if problems:
        raise ConvertError(f"{index} does not fit its files: {listed(problems)}")
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _read_openai(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors of all shards `model--00001-of-0000N.safetensors`."""
    found = sorted(path.name for path in folder.glob(_OPENAI_SHARDS))
    count = found[0].removesuffix(".safetensors")[-5:]
    every = [
        f"model--{i:05}-of-{count}.safetensors"
        for i in range(1, 1 + (int(count) if count.isdigit() else 0))
    ]
    if found != every:
        differ = sorted(set(found) ^ set(every))
        raise ConvertError(f"{folder}: shards are missing or left over: {listed(differ)}")
    tensors: dict[str, Tensor] = {}
    for name in found:
        header = _read_header(folder / name)
        twice = sorted(set(header) & set(tensors))
        if twice:
            raise ConvertError(f"{folder / name} repeats tensors of another shard: {listed(twice)}")
        tensors |= header
    return tensors


def _read_header(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of one file.

    The safetensors library checks the header against the file first: offsets without gaps or
    overlaps, sizes that fit the shapes, and a file that is neither cut off nor too long.

    Raises:
      ConvertError: it is no whole safetensors file.
    """
    try:
        with safe_open(path, framework="numpy"):
            pass
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except (OSError, ValueError, SafetensorError) as error:
        raise ConvertError(
            f"{path} is cut off or damaged ({error}); download or save it again"
        ) from error
    header.pop("__metadata__", None)
    return {
        name: Tensor(
            name=name,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            path=path,
            offset=8 + length + entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }


def _read_torch(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of one file of torch's."""
    tensors: dict[str, Tensor] = {}
    offset = 0
    for name, value in load_torch_file(path).items():
        tensors[name] = Tensor(name, value.dtype, value.shape, path, offset, value.mapped)
        offset += value.mapped.nbytes
    return tensors
