"""Features of packed rows: of each document by itself, aligned, and the same from disk."""

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import FAMILIES, TARGET, random_target
from flax import nnx

from peagle_jax.models import Frozen, Target, masked
from peagle_jax.training import features as module
from peagle_jax.training.dataset import Dataset
from peagle_jax.training.features import Online, Stored, read_row, shifted, write_features
from peagle_jax.training.folders import DataError
from peagle_jax.training.packing import PackedRows, TokenRow

BOUNDARIES = (2, 1, 0)
S = 24


def rows_of(lengths: tuple[int, ...] = (9, 7, 4, 11, 3, 5), size: int = S) -> PackedRows:
    rng = np.random.default_rng(0)
    total = sum(lengths)
    ids = rng.integers(0, TARGET.vocab_size, total).astype(np.int32)
    mask = rng.random(total) < 0.5
    return PackedRows(Dataset(TARGET.vocab_size, ids, mask, np.cumsum([0, *lengths])), size, 0)


@jax.jit
def alone(target: Frozen[Target], ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns features and states of one document `[S]`, by a dense causal pass."""
    model, n = target.merge(), ids.shape[0]
    ago = np.arange(n)[:, None] - np.arange(n)
    windows = model.config.sliding_windows
    masks = [jnp.asarray((ago >= 0) & (ago < (window or n)))[None] for window in windows]
    places = jnp.arange(n)[None]
    states, features, _ = model(ids[None], places, masked(masks), BOUNDARIES)
    assert features is not None
    return features[0], states[0]


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_packed_row_is_its_documents_alone(family: str) -> None:
    """What shares the row does not matter, nor does where a document lies in it."""
    target, rows = random_target(FAMILIES[family]).weights, rows_of()
    assert len(rows) == 2
    for index in range(len(rows)):
        row = rows[index]
        features, states = read_row(target, row, BOUNDARIES)
        assert features.shape == (S, 3 * TARGET.hidden_size)
        for number in range(row.document_ids.max() + 1):
            place = row.document_ids == number
            tokens = row.tokens[place]
            for got, expected in zip(
                (features, states),
                alone(target, np.pad(tokens, (0, S - len(tokens)))),  # nothing sees what follows
                strict=True,
            ):
                scale = np.abs(expected).max()
                np.testing.assert_allclose(got[place], expected[: len(tokens)], atol=1e-5 * scale)


def test_the_alignment() -> None:
    """Row i of a document: token x[i + 1], feature g[i], state y[i + 1], mask m[i + 1]."""
    rows = rows_of((9, 7, 8))  # a full row: nothing follows the last document
    row = rows[0]
    features = np.random.default_rng(1).random((S, 6), np.float32)
    states = np.random.default_rng(2).random((S, 2), np.float32)
    got = shifted(row, jnp.asarray(features), jnp.asarray(states))
    assert row.document_ids.min() == 0
    for number in range(3):
        places = np.flatnonzero(row.document_ids == number)
        now, after = places[:-1], places[1:]
        np.testing.assert_array_equal(got.tokens[now], row.tokens[after])
        np.testing.assert_array_equal(got.features[now], features[now])
        np.testing.assert_array_equal(got.states[now], states[after])
        np.testing.assert_array_equal(got.loss_mask[now], row.loss_mask[after])
        np.testing.assert_array_equal(got.document_ids[now], np.full(len(now), number))
        # The last token has nothing to go on to.
        assert got.document_ids[places[-1]] == -1
        assert not got.loss_mask[places[-1]]


@pytest.fixture(scope="module")
def source() -> Online:
    return Online(rows_of(), random_target().weights, BOUNDARIES)


def stored(source: Online, folder: Path, **changes: Any) -> Stored:
    changed = dataclasses.replace(source, **changes)
    return Stored(folder, changed.rows, changed.target, changed.aux_boundaries)


def test_stored_features_are_the_computed_ones(
    source: Online, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 bit for bit, bfloat16 their rounding; in several files."""
    monkeypatch.setattr(module, "ROWS_PER_FILE", 1)
    for dtype, width in (("float32", 4), ("bfloat16", 2)):
        size = write_features(source, tmp_path / dtype, dtype)
        numbers = 2 * S * 4 * TARGET.hidden_size
        assert numbers * width < size < numbers * width + 1000
        assert sorted(p.suffix for p in (tmp_path / dtype).glob("0*")) == [".npy", ".npy"]
        read = stored(source, tmp_path / dtype)
        for index in range(2):
            for got, exact in zip(read(index), source(index), strict=True):
                assert got.dtype == dtype
                expected = np.asarray(exact.astype(dtype))
                assert got.tobytes() == expected.tobytes()


def test_an_interrupted_run_is_completed(
    source: Online, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the second file: the first is not made again, the second is; the bytes agree."""
    monkeypatch.setattr(module, "ROWS_PER_FILE", 1)
    write_features(source, tmp_path / "whole")

    class Killed(Online):
        def __call__(self, index: int) -> Any:
            if index == 1:
                raise KeyboardInterrupt
            return super().__call__(index)

    killed, folder = Killed(source.rows, source.target, BOUNDARIES), tmp_path / "killed"
    with pytest.raises(KeyboardInterrupt):
        write_features(killed, folder)
    with pytest.raises(DataError, match="lacks 1 of 2 files: run the command"):
        stored(source, folder)
    (folder / ".00001.npy.part").write_bytes(b"half")
    before = (folder / "00000.npy").stat().st_mtime_ns
    write_features(source, folder)
    assert (folder / "00000.npy").stat().st_mtime_ns == before
    for name in ("00000.npy", "00001.npy", "features.json"):
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (folder / ".00001.npy.part").exists()


def tuned(target: Frozen[Target]) -> Frozen[Target]:
    """Returns the same target with queries of one layer moved a little."""
    changed = nnx.clone(target.merge())
    qkv = changed.layers[1].attention.qkv
    qkv[...] = qkv[...].at[:8].multiply(1.02)
    return Frozen.of(changed)


def test_foreign_features(source: Online, tmp_path: Path) -> None:
    """Of other data, row length, boundaries or target, another one of its sizes included."""
    write_features(source, tmp_path / "f")
    with pytest.raises(DataError, match=r"rows was 2 and is 1.*row_tokens was 24 and is 64"):
        stored(source, tmp_path / "f", rows=rows_of(size=64))
    with pytest.raises(DataError, match=r"f was made otherwise: data and seed was"):
        stored(source, tmp_path / "f", rows=rows_of((9, 7, 4, 11, 5, 3)))
    with pytest.raises(DataError, match=r"aux_boundaries was \[2, 1, 0\] and is \[0, 1, 2\]"):
        stored(source, tmp_path / "f", aux_boundaries=(0, 1, 2))
    with pytest.raises(DataError, match=r"made otherwise: weights was"):
        stored(source, tmp_path / "f", target=tuned(source.target))
    with pytest.raises(DataError, match="qk_norm was False and is True"):
        stored(source, tmp_path / "f", target=random_target(FAMILIES["qwen3"]).weights)
    with pytest.raises(DataError, match="made otherwise"):
        write_features(dataclasses.replace(source, aux_boundaries=(0, 1, 2)), tmp_path / "f")
    # The same target in another precision is the same.
    halved = jax.tree.map(lambda x: x.astype(jnp.bfloat16), source.target)
    stored(source, tmp_path / "f", target=halved)


def test_damaged_features(source: Online, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing holds no features"):
        stored(source, tmp_path / "nothing")
    write_features(source, tmp_path / "f")
    shutil.copytree(tmp_path / "f", tmp_path / "g")
    path = tmp_path / "f" / "00000.npy"
    os.truncate(path, path.stat().st_size - 5)
    with pytest.raises(DataError, match=r"00000.npy is damaged .* remove it and write it again"):
        stored(source, tmp_path / "f")
    path.write_bytes(b"")
    with pytest.raises(DataError, match="is damaged"):
        stored(source, tmp_path / "f")
    np.save(path, np.zeros((2, S, 7), np.uint16))
    with pytest.raises(DataError, match=r"holds uint16 \(2, 24, 7\) where uint16 \(2, 24, 128\)"):
        stored(source, tmp_path / "f")
    (tmp_path / "g" / "features.json").write_text('{"dtype": "int8"}')
    with pytest.raises(DataError, match="does not describe features"):
        stored(source, tmp_path / "g")


def test_a_full_disk(source: Online, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that was whole stays, and the run can go on."""
    monkeypatch.setattr(module, "ROWS_PER_FILE", 1)
    save, calls = module._save, []

    def full(path: Path, rows: Any, count: int) -> None:
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"begun")
            raise OSError(28, "No space left on device")
        save(path, rows, count)

    monkeypatch.setattr(module, "_save", full)
    with pytest.raises(DataError, match=r"cannot write .*00001.npy .*No space left"):
        write_features(source, tmp_path / "f")
    assert sorted(p.name for p in (tmp_path / "f").glob("[!.]*")) == ["00000.npy", "features.json"]
    write_features(source, tmp_path / "f")
    stored(source, tmp_path / "f")


def test_a_row_type_is_what_the_target_reads() -> None:
    """`read_row` compiles once for all rows of a length."""
    rows, target = rows_of(), random_target().weights
    read_row(target, rows[0], BOUNDARIES)
    count = read_row._cache_size()
    read_row(target, rows[1], BOUNDARIES)
    assert read_row._cache_size() == count
    assert isinstance(rows[1], TokenRow)
