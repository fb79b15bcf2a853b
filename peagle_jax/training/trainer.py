"""The training loop: from packed rows to a head, in a folder from which it can go on.

    OUTPUT/checkpoints/STEP/   state of the run, written in the background and moved into place
    OUTPUT/metrics.jsonl       a line for each step, measurement and validation
    OUTPUT/tensorboard/        the same, for TensorBoard
    OUTPUT/head/               the trained head, a native checkpoint

A run that is interrupted, however hard, goes on from its last checkpoint, and computes what it
would have computed without the interruption, bit for bit: on a CPU; on a GPU XLA has no fixed order
of adding up an embedding's gradient, unless `--xla_gpu_deterministic_ops=true` gives it one (not
tried).
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from peagle_jax import checkpoint
from peagle_jax.models import Drafter
from peagle_jax.training.checkpoints import Checkpoints
from peagle_jax.training.features import Source, shifted
from peagle_jax.training.flat import PackedRow
from peagle_jax.training.folders import exclusive, into_place
from peagle_jax.training.log import Log
from peagle_jax.training.loss import TargetHead
from peagle_jax.training.metrics import Metrics
from peagle_jax.training.packing import PackedRows, batches
from peagle_jax.training.settings import SettingsError, TrainSettings
from peagle_jax.training.step import (
    TrainState,
    add,
    apply,
    learning_rate,
    make_optimiser,
    row_gradients,
    row_metrics,
)
from peagle_jax.training.trainable import Parts

# Draws of a run are apart by what they are for.
TRAINING, VALIDATION = 0, 1


class TrainingError(RuntimeError):
    """A run cannot go on."""


@dataclasses.dataclass(frozen=True)
class Materials:
    """What a run learns from.

    Attributes:
      rows: packed rows.
      source: their features and states.
      validation: rows and source to measure on, or None.
      teacher: the target's head.
      content: a hash of rows and target, which must not change when a run goes on.
    """

    rows: PackedRows
    source: Source
    validation: tuple[PackedRows, Source] | None
    teacher: TargetHead
    content: str

    def row(self, index: int) -> PackedRow:
        """Returns a row to learn from."""
        return shifted(self.rows[index], *map(jnp.asarray, self.source(index)))


# Measures a head, in the dtype of the run, by generating; returns what goes to the metrics.
Measure = Callable[[Drafter], Mapping[str, Any]]


def train(
    settings: TrainSettings,
    parts: Parts,
    materials: Materials,
    *,
    optimiser: optax.GradientTransformation | None = None,
    measure: Measure | None = None,
    progress: bool = False,
) -> Path:
    """Trains a head, from the start or from the last checkpoint in `settings.output`.

    Args:
      settings: the run.
      parts: the head to start from; frozen arrays in `settings.dtype`.
      materials: what it learns from.
      optimiser: in place of that of the settings. A run that goes on must get the same.
      measure: called every `generate_every` steps.
      progress: show a progress bar on standard error, if that is a terminal.

    Returns:
      the folder of the trained head, in bfloat16.

    Raises:
      SettingsError: the output folder holds a run that is complete, or of other settings or data.
      DataError: another run is writing to it, or the metrics cannot be written.
      TrainingError: the loss is not finite; the batch is kept beside the metrics.
      CheckpointError: a checkpoint cannot be read or written, as when the disk is full. Those
        written before are intact.
    """
    check_output(settings)
    output = Path(settings.output)
    positions = batches(len(materials.rows), settings.rows_per_step, settings.seed)
    optimiser = optimiser or make_optimiser(settings)
    state = TrainState.start(parts.trainable, optimiser)
    with exclusive(output):
        with Checkpoints(output / "checkpoints", settings, materials.content) as checkpoints:
            state, position = checkpoints.restore(state)
            if position is not None:
                positions.set_state(position)
            begin = int(state.step)
            with Log(output, begin) as log, _bar(settings.steps, begin, progress) as bar:
                for step in range(begin + 1, settings.steps + 1):
                    indices = [int(i) for i in next(positions)]
                    state, report, speed = _reported_step(
                        settings, optimiser, parts, state, materials, indices
                    )
                    log.write("train", step, report, {"tokens_per_second": speed})
                    bar.update()
                    bar.set_postfix_str(
                        f"loss {report['loss']:.3f}, acceptance "
                        f"{report['acceptance_length']:.2f}, {speed:.0f} tok/s"
                    )

                    def is_due(every: int, step: int = step) -> bool:
                        return every > 0 and (step == settings.steps or step % every == 0)

                    if materials.validation and is_due(settings.validate_every):
                        log.write("validation", step, validate(settings, parts, state, materials))
                    if measure and is_due(settings.generate_every):
                        head = trained_head(settings, parts, state, jnp.dtype(settings.dtype))
                        log.write("generation", step, measure(head))
                    if is_due(settings.save_every):
                        log.flush()
                        checkpoints.save(state, positions.get_state())
        head = trained_head(settings, parts, state, jnp.dtype("bfloat16"))
        return save_head(output / "head", head, shares_embedding=settings.embedding == "frozen")


def check_output(settings: TrainSettings) -> None:
    """Raises SettingsError if the run is complete."""
    head = Path(settings.output) / "head"
    if head.exists():
        raise SettingsError(
            f"{head} exists, so this run is complete: name another output to train another head"
        )


def _bar(steps: int, begin: int, progress: bool) -> Any:
    disable = None if progress else True
    return tqdm(total=steps, initial=begin, unit="step", disable=disable)


def _reported_step(
    settings: TrainSettings,
    optimiser: optax.GradientTransformation,
    parts: Parts,
    state: TrainState,
    materials: Materials,
    indices: list[int],
) -> tuple[TrainState, dict[str, Any], float]:
    """Takes a step; returns the state, what a second run would repeat of it, and tokens/s."""
    step, started = int(state.step) + 1, time.perf_counter()
    key = jax.random.fold_in(jax.random.key(settings.seed), step)
    state, metrics, norm = take_step(settings, optimiser, parts, state, materials, indices, key)
    report = _report(metrics)
    if not np.isfinite([report["loss"], norm]).all():
        kept = _keep_batch(Path(settings.output), step, materials, indices)
        poisoned = [i for i in indices if not _is_finite(materials.source(i))]
        raise TrainingError(
            f"step {step}: the loss is {report['loss']}, the gradient's norm {norm}. The last "
            f"checkpoint is intact, the batch is in {kept}. "
            + (
                f"The target's features of rows {poisoned} are not finite: write them again, or "
                "run the target in float32"
                if poisoned
                else "Going on would end here again: lower learning_rate, in another output"
            )
        )
    report |= {
        "gradient_norm": norm,
        "learning_rate": float(learning_rate(settings)(step - 1)),
        "epoch": step * settings.rows_per_step / len(materials.rows),
    }
    tokens = len(indices) * settings.row_tokens
    return state, report, tokens / (time.perf_counter() - started)


def take_step(
    settings: TrainSettings,
    optimiser: optax.GradientTransformation,
    parts: Parts,
    state: TrainState,
    materials: Materials,
    indices: list[int],
    key: jax.Array,
) -> tuple[TrainState, Metrics, float]:
    """Takes one step over rows, one after the other; returns state, metrics and gradient norm."""
    sums: Any = None
    for place, index in enumerate(indices):
        drawn = jax.random.fold_in(jax.random.fold_in(key, TRAINING), place)
        row = materials.row(index)
        new = row_gradients(settings, parts, state.trainable, row, materials.teacher, drawn)
        sums = new if sums is None else add(sums, new)
    metrics, slopes = sums
    state, norm = apply(optimiser, state, metrics, slopes)
    return state, jax.device_get(metrics), float(norm)


def validate(
    settings: TrainSettings, parts: Parts, state: TrainState, materials: Materials
) -> dict[str, Any]:
    """Returns the metrics of all validation rows, with the same draws every time."""
    assert materials.validation is not None
    rows, source = materials.validation
    key = jax.random.fold_in(jax.random.key(settings.seed), 0)  # steps count from 1
    key = jax.random.fold_in(key, VALIDATION)
    sums: Any = None
    for index in range(len(rows)):
        row = shifted(rows[index], *map(jnp.asarray, source(index)))
        drawn = jax.random.fold_in(key, index)
        new = row_metrics(settings, parts, state.trainable, row, materials.teacher, drawn)
        sums = new if sums is None else add(sums, new)
    return _report(jax.device_get(sums))


def trained_head(
    settings: TrainSettings, parts: Parts, state: TrainState, dtype: jnp.dtype
) -> Drafter:
    """Returns the head as it is saved, its weights rounded to bfloat16, in some dtype.

    A frozen embedding is not saved, so it is not rounded.
    """

    def rounded(array: jax.Array) -> jax.Array:
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return array
        return array.astype(jnp.bfloat16).astype(dtype)

    graphdef, arrays = nnx.split(parts.build(state.trainable))
    head = nnx.merge(graphdef, jax.tree.map(rounded, arrays))
    if settings.embedding == "frozen":
        head.embedding[...] = parts.frozen["embedding"].astype(dtype)
    return head


def save_head(folder: Path, head: Drafter, *, shares_embedding: bool) -> Path:
    """Writes a trained head as a native checkpoint.

    Args:
      folder: to make.
      head: what `trained_head` returned.
      shares_embedding: the embedding is the target's, so it is left out.

    Raises:
      CheckpointError: the folder exists, or cannot be written.
    """
    config, arrays = head.config, checkpoint.arrays_of(head)
    if shares_embedding:
        config = dataclasses.replace(config, own_embedding=False)
        del arrays["embedding"]
    checkpoint.save(folder, config, arrays)
    return folder


def _report(metrics: Metrics) -> dict[str, Any]:
    return {
        "loss": float(metrics.mean_loss),
        "accuracy": [round(float(x), 6) for x in metrics.accuracy],
        "acceptance_length": float(metrics.acceptance_length),
        "elements": int(metrics.total.sum()),
    }


def _is_finite(arrays: tuple[Any, ...]) -> bool:
    return all(bool(jnp.isfinite(array).all()) for array in arrays)


def _keep_batch(output: Path, step: int, materials: Materials, indices: list[int]) -> Path:
    path = output / f"failed-batch-{step}.npz"
    rows = [materials.rows[index] for index in indices]
    names = [field.name for field in dataclasses.fields(rows[0])]
    arrays: dict[str, Any] = {n: np.stack([getattr(row, n) for row in rows]) for n in names}
    arrays["rows"] = np.asarray(indices)

    def write(part: Path) -> None:
        with part.open("wb") as file:
            np.savez_compressed(file, **arrays)

    into_place(path, write)
    return path
