"""Documents packed into rows of one length, in a fixed and shuffled order."""

import bisect
import dataclasses
import hashlib
from typing import Any

import grain
import jax
import numpy as np

from peagle_jax.training.dataset import Dataset
from peagle_jax.training.folders import DataError

# As good as endless; with an endless stream, batches of one row overflow grain's count.
EPOCHS = 1 << 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenRow:
    """A packed row of S tokens, as the target reads it.

    Attributes:
      tokens: `[S]` int32, documents end to end, then 0.
      loss_mask: `[S]` bool, tokens that are learnt.
      document_ids: `[S]` int32, 0, 1, ... in the row, -1 for what fills it up.
      positions: `[S]` int32, from 0 in each document.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    document_ids: np.ndarray
    positions: np.ndarray


class PackedRows:
    """A dataset as rows of S tokens: a random-access source of `TokenRow`.

    Documents are shuffled once and each goes to the fullest row that has room for it. Which share
    a row stays the same in every epoch, so that features can be kept row by row.

    Args:
      dataset: the documents.
      row_tokens: S.
      seed: of the shuffle.

    Raises:
      DataError: a document is longer than a row.
    """

    def __init__(self, dataset: Dataset, row_tokens: int, seed: int):
        lengths = np.diff(dataset.offsets)
        if lengths.max() > row_tokens:
            raise DataError(
                f"document {lengths.argmax()} has {lengths.max()} tokens, a row {row_tokens}; "
                f"raise row_tokens, or prepare the data with at most {row_tokens} tokens each"
            )
        self.row_tokens = row_tokens
        self._dataset, self._documents = dataset, _best_fit(lengths, row_tokens, seed)

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: Any) -> TokenRow:
        row = TokenRow(
            np.zeros((self.row_tokens,), np.int32),
            np.zeros((self.row_tokens,), bool),
            np.full((self.row_tokens,), -1, np.int32),
            np.zeros((self.row_tokens,), np.int32),
        )
        begin = 0
        for number, document in enumerate(map(self._dataset.__getitem__, self._documents[index])):
            place = slice(begin, begin + len(document.input_ids))
            row.tokens[place] = document.input_ids
            row.loss_mask[place] = document.loss_mask
            row.document_ids[place] = number
            row.positions[place] = np.arange(len(document.input_ids))
            begin = place.stop
        return row

    @property
    def fill(self) -> float:
        """Which part of the rows is taken by documents."""
        return len(self._dataset.input_ids) / (len(self) * self.row_tokens)

    def fingerprint(self) -> str:
        """Returns a hash of every row's content, which features are made of."""
        digest = hashlib.sha256()
        for array in (self._dataset.input_ids, self._dataset.loss_mask, self._dataset.offsets):
            digest.update(np.ascontiguousarray(array).tobytes())
        digest.update(repr((self.row_tokens, self._documents)).encode())
        return digest.hexdigest()


def batches(num_rows: int, rows_per_step: int, seed: int) -> grain.DatasetIterator[list[int]]:
    """Returns an endless stream of batches of row numbers, shuffled anew in each epoch.

    Its position is small and can be kept with a checkpoint (`get_state`, `set_state`).

    Args:
      num_rows: rows of an epoch.
      rows_per_step: rows of a batch, which may span two epochs.
      seed: of the shuffles.
    """
    rows = grain.MapDataset.range(num_rows).seed(seed).shuffle().repeat(EPOCHS)
    few = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # there is nothing to wait for
    return iter(rows.batch(rows_per_step, batch_fn=list).to_iter_dataset(few))


def _best_fit(lengths: np.ndarray, capacity: int, seed: int) -> list[list[int]]:
    """Returns the documents of each row."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens free, row), sorted
    for document in np.random.default_rng(seed).permutation(len(lengths)).tolist():
        length = int(lengths[document])
        at = bisect.bisect_left(room, (length, 0))
        free, row = room.pop(at) if at < len(room) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(document)
        if free > length:
            bisect.insort(room, (free - length, row))
    return rows
