"""The metrics of a run: a JSON line for each entry, and the same for TensorBoard."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import scalar

from peagle_jax.training.folders import DataError


class Log:
    """Writes `metrics.jsonl` and `tensorboard/`, each entry before the next one is made.

    TensorBoard's file is not left to `SummaryWriter`, whose thread dies of a full disk, after
    which the run waits for it.

    Args:
      folder: of the run.
      begin: the step it goes on from; entries after it, of a run that was interrupted, are dropped.

    Raises:
      DataError: the files cannot be written; so does every method.
    """

    def __init__(self, folder: Path, begin: int):
        self._path = folder / "metrics.jsonl"
        with self._errors():
            kept = list(self._entries_until(begin))
            part = self._path.with_name(f".{self._path.name}.part")
            part.write_text("".join(kept), encoding="utf-8")
            part.replace(self._path)
            self._file: TextIO = self._path.open("a", encoding="utf-8")
            board = folder / "tensorboard"
            board.mkdir(exist_ok=True)
            name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}"
            self._board = RecordWriter(str(board / name))
            self._show(0, file_version="brain.Event:2")
            start = SessionLog(status=SessionLog.START)  # hides what came after it before
            self._show(begin + 1, session_log=start)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *_: Any) -> None:
        with self._errors(), contextlib.ExitStack() as both:
            both.callback(self._file.close)
            both.callback(self._board.close)

    def write(
        self, kind: str, step: int, values: Mapping[str, Any], speed: Mapping[str, float] = {}
    ) -> None:
        """Adds an entry.

        Args:
          kind: "train", "validation" or "generation".
          step: after which it was measured.
          values: numbers and lists of numbers; None where there is none.
          speed: numbers that another run of the same would not repeat.
        """
        entry = {"kind": kind, "step": step, **values, **speed}
        with self._errors():
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
            for name, value in {**values, **speed}.items():
                each = enumerate(value) if isinstance(value, list) else [(None, value)]
                for place, one in each:
                    if one is None:
                        continue
                    tag = f"{kind}/{name}" + ("" if place is None else f"_{place}")
                    self._show(step, summary=scalar(tag, one))

    def flush(self) -> None:
        """Puts everything on the disk, before a checkpoint says that it is there."""
        with self._errors():
            os.fsync(self._file.fileno())
            self._board.flush()

    def _show(self, step: int, **content: Any) -> None:
        event = Event(step=step, wall_time=time.time(), **content)
        self._board.write(event.SerializeToString())

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"cannot write {self._path} or what is beside it ({error}); make room, and run "
                "again to go on from the last checkpoint"
            ) from error

    def _entries_until(self, step: int) -> Iterator[str]:
        """Yields the lines up to a step, or to one that was not finished."""
        if not self._path.exists():
            return
        for line in self._path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]:
            try:
                if json.loads(line)["step"] > step:
                    return
            except (ValueError, KeyError, TypeError):
                return
            yield line + "\n"
