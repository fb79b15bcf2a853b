"""Folders that are made file by file: what they hold, who writes them, files that appear whole."""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError


class DataError(ValueError):
    """What training reads or writes is missing, damaged, does not fit or cannot be written."""


def holds(folder: Path, name: str, content: Mapping[str, Any]) -> bool:
    """Returns whether a folder says in the JSON file `name` that it holds this.

    Args:
      folder: may not exist.
      name: of the file.
      content: what its file must say. What else it says does not matter.

    Raises:
      DataError: the folder holds something else.
    """
    if (folder / name).exists():
        there, wanted = _flat(read_json(folder / name)), _flat(_as_json(content))
        if different := [key for key in wanted if there.get(key) != wanted[key]]:
            changes = (f"{k} was {there.get(k)!r} and is {wanted[k]!r}" for k in different)
            raise DataError(
                f"{folder} was made otherwise: {', '.join(changes)}; name another folder, or "
                "make this one again"
            )
        return True
    # Names that start with "." are those of a lock and of files that a killed run began.
    if folder.exists() and not (
        folder.is_dir() and all(path.name.startswith(".") for path in folder.iterdir())
    ):
        raise DataError(f"{folder} exists and has no {name}; name another folder")
    return False


def claim(folder: Path, name: str, content: Mapping[str, Any]) -> None:
    """Lets a folder say what it will hold, unless it says so already.

    Raises:
      DataError: the folder holds something else, or cannot be written.
    """
    if holds(folder, name, content):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {folder}: {error}") from error
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    into_place(folder / name, lambda part: part.write_text(text, encoding="utf-8"))


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keeps other runs from writing to a folder, which is made if it does not exist.

    Raises:
      DataError: another run is writing to it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a")
    except OSError as error:
        raise DataError(f"cannot write {folder}: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, if killed
        except BlockingIOError:
            raise DataError(
                f"another run is writing to {folder}: wait for it, or name another folder"
            ) from None
        yield


def into_place(path: Path, write: Callable[[Path], Any]) -> None:
    """Lets `write` make a file beside `path`, and moves it there when it is whole.

    Raises:
      DataError: it cannot be written, as when the disk is full.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        write(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise DataError(
            f"cannot write {path} ({error}); what was written before is intact, run again to go on"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
      DataError: there is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no JSON object")
    return content


def _as_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is read when this was written: tuples come back as lists."""
    read: dict[str, Any] = json.loads(json.dumps(content))
    return read


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of objects in an object beside its own."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= value if isinstance(value, dict) else {key: value}
    return flat
