"""Conversion of foreign checkpoints; the only place that knows their formats."""

from peagle_jax.convert.errors import ConvertError
from peagle_jax.convert.to_native import Conversion, convert_drafter, convert_target, to_native

__all__ = ["Conversion", "ConvertError", "convert_drafter", "convert_target", "to_native"]
