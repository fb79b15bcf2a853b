"""What the target makes of a packed row: the features to draft from and the states to answer with.

They are computed row by row by one compiled program, whether while training (online) or before it
into a folder (offline), so that in float32 both train on the same numbers, bit for bit.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from peagle_jax.models import Frozen, Target
from peagle_jax.training.cod import Elements
from peagle_jax.training.flat import PackedRow
from peagle_jax.training.folders import DataError, claim, exclusive, holds, into_place, read_json
from peagle_jax.training.identity import identity
from peagle_jax.training.mask import Rows, among
from peagle_jax.training.packing import PackedRows, TokenRow

NAME = "features.json"
# Rows whose features share a file.
ROWS_PER_FILE = 64

Arrays = tuple[jax.Array | np.ndarray, jax.Array | np.ndarray]


@functools.partial(jax.jit, static_argnames="aux_boundaries")
def read_row(
    target: Frozen[Target], row: TokenRow, aux_boundaries: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Runs the target over a packed row, each document by itself.

    Args:
      target: the model.
      row: S tokens.
      aux_boundaries: what makes a feature.

    Returns:
      features `[S, F]`, and the residual streams after the last layer `[S, H]`, before the final
      norm.
    """
    length = row.tokens.shape[0]
    anchors = jnp.arange(length, dtype=jnp.int32)
    documents = jnp.asarray(row.document_ids)
    elements = Elements(anchors, jnp.zeros_like(anchors), documents >= 0)
    attend = among(Rows.of(elements, documents))
    tokens, positions = jnp.asarray(row.tokens)[None], jnp.asarray(row.positions)[None]
    states, features, _ = target.merge()(tokens, positions, attend, aux_boundaries)
    assert features is not None
    return features[0], states[0]


@jax.jit
def shifted(row: TokenRow, features: jax.Array, states: jax.Array) -> PackedRow:
    """Pairs each token with the feature before it; a document's last place becomes padding.

    Args:
      row: S tokens.
      features: `[S, F]`, of the same places.
      states: `[S, H]`, of the same places.
    """
    ids = jnp.asarray(row.document_ids)
    following = functools.partial(jnp.roll, shift=-1, axis=0)
    goes_on = (ids >= 0) & (ids == following(ids)) & (jnp.arange(ids.shape[0]) < ids.shape[0] - 1)
    return PackedRow(
        tokens=following(jnp.asarray(row.tokens)),
        features=features,
        states=following(states),
        loss_mask=following(jnp.asarray(row.loss_mask)) & goes_on,
        document_ids=jnp.where(goes_on, ids, -1),
    )


@dataclasses.dataclass(frozen=True)
class Online:
    """Makes the features of packed rows when they are asked for.

    Attributes:
      rows: the rows.
      target: the model.
      aux_boundaries: what makes a feature.
    """

    rows: PackedRows
    target: Frozen[Target]
    aux_boundaries: tuple[int, ...]

    def __call__(self, index: int) -> Arrays:
        """Returns features and states of one row."""
        return read_row(self.target, self.rows[index], self.aux_boundaries)


