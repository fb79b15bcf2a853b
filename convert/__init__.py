"""Conversion of foreign checkpoints; the only place that knows their formats."""

from peagle_jax.convert.errors import ConvertError
from peagle_jax.convert.to_hf import Export, to_hf
from peagle_jax.convert.to_native import Conversion, convert_drafter, convert_target, to_native

__all__ = [
    "Conversion",
    "ConvertError",
    "Export",
    "convert_drafter",
    "convert_target",
    "to_hf",
    "to_native",
]
