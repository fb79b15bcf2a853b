"""Training data on disk: documents of token ids with a loss mask, in shards.

A dataset is a folder with `dataset.json` and `shards/00000.safetensors`, ... A shard holds its
documents end to end: `input_ids` int32 `[N]`, `loss_mask` bool `[N]`, and `offsets` int64
`[D + 1]`, where document i is `offsets[i]` .. `offsets[i + 1]`. `dataset.json` is written first and
says how many shards there will be; a shard is moved into place whole, so an interrupted run leaves
a folder that says what it lacks, and that a second run completes.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from peagle_jax.training.folders import DataError, claim, into_place, read_json

NAME = "dataset.json"
FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Document:
    """A text to learn from.

    Attributes:
      input_ids: `[T]` int32.
      loss_mask: `[T]` bool, the tokens that are learnt: what the target says, not the prompt.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a dataset is made of; a second run may complete it only if it would make the same.

    Attributes:
      vocab_size: V, of the target.
      num_shards: how many there will be.
      made_by: the command's name and settings, as JSON can hold them.
    """

    vocab_size: int
    num_shards: int
    made_by: dict[str, Any]


class Writer:
    """Writes a dataset shard by shard, or completes one.

    Args:
      folder: made if it does not exist.
      recipe: what the dataset is made of.

    Raises:
      DataError: the folder holds something else, or a dataset of another recipe.
    """

    def __init__(self, folder: str | os.PathLike[str], recipe: Recipe):
        self.folder, self._recipe = Path(folder), recipe
        content = {"format_version": FORMAT_VERSION, **dataclasses.asdict(recipe)}
        claim(self.folder, NAME, content)
        (self.folder / "shards").mkdir(exist_ok=True)

    def missing(self) -> list[int]:
        """Returns the shards that are still to be written."""
        shards = range(self._recipe.num_shards)
        return [i for i in shards if not _shard(self.folder, i).exists()]

    def write(self, index: int, documents: Sequence[Document]) -> None:
        """Writes one shard.

        Raises:
          DataError: a document is not such as `Document` says, or the disk is full.
        """
        for document in documents:
            _check(document, self._recipe.vocab_size)
        lengths = [len(document.input_ids) for document in documents]
        none: list[np.ndarray] = [np.zeros((0,), np.int32)]
        arrays = {
            "input_ids": np.concatenate(none + [d.input_ids for d in documents]).astype(np.int32),
            "loss_mask": np.concatenate(none + [d.loss_mask for d in documents]).astype(bool),
            "offsets": np.cumsum([0, *lengths], dtype=np.int64),
        }
        into_place(_shard(self.folder, index), lambda part: save_file(arrays, part))


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Documents in memory, end to end.

    Attributes:
      vocab_size: V, of the target that they are for.
      input_ids: `[N]` int32.
      loss_mask: `[N]` bool.
      offsets: `[D + 1]` int64.
    """

    vocab_size: int
    input_ids: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray

    @classmethod
    def read(cls, *folders: str | os.PathLike[str]) -> Self:
        """Reads one dataset, or several as one.

        Raises:
          DataError: a folder is no dataset, lacks shards, is damaged or of another vocabulary;
            or nothing is supervised.
        """
        if not folders:
            raise DataError("no dataset is named")
        sizes, parts = set(), []
        for folder in map(Path, folders):
            recipe = _read_recipe(folder)
            paths = [_shard(folder, index) for index in range(recipe.num_shards)]
            if lacking := [path.name for path in paths if not path.exists()]:
                raise DataError(
                    f"{folder} lacks {len(lacking)} of {len(paths)} shards, {lacking[0]} first: "
                    "the command that makes it was interrupted; run it again to complete it"
                )
            sizes.add(recipe.vocab_size)
            parts += [_read_shard(path, recipe.vocab_size) for path in paths]
        if len(sizes) > 1:
            raise DataError(f"datasets of different vocabularies: {sorted(sizes)} tokens")
        lengths = np.concatenate([np.diff(part["offsets"]) for part in parts])
        mask = np.concatenate([part["loss_mask"] for part in parts])
        if not mask.any():
            raise DataError(f"{folders[0]}: no token is supervised; every loss mask is empty")
        return cls(
            vocab_size=sizes.pop(),
            input_ids=np.concatenate([part["input_ids"] for part in parts]),
            loss_mask=mask,
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Document:
        place = slice(self.offsets[index], self.offsets[index + 1])
        return Document(self.input_ids[place], self.loss_mask[place])


def _shard(folder: Path, index: int) -> Path:
    return folder / "shards" / f"{index:05}.safetensors"


def _check(document: Document, vocab_size: int) -> None:
    ids, mask = document.input_ids, document.loss_mask
    if ids.ndim != 1 or mask.shape != ids.shape:
        raise DataError(f"{ids.shape} token ids with a loss mask of {mask.shape}")
    if len(ids) < 2:
        raise DataError(f"a document of {len(ids)} tokens; there must be at least two")
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise DataError(f"token id {wrong} is outside the vocabulary of {vocab_size}")


def _read_recipe(folder: Path) -> Recipe:
    path = folder / NAME
    if not path.exists():
        raise DataError(f"{folder} is no dataset: there is no {NAME} in it")
    content = read_json(path)
    if (version := content.pop("format_version", None)) != FORMAT_VERSION:
        raise DataError(
            f"{path} has format version {version}, this release reads {FORMAT_VERSION}; make it "
            "again"
        )
    kinds = {"vocab_size": int, "num_shards": int, "made_by": dict}
    if {key: type(value) for key, value in content.items()} != kinds:
        raise DataError(f"{path} does not describe a dataset; make it again")
    return Recipe(**content)


def _read_shard(path: Path, vocab_size: int) -> dict[str, np.ndarray]:
    try:
        arrays = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path} is damaged ({error}); remove it and run the command that made it again"
        ) from error
    kinds = {"input_ids": np.int32, "loss_mask": np.bool_, "offsets": np.int64}
    if {name: array.dtype for name, array in arrays.items()} != kinds:
        raise DataError(f"{path} does not hold {', '.join(kinds)} of the types of a dataset")
    ids, mask, offsets = (arrays[name] for name in kinds)
    flat = ids.ndim == mask.ndim == offsets.ndim == 1 and len(offsets) > 0
    ends = (0, len(ids), len(ids))
    if not flat or (offsets[0], offsets[-1], len(mask)) != ends or (np.diff(offsets) < 2).any():
        raise DataError(f"{path} is damaged: its documents do not fill it")
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        raise DataError(f"{path} holds token ids outside the vocabulary of {vocab_size}")
    return arrays
