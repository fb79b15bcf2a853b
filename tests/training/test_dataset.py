"""Datasets on disk: what is written comes back, what is cut short is completed or refused."""

import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from peagle_jax.training.dataset import Dataset, Document, Recipe, Writer
from peagle_jax.training.folders import DataError, exclusive, into_place

VOCABULARY = 50
RECIPE = Recipe(VOCABULARY, 3, {"command": "test", "seed": 4, "sizes": (1, 2)})


def documents(seed: int) -> list[Document]:
    rng = np.random.default_rng(seed)
    return [
        Document(rng.integers(0, VOCABULARY, n).astype(np.int32), rng.random(n) < 0.5)
        for n in rng.integers(2, 9, 4)
    ]


def write(folder: Path, *shards: int) -> Writer:
    writer = Writer(folder, RECIPE)
    for index in shards:
        writer.write(index, documents(index))
    return writer


def shard(folder: Path, index: int) -> Path:
    return folder / "shards" / f"{index:05}.safetensors"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Documents of all shards in order, of one dataset or of two; an empty shard is none."""
    write(tmp_path / "a", 0, 2).write(1, [])
    write(tmp_path / "b", 0, 1, 2)
    dataset = Dataset.read(tmp_path / "a", str(tmp_path / "b"))
    expected = [d for index in (0, 2, 0, 1, 2) for d in documents(index)]
    assert (len(dataset), dataset.vocab_size) == (len(expected), VOCABULARY)
    for index, document in enumerate(expected):
        np.testing.assert_array_equal(dataset[index].input_ids, document.input_ids)
        np.testing.assert_array_equal(dataset[index].loss_mask, document.loss_mask)
    assert (dataset.input_ids.dtype, dataset.loss_mask.dtype) == (np.int32, np.bool_)


def test_an_interrupted_run_is_completed(tmp_path: Path) -> None:
    """A run killed while it wrote leaves a part; a second one writes what is missing, no more."""
    write(tmp_path / "whole", 0, 1, 2)
    folder = tmp_path / "killed"
    assert write(folder, 1).missing() == [0, 2]
    part = folder / "shards" / ".00000.safetensors.part"
    part.write_bytes(b"half a shard")
    before = shard(folder, 1).stat().st_mtime_ns
    with pytest.raises(DataError, match=r"lacks 2 of 3 shards, 00000.* run it again"):
        Dataset.read(folder)
    write(folder, *Writer(folder, RECIPE).missing())
    assert shard(folder, 1).stat().st_mtime_ns == before
    assert not part.exists()
    files = sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    assert len(files) == 4
    for file in files:
        assert (folder / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_a_run_killed_at_its_very_start_is_completed(tmp_path: Path) -> None:
    """The folder is there, and the file that says what it will hold is not whole."""
    (tmp_path / ".dataset.json.part").write_text("{")
    assert write(tmp_path).missing() == [0, 1, 2]


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (([1, 50], [0, 1]), "token id 50 is outside the vocabulary of 50"),
        (([-1, 2], [0, 1]), "token id -1 is outside"),
        (([1], [1]), "at least two"),
        (([1, 2, 3], [0, 1]), r"\(3,\) token ids with a loss mask of \(2,\)"),
    ],
)
def test_bad_documents(document: tuple[list[int], list[int]], said: str, tmp_path: Path) -> None:
    ids, mask = document
    writer = write(tmp_path)
    with pytest.raises(DataError, match=said):
        writer.write(0, [Document(np.asarray(ids, np.int32), np.asarray(mask, bool))])
    assert writer.missing() == [0, 1, 2]


def test_other_folders_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "data", 0)
    changes = {"command": "test", "seed": 5, "sizes": (1, 2)}
    with pytest.raises(DataError, match=r"seed was 4 and is 5; name another folder"):
        Writer(tmp_path / "data", Recipe(VOCABULARY, 3, changes))
    with pytest.raises(DataError, match=r"num_shards was 3 and is 4"):
        Writer(tmp_path / "data", Recipe(VOCABULARY, 4, RECIPE.made_by))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"other exists and has no dataset.json; name another"):
        write(tmp_path / "other")
    with pytest.raises(DataError, match=r"notes.txt exists and has no"):
        write(tmp_path / "other" / "notes.txt")
    with pytest.raises(DataError, match="other is no dataset"):
        Dataset.read(tmp_path / "other")
    with pytest.raises(DataError, match="no dataset is named"):
        Dataset.read()


def rewrite(path: Path, **changes: Any) -> None:
    save_file({**load_file(path), **changes}, path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-3]), "damaged"),
        (lambda path: path.write_bytes(b""), "damaged"),
        (lambda path: rewrite(path, offsets=np.asarray([0, 3])), "documents do not fill it"),
        (lambda path: rewrite(path, offsets=np.asarray([], np.int64)), "do not fill it"),
        (lambda path: rewrite(path, loss_mask=np.ones(1, bool)), "do not fill it"),
        (lambda path: rewrite(path, extra=np.ones(1)), "does not hold"),
        (lambda path: rewrite(path, input_ids=load_file(path)["input_ids"] + 49), "outside"),
    ],
)
def test_damaged_shards(damage: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 2)
    damage(shard(tmp_path, 1))
    with pytest.raises(DataError, match=rf"00001\.safetensors.*{said}"):
        Dataset.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot read"),
        ("[]", "no JSON object"),
        ('{"format_version": 9}', "format version 9, this release reads 1"),
        ('{"format_version": 1, "vocab_size": 5}', "does not describe a dataset"),
        (
            '{"format_version": 1, "vocab_size": 5, "num_shards": "3", "made_by": {}}',
            "does not describe",
        ),
    ],
)
def test_damaged_descriptions(text: str, said: str, tmp_path: Path) -> None:
    write(tmp_path, 0, 1, 2)
    (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(DataError, match=said) as caught:
        Dataset.read(tmp_path)
    assert "dataset.json" in str(caught.value)


def test_nothing_supervised_and_other_vocabularies(tmp_path: Path) -> None:
    nothing = Document(np.asarray([1, 2], np.int32), np.zeros(2, bool))
    Writer(tmp_path / "a", Recipe(VOCABULARY, 1, {})).write(0, [nothing])
    with pytest.raises(DataError, match="a: no token is supervised"):
        Dataset.read(tmp_path / "a")
    Writer(tmp_path / "b", Recipe(VOCABULARY + 1, 1, {})).write(0, [nothing])
    with pytest.raises(DataError, match=r"different vocabularies: \[50, 51\]"):
        Dataset.read(tmp_path / "a", tmp_path / "b")


def test_full_disk(tmp_path: Path) -> None:
    """What was written before is intact, and nothing half written is left."""
    writer = write(tmp_path, 0)
    before = shard(tmp_path, 0).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(DataError, match=r"cannot write .*00001.*run again to go on"):
            writer.write(1, documents(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [p.name for p in (tmp_path / "shards").iterdir()] == ["00000.safetensors"]
    assert shard(tmp_path, 0).read_bytes() == before


def test_one_run_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    said = r"another run is writing to .*new"
    with exclusive(folder), pytest.raises(DataError, match=said), exclusive(folder):
        pass
    with exclusive(folder):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot write"), exclusive(tmp_path / "file"):
        pass


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    """A writer that fails half way; and a folder that is gone."""

    def half(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"x\.txt.*No space left"):
        into_place(tmp_path / "x.txt", half)
    assert not list(tmp_path.iterdir())
    writer = write(tmp_path / "data")
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(DataError, match="cannot write"):
        writer.write(0, documents(0))
