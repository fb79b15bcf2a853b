"""Training of P-EAGLE and EAGLE-3 heads: data, gradients and steps as functions, and a loop."""

from peagle_jax.training.cod import CodConfig, Elements, sample
from peagle_jax.training.dataset import Dataset
from peagle_jax.training.features import Online, Stored, read_row, shifted, write_features
from peagle_jax.training.flat import PackedRow, flat_inputs
from peagle_jax.training.folders import DataError
from peagle_jax.training.loss import LOSSES, TargetHead
from peagle_jax.training.metrics import Metrics
from peagle_jax.training.packing import PackedRows, batches
from peagle_jax.training.partition import gradients
from peagle_jax.training.prepare import find_mask_token, prepare
from peagle_jax.training.settings import SettingsError, TrainSettings
from peagle_jax.training.step import TrainState, apply, make_optimiser, row_gradients
from peagle_jax.training.trainable import Parts, split
from peagle_jax.training.trainer import (
    Materials,
    TrainingError,
    save_head,
    take_step,
    train,
    trained_head,
)

__all__ = [
    "LOSSES",
    "CodConfig",
    "DataError",
    "Dataset",
    "Elements",
    "Materials",
    "Metrics",
    "Online",
    "PackedRow",
    "PackedRows",
    "Parts",
    "SettingsError",
    "Stored",
    "TargetHead",
    "TrainSettings",
    "TrainState",
    "TrainingError",
    "apply",
    "batches",
    "find_mask_token",
    "flat_inputs",
    "gradients",
    "make_optimiser",
    "prepare",
    "read_row",
    "row_gradients",
    "sample",
    "save_head",
    "shifted",
    "split",
    "take_step",
    "train",
    "trained_head",
    "write_features",
]
