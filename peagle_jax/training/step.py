"""One optimiser step over packed rows: functions that any loop around optax can call."""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax

from peagle_jax.training import unroll
from peagle_jax.training.cod import sample
from peagle_jax.training.flat import PackedRow
from peagle_jax.training.loss import LOSSES, TargetHead
from peagle_jax.training.metrics import Metrics
from peagle_jax.training.partition import gradients
from peagle_jax.training.settings import TrainSettings
from peagle_jax.training.trainable import MASK_ROW, Parts

Arrays = dict[str, jax.Array]

# Root mean square of an AdamW update of rate 1, to which Muon's are scaled (arXiv 2502.16982).
MUON_RMS = 0.2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that changes from step to step.

    Attributes:
      step: `[]` int32, steps taken.
      trainable: float32 masters by name.
      moments: the optimiser's state.
    """

    step: jax.Array
    trainable: Arrays
    moments: optax.OptState

    @classmethod
    def start(cls, trainable: Arrays, optimiser: optax.GradientTransformation) -> Self:
        """Returns the state before the first step."""
        masters = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), trainable)
        return cls(jnp.int32(0), masters, optimiser.init(masters))


def learning_rate(settings: TrainSettings) -> optax.Schedule:
    """Returns the learning rate by step: linear warm-up, then what `schedule` says."""
    top, falling = settings.learning_rate, settings.steps - settings.warmup_steps
    last = settings.final_learning_rate
    after = {
        "cosine": optax.cosine_decay_schedule(top, falling, alpha=last),
        "linear": optax.linear_schedule(top, top * last, falling),
        "constant": optax.constant_schedule(top),
    }[settings.schedule]
    if not settings.warmup_steps:
        return after
    # The first step is not at 0, where it would be lost.
    rise = optax.linear_schedule(top / settings.warmup_steps, top, settings.warmup_steps - 1)
    return optax.join_schedules([rise, after], [settings.warmup_steps])


@functools.cache  # the same object for the same settings, so that `apply` is compiled once
def make_optimiser(settings: TrainSettings) -> optax.GradientTransformation:
    """Returns the optimiser of clipped gradients; only matrices decay.

    Muon takes the matrices of the blocks and of the projection, at the learning rate that would
    suit AdamW (its updates are scaled to the same size); Nesterov's AdamW takes tables, vectors and
    norms.
    """

    def is_matrix(tree: Arrays) -> Any:  # Muon hides from one part what the other takes
        return {name: getattr(x, "ndim", 0) > 1 for name, x in tree.items()}

    def for_muon(tree: Arrays) -> Any:
        tables = ("embedding", "lm_head")
        matrices = {name: is_a and name not in tables for name, is_a in is_matrix(tree).items()}
        numbers = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
        return {name: numbers if matrix else None for name, matrix in matrices.items()}

    rate, betas = learning_rate(settings), (settings.beta1, settings.beta2)
    if settings.optimiser == "muon":
        optimiser = optax.contrib.muon(
            rate,
            weight_decay=settings.weight_decay,
            weight_decay_mask=is_matrix,
            adam_b1=betas[0],
            adam_b2=betas[1],
            muon_weight_dimension_numbers=for_muon,
            consistent_rms=MUON_RMS,
        )
    else:
        optimiser = optax.adamw(rate, *betas, weight_decay=settings.weight_decay, mask=is_matrix)
    return optax.chain(optax.clip_by_global_norm(settings.clip_norm), optimiser)


@functools.partial(jax.jit, static_argnames="settings")
def row_gradients(
    settings: TrainSettings,
    parts: Parts,
    trainable: Arrays,
    row: PackedRow,
    teacher: TargetHead,
    key: jax.Array,
) -> tuple[Metrics, Arrays]:
    """Returns one packed row's metrics and the gradient of its summed loss.

    Args:
      settings: method, depths, loss and dtype; static.
      parts: the head; what is frozen, in the dtype that products are made in.
      trainable: float32 masters.
      row: documents, features and the target's states.
      teacher: the target's head.
      key: of the COD sample.
    """
    dtype = jnp.dtype(settings.dtype)

    def build(masters: Arrays) -> Any:
        # The gradients of thousands of slots add up in the mask token's row, one after the other;
        # in bfloat16 much would be lost.
        wide = ("embedding", MASK_ROW)
        arrays = {name: x if name in wide else x.astype(dtype) for name, x in masters.items()}
        return parts.build(arrays)

    row = dataclasses.replace(row, features=row.features.astype(dtype))
    if settings.method == "eagle-3":
        metrics, slopes = unroll.gradients(
            build,
            trainable,
            row,
            teacher,
            loss=LOSSES[settings.loss],
            num_steps=settings.num_depths,
            step_decay=settings.step_decay,
            chunk=settings.chunk,
            remat=settings.remat,
        )
    else:
        metrics, slopes = gradients(
            build,
            trainable,
            row,
            sample(key, row.loss_mask, row.document_ids, settings.cod),
            teacher,
            loss=LOSSES[settings.loss],
            num_depths=settings.num_depths,
            partitions=settings.partitions,
            chunk=settings.chunk,
            remat=settings.remat,
        )
    count = jnp.sum(metrics.total)
    return metrics, jax.tree.map(lambda slope: slope * count, slopes)


@functools.partial(jax.jit, static_argnames="settings")
def row_metrics(
    settings: TrainSettings,
    parts: Parts,
    trainable: Arrays,
    row: PackedRow,
    teacher: TargetHead,
    key: jax.Array,
) -> Metrics:
    """Returns the metrics of `row_gradients` alone; what is not asked for is not computed."""
    return row_gradients(settings, parts, trainable, row, teacher, key)[0]


@jax.jit
def add(sums: Any, more: Any) -> Any:
    """Adds up metrics and gradients of rows."""
    return jax.tree.map(jnp.add, sums, more)


@functools.partial(jax.jit, static_argnames="optimiser")
def apply(
    optimiser: optax.GradientTransformation, state: TrainState, metrics: Metrics, slopes: Arrays
) -> tuple[TrainState, jax.Array]:
    """Takes a step.

    Args:
      optimiser: that of the state; static.
      state: before.
      metrics: of all rows, summed.
      slopes: gradients of all rows' summed losses, summed.

    Returns:
      the state after it, and the gradient's norm before the optimiser does anything to it.
    """
    count = jnp.maximum(jnp.sum(metrics.total), 1)
    slopes = jax.tree.map(lambda slope: slope / count, slopes)
    updates, moments = optimiser.update(slopes, state.moments, state.trainable)
    trainable = optax.apply_updates(state.trainable, updates)
    return TrainState(state.step + 1, trainable, moments), optax.tree.norm(slopes)