class Stored:
    """Reads the features of packed rows from a folder that `write_features` made.

    Args:
      folder: the folder.
      rows: the rows that they are of.
      target: the model that they are of.
      aux_boundaries: what makes a feature.

    Raises:
      DataError: the folder holds features of other rows, boundaries or target, lacks some, or is
        damaged.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rows: PackedRows,
        target: Frozen[Target],
        aux_boundaries: tuple[int, ...],
    ):
        self._folder, self.rows = Path(folder), rows
        if not (self._folder / NAME).exists():
            raise DataError(f"{folder} holds no features: there is no {NAME} in it")
        there = read_json(self._folder / NAME)
        if there.get("dtype") not in ("bfloat16", "float32"):
            raise DataError(f"{folder}: {NAME} does not describe features; write them again")
        holds(self._folder, NAME, _manifest(rows, target, aux_boundaries, there["dtype"]))
        files = range(-(-len(rows) // ROWS_PER_FILE))
        if lacking := [i for i in files if not _file(self._folder, i).exists()]:
            raise DataError(
                f"{folder} lacks {len(lacking)} of {len(files)} files: run the command that wrote "
                "it again to complete it"
            )
        self._dtype, self._width = jnp.dtype(there["dtype"]), target.merge().config.hidden_size
        self._feature_width = len(aux_boundaries) * self._width
        self._files = [self._open(index) for index in files]

    def __call__(self, index: int) -> Arrays:
        """Returns features and states of one row."""
        both = self._files[index // ROWS_PER_FILE][index % ROWS_PER_FILE].view(self._dtype)
        return both[:, : self._feature_width], both[:, self._feature_width :]

    def _open(self, index: int) -> np.ndarray:
        path = _file(self._folder, index)
        count = min(ROWS_PER_FILE, len(self.rows) - index * ROWS_PER_FILE)
        bits = np.dtype(f"u{self._dtype.itemsize}")
        shape = count, self.rows.row_tokens, self._feature_width + self._width
        try:
            array = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path} is damaged ({error}); remove it and write it again") from error
        if array.shape != shape or array.dtype != bits:
            raise DataError(
                f"{path} holds {array.dtype} {array.shape} where {bits} {shape} belongs; remove it "
                "and write it again"
            )
        return array


Source = Callable[[int], Arrays]


def write_features(
    source: Online,
    folder: str | os.PathLike[str],
    dtype: str = "bfloat16",
    progress: bool = False,
) -> int:
    """Writes the features of all rows, or those that an interrupted run left.

    Args:
      source: what makes them.
      folder: made if it does not exist.
      dtype: of the numbers in the files; bfloat16 halves them, float32 keeps them as they are.
      progress: show a progress bar on standard error, if that is a terminal.

    Returns:
      the bytes of all files.

    Raises:
      DataError: the folder holds something else, or the disk is full.
    """
    folder, rows = Path(folder), source.rows
    claim(folder, NAME, _manifest(rows, source.target, source.aux_boundaries, dtype))
    size = rows.row_tokens
    parts = [
        range(begin, min(begin + ROWS_PER_FILE, len(rows)))
        for begin in range(0, len(rows), ROWS_PER_FILE)
    ]
    files = [_file(folder, index) for index in range(len(parts))]
    with exclusive(folder), _bar(len(rows) * size, progress) as bar:
        for part, file in zip(parts, files, strict=True):
            if file.exists():
                bar.update(len(part) * size)
                continue

            def in_order(part: range = part) -> Iterable[np.ndarray]:
                for index in part:
                    both = np.concatenate(jax.device_get(source(index)), axis=-1)
                    yield both.astype(jnp.dtype(dtype))
                    bar.update(size)

            into_place(file, functools.partial(_save, rows=in_order(), count=len(part)))
    return sum(file.stat().st_size for file in files)


def _bar(tokens: int, progress: bool) -> Any:
    disable = None if progress else True
    return tqdm(total=tokens, unit="tok", unit_scale=True, disable=disable)


def _save(path: Path, rows: Iterable[np.ndarray], count: int) -> None:
    """Writes arrays of one shape as one `[count, ...]`, without all of them in memory."""
    with path.open("wb") as file:
        for index, row in enumerate(rows):
            if index == 0:
                # NumPy's files know no bfloat16, so bits are written.
                descr = np.lib.format.dtype_to_descr(np.dtype(f"u{row.dtype.itemsize}"))
                header = {"descr": descr, "fortran_order": False, "shape": (count, *row.shape)}
                np.lib.format.write_array_header_1_0(file, header)
            file.write(row.tobytes())


def _manifest(
    rows: PackedRows, target: Frozen[Target], aux_boundaries: tuple[int, ...], dtype: str
) -> dict[str, Any]:
    return {
        "rows": len(rows),
        "row_tokens": rows.row_tokens,
        "data and seed": rows.fingerprint(),
        "target": identity(target),
        "aux_boundaries": list(aux_boundaries),
        "dtype": dtype,
    }


def _file(folder: Path, index: int) -> Path:
    return folder / f"{index:05}.npy"
