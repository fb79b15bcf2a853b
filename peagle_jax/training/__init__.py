"""Training of P-EAGLE heads: sampling, masks, loss and gradients as functions of arrays."""

from peagle_jax.training.cod import CodConfig, Elements, sample
from peagle_jax.training.flat import PackedRow, flat_inputs
from peagle_jax.training.loss import LOSSES, TargetHead
from peagle_jax.training.metrics import Metrics
from peagle_jax.training.partition import gradients
from peagle_jax.training.trainable import Parts, split

__all__ = [
    "LOSSES",
    "CodConfig",
    "Elements",
    "Metrics",
    "PackedRow",
    "Parts",
    "TargetHead",
    "flat_inputs",
    "gradients",
    "sample",
    "split",
]
