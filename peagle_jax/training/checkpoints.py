"""The states of a training run on disk, written in the background."""

import dataclasses
import gc
import json
import logging
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from peagle_jax.checkpoint import CheckpointError
from peagle_jax.training.settings import SettingsError, TrainSettings
from peagle_jax.training.step import TrainState

# Settings that may change when a run goes on; they do not enter what it computes (but features that
# are stored in bfloat16 round it).
FREE = {
    "data", "features", "target", "output", "validation", "save_every", "keep", "validate_every",
    "generate_every", "generate_prompts", "generate_tokens",
}  # fmt: skip


class Checkpoints:
    """The states of a run on disk, the last few of them.

    A state is written beside the others and moved into place, so a run that is killed leaves those
    that were complete.

    Args:
      folder: made if it does not exist.
      settings: of the run.
      content: hash of what it learns from.

    Raises:
      CheckpointError: a state cannot be read or written, as when the disk is full. So does every
        method; when the next state is saved, for one that was being written.
    """

    def __init__(self, folder: Path, settings: TrainSettings, content: str):
        policies = ocp.training.preservation_policies
        binding = {k: v for k, v in dataclasses.asdict(settings).items() if k not in FREE}
        self._about = {"settings": json.loads(json.dumps(binding)), "content": content}
        self._folder = folder

        def begin() -> Any:
            folder.mkdir(parents=True, exist_ok=True)
            return ocp.training.Checkpointer(
                folder.absolute(),
                preservation_policy=policies.LatestN(settings.keep),
                cleanup_tmp_directories=True,
            )

        self._checkpointer = _guarded(f"cannot write {folder}", begin)

    def __enter__(self) -> "Checkpoints":
        # Orbax raises what it logs, too.
        self._logger = logging.getLogger("absl")
        self._level = self._logger.level
        self._logger.setLevel(logging.CRITICAL)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            _guarded(self._not_saved, self._checkpointer.close)
        except CheckpointError:
            if kind is None:  # else another error is on its way
                raise
        finally:
            self._logger.setLevel(self._level)

    def restore(self, state: TrainState) -> tuple[TrainState, dict[str, Any] | None]:
        """Returns the last state and the data's position in it, or what was given and None.

        Raises:
          SettingsError: it is of a run with other settings or data.
        """
        latest = self._checkpointer.latest
        if latest is None:
            return state, None
        path = self._folder / str(latest.step)
        named = _named(state)
        wanted = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for name, x in named.items()
        }

        def load() -> tuple[dict[str, Any], dict[str, jax.Array]]:
            about = self._checkpointer.metadata(latest).custom_metadata
            self._check(about)
            return about["position"], self._checkpointer.load(latest, wanted)

        what = f"{path} is damaged, remove it to go on from the one before"
        position, leaves = _guarded(what, load)
        structure = jax.tree.structure(state)
        return jax.tree.unflatten(structure, [leaves[name] for name in named]), position

    def save(self, state: TrainState, position: dict[str, Any]) -> None:
        """Begins to write a state, once the one before is written.

        Args:
          state: after some step, by which it is named.
          position: where the data is after it.
        """

        def begin() -> None:
            self._checkpointer.wait()
            about = {**self._about, "position": position}
            named = _named(state)
            step = int(state.step)
            self._checkpointer.save_async(step, named, force=True, custom_metadata=about)

        _guarded(self._not_saved, begin)

    @property
    def _not_saved(self) -> str:
        return (
            f"cannot save a state in {self._folder}; those that are complete are intact, run again "
            "to go on from the last"
        )

    def _check(self, about: dict[str, Any]) -> None:
        old, new = about["settings"], self._about["settings"]
        for name in {**old, **new}:
            if old.get(name) != new.get(name):
                raise SettingsError(
                    f"{self._folder.parent} holds a run with {name} = {old.get(name)!r}, not "
                    f"{new.get(name)!r}: go on with the same, or name another output"
                )
        if about["content"] != self._about["content"]:
            raise SettingsError(
                f"{self._folder.parent} holds a run on other data or another target: go on with "
                "the same, or name another output"
            )


def _guarded[T](what: str, call: Callable[[], T]) -> T:
    """Turns whatever Orbax raises into one error."""
    try:
        return call()
    except SettingsError:
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        traceback.clear_frames(error.__traceback__)
    # The error held coroutines that nobody awaited; Python would tell of each, any time later.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            gc.collect()
    finally:
        sys.unraisablehook = hook
    raise CheckpointError(f"{what} ({reason})")


def _named(state: TrainState) -> dict[str, jax.Array]:
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
