"""Rows that documents are packed into, and the order in which they are learnt."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_jax.training.dataset import Dataset
from peagle_jax.training.folders import DataError
from peagle_jax.training.packing import PackedRows, batches


def dataset_of(lengths: list[int]) -> Dataset:
    """Documents whose tokens are 1, 2, ... through all of them, so that each can be told."""
    total = sum(lengths)
    ids = np.arange(1, total + 1, dtype=np.int32)
    return Dataset(total + 1, ids, ids % 3 == 0, np.cumsum([0, *lengths]))


@given(
    lengths=st.lists(st.integers(2, 20), min_size=1, max_size=40),
    room=st.integers(20, 50),
    seed=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_every_document_once_and_whole(lengths: list[int], room: int, seed: int) -> None:
    dataset = dataset_of(lengths)
    rows = PackedRows(dataset, room, seed)
    found = []
    for index in range(len(rows)):
        row = rows[index]
        assert {getattr(row, f.name).shape for f in dataclasses.fields(row)} == {(room,)}
        used = row.document_ids >= 0
        count = int(used.sum())
        assert used[:count].all()  # documents first, then padding
        for array in (row.tokens, row.loss_mask, row.positions):
            assert not array[count:].any()
        numbers = row.document_ids[:count]
        assert set(np.diff(numbers)) <= {0, 1} and numbers[0] == 0
        for number in range(numbers[-1] + 1):
            place = numbers == number
            tokens = row.tokens[:count][place]
            np.testing.assert_array_equal(row.positions[:count][place], np.arange(len(tokens)))
            np.testing.assert_array_equal(row.loss_mask[:count][place], tokens % 3 == 0)
            found.append(tokens.tolist())
    whole = [dataset[i].input_ids.tolist() for i in range(len(dataset))]
    assert sorted(found) == whole
    assert rows.fill == pytest.approx(sum(lengths) / (len(rows) * room))


def test_rows_are_well_filled() -> None:
    """Best fit of many short documents wastes next to nothing."""
    lengths = np.random.default_rng(0).integers(10, 200, 2000).tolist()
    rows = PackedRows(dataset_of(lengths), 512, 0)
    assert rows.fill > 0.95


def test_packing_is_deterministic_and_the_seed_counts() -> None:
    dataset = dataset_of([5, 9, 3, 12, 7, 7, 2, 4])
    same, again, other = (PackedRows(dataset, 16, seed) for seed in (1, 1, 2))
    assert same.fingerprint() == again.fingerprint() != other.fingerprint()
    for index in range(len(same)):
        np.testing.assert_array_equal(same[index].tokens, again[index].tokens)


def test_the_fingerprint_is_of_all_content() -> None:
    dataset = dataset_of([5, 9, 3])
    ids, mask = dataset.input_ids.copy(), dataset.loss_mask.copy()
    ids[3], mask[3] = 1, not mask[3]
    others = [
        PackedRows(dataclasses.replace(dataset, input_ids=ids), 16, 0),
        PackedRows(dataclasses.replace(dataset, loss_mask=mask), 16, 0),
        PackedRows(dataclasses.replace(dataset, offsets=np.asarray([0, 6, 14, 17])), 16, 0),
        PackedRows(dataset, 17, 0),
        PackedRows(dataset, 16, 0),
    ]
    assert len({rows.fingerprint() for rows in others}) == len(others)


def test_a_document_longer_than_a_row() -> None:
    with pytest.raises(DataError, match=r"document 1 has 9 tokens, a row 8; raise row_tokens"):
        PackedRows(dataset_of([5, 9, 3]), 8, 0)


@pytest.mark.parametrize(("rows", "size"), [(6, 2), (7, 3), (3, 8), (5, 1)])
def test_every_row_once_an_epoch(rows: int, size: int) -> None:
    """Batches of one size, epochs end to end; the order changes from one to the next."""
    stream = batches(rows, size, seed=3)
    got = [next(stream) for _ in range(16 // size + 4)]
    assert {len(batch) for batch in got} == {size}
    order = [int(i) for batch in got for i in batch]
    epochs = [order[i : i + rows] for i in range(0, len(order) - rows + 1, rows)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    again = batches(rows, size, seed=3)
    assert [next(again) for _ in got] == got
    other = batches(rows, size, seed=4)
    assert [next(other) for _ in got] != got


def test_a_position_is_kept_as_json() -> None:
    stream = batches(7, 3, seed=0)
    for _ in range(5):
        next(stream)
    state = json.loads(json.dumps(stream.get_state()))
    rest = [next(stream) for _ in range(6)]
    resumed = batches(7, 3, seed=0)
    resumed.set_state(state)
    assert [next(resumed) for _ in range(6)] == rest
