"""Quantised checkpoints: what `quantization_config` says, and block FP8 weights.

MXFP4 experts stay packed; block FP8 weights become what they stand for.
"""

import dataclasses
from typing import Any

import numpy as np

from peagle_jax.convert.keys import Keys
from peagle_jax.convert.source import FLOATS, Tensor

FP8 = "F8_E4M3"
_SCALE_SUFFIX = "_scale_inv"
# Which method a family is published in; transformers knows more.
_METHODS = {
    "llama": ("fp8",),
    "qwen3": ("fp8",),
    "qwen3_moe": ("fp8",),
    "gpt_oss": ("mxfp4",),
}
# Modules that are not quantised: the tensors say it themselves. How transformers is to load them.
_IGNORED = ("modules_to_not_convert", "ignored_layers", "dequantize")


@dataclasses.dataclass(frozen=True)
class Quantization:
    """How the weights of a source are quantised.

    Attributes:
      mxfp4: experts are MXFP4.
      block: rows and columns of a block of FP8 weights that share a scale, None without FP8.
    """

    mxfp4: bool = False
    block: tuple[int, int] | None = None


def read_quantization(keys: Keys, model_type: str) -> Quantization:
    """Takes `quantization_config`, which may be absent.

    Raises:
      ConvertError: the method is not supported for the family, or one of its keys is not.
    """
    if keys.peek("quantization_config") is None:
        return Quantization()
    nested = keys.nested("quantization_config")
    method, supported = nested.take("quant_method"), _METHODS[model_type]
    if method not in supported:
        expected = f"{' or '.join(supported)} for {model_type}, or no quantization_config"
        raise nested.error("quant_method", method, expected)
    nested.ignore(_IGNORED)
    block = None if method == "mxfp4" else _read_block(nested)
    nested.done()
    return Quantization(method == "mxfp4", block)


def _read_block(keys: Keys) -> tuple[int, int]:
    """Takes the keys of block FP8 and returns the rows and columns of a block."""
    keys.only("activation_scheme", "dynamic")  # static adds scales of activations
    keys.only("fmt", "e4m3")
    keys.only("scale_fmt", "float")
    keys.only("expert_dtype", "fp8")
    value: Any = keys.peek("weight_block_size")
    block = keys.integers("weight_block_size")
    if block is None or len(block) != 2 or not all(size > 0 for size in block):
        raise keys.error("weight_block_size", value, "two positive integers, such as [128, 128]")
    return block[0], block[1]


def scale_name(weight: str) -> str:
    """Returns the name of the tensor with the scales of a weight."""
    return f"{weight}{_SCALE_SUFFIX}"


def scale_problems(scales: Tensor, weight: Tensor, block: tuple[int, int]) -> list[str]:
    """Returns what is wrong with shape and dtype of an FP8 weight and its scales."""
    if len(weight.shape) != 2:
        return [f"{weight.name} is {FP8} {weight.shape}, supported are FP8 weights of two axes"]
    expected = tuple(-(-size // part) for size, part in zip(weight.shape, block, strict=True))
    problems = []
    if scales.dtype not in FLOATS:
        problems.append(f"{scales.name} is {scales.dtype}, expected {', '.join(FLOATS)}")
    if scales.shape != expected:
        problems.append(
            f"{scales.name} is {scales.shape}, expected {expected}: {weight.shape} in blocks of "
            f"{block} (weight_block_size)"
        )
    return problems


def dequantise(weight: Tensor, scales: Tensor, block: tuple[int, int], out: np.ndarray) -> None:
    """Reads an FP8 weight, every value times its block's scale in float32.

    The last block of a row or column may be smaller. Beside the output this takes the weight's
    size in FP8 and that of a row of blocks in float32.

    Args:
      weight: `[out, in]`, FP8.
      scales: `[out / rows, in / columns]`, rounded up.
      block: rows and columns of a block.
      out: `[out, in]`, filled with the products cast to its dtype.

    Raises:
      ConvertError: a file cannot be read.
    """
    rows, columns = block
    values, factors = weight.read(), scales.read().astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # the reader looks for infinity and NaN
        for index, factor in enumerate(factors):
            part = slice(index * rows, (index + 1) * rows)
            product = values[part].astype(np.float32)
            product *= np.repeat(factor, columns)[: product.shape[1]]
            out[part] = product
