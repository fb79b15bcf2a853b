"""Writing safetensors files from native arrays, a few arrays at a time.

The safetensors library wants all tensors of a file in memory at once. Its format is a JSON header
followed by the tensors' bytes, so they are written as they come instead.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from peagle_jax.convert.plan import Slot
from peagle_jax.convert.source import INDEX, SINGLE

_READ_BYTES = 64 << 20  # small arrays are read together, because every read has its cost
_HEADER_ALIGNMENT = 8
_CODES = {
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.float32): "F32",
    np.dtype(np.int64): "I64",
    np.dtype(np.bool_): "BOOL",
    np.dtype(np.uint8): "U8",
}

ReadArrays = Callable[[Sequence[str]], Mapping[str, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Piece:
    """One tensor to be written.

    Attributes:
      name: in the file.
      shape: in the file.
      dtype: in the file, that of the native array or of the value.
      source: the part of a native array that it is, or its value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    source: Slot | np.ndarray

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def native(self) -> str:
        """Name of the native array that it is a part of; empty if it has a value."""
        return self.source.native if isinstance(self.source, Slot) else ""

    def parts(self, arrays: Mapping[str, np.ndarray]) -> Iterator[np.ndarray]:
        """Yields its elements in order, without copying more than one expert's at a time."""
        if isinstance(self.source, np.ndarray):
            yield np.ascontiguousarray(self.source)
            return
        view = self.source.view(arrays[self.source.native])
        if view.flags.c_contiguous:
            yield view
        else:
            yield from map(np.ascontiguousarray, view)


def assign_files(pieces: Sequence[Piece], most_bytes: int) -> dict[str, list[Piece]]:
    """Decides which tensors go in which file, named as transformers names them.

    Pieces of one native array stay together, so that none is read twice; a file is closed when
    the next tensor would make it larger than `most_bytes`.

    Returns:
      the pieces of each file, in the order of the pieces.
    """
    order = {name: i for i, name in enumerate(dict.fromkeys(p.native for p in pieces))}
    files: list[list[Piece]] = [[]]
    size = 0
    for piece in sorted(pieces, key=lambda p: order[p.native]):
        if files[-1] and size + piece.nbytes > most_bytes:
            files.append([])
            size = 0
        files[-1].append(piece)
        size += piece.nbytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    stem, suffix = SINGLE.split(".")
    names = (f"{stem}-{i:05}-of-{len(files):05}.{suffix}" for i in range(1, len(files) + 1))
    return dict(zip(names, files, strict=True))


def write_files(
    folder: Path,
    files: Mapping[str, Sequence[Piece]],
    native_bytes: Mapping[str, int],
    read: ReadArrays,
    written: Callable[[int], object],
) -> None:
    """Writes safetensors files, and their index where there are several.

    Args:
      folder: where to.
      files: tensors by file, as `assign_files` returns them.
      native_bytes: size of every native array.
      read: returns native arrays by name.
      written: is told how many bytes have been written since the last time.

    Raises:
      OSError: the disk is full or fails.
    """
    arrays: dict[str, np.ndarray] = {}
    # Within a file larger elements come first, so that each tensor is aligned to its elements.
    ordered = {
        name: sorted(pieces, key=lambda p: -p.dtype.itemsize) for name, pieces in files.items()
    }
    names = list(dict.fromkeys(p.native for every in ordered.values() for p in every if p.native))
    for file_name, pieces in ordered.items():
        with open(folder / file_name, "wb") as file:
            file.write(_header(pieces))
            for piece in pieces:
                if piece.native and piece.native not in arrays:
                    arrays.clear()  # before the next ones are read
                    arrays.update(read(_small_together(names, native_bytes, piece.native)))
                for part in piece.parts(arrays):
                    file.write(part.reshape(-1).view(np.uint8).data)
                    written(part.nbytes)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(p.nbytes for every in files.values() for p in every)},
            "weight_map": {p.name: name for name, every in files.items() for p in every},
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / INDEX).write_text(text, encoding="utf-8")


def _small_together(names: list[str], sizes: Mapping[str, int], wanted: str) -> list[str]:
    """Returns `wanted` and those after it in the list that are small together."""
    batch = [wanted]
    total = sizes[wanted]
    for name in names[names.index(wanted) + 1 :]:
        total += sizes[name]
        if total > _READ_BYTES:
            break
        batch.append(name)
    return batch


def _header(pieces: Sequence[Piece]) -> bytes:
    """Returns the header of a file of these tensors, in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in pieces:
        start, end = end, end + piece.nbytes
        entries[piece.name] = {
            "dtype": _CODES[piece.dtype],
            "shape": piece.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
