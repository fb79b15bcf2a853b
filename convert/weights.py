"""From tensors on disk to arrays in memory, one tensor at a time.

The output arrays are allocated first; a tensor is read straight into its rows, or where its dtype
changes, through a buffer of a few megabytes. So no more memory is needed than the output's, and
that of one FP8 tensor, or of one expert whose axes the source has in another order.
"""

from collections.abc import Callable, Mapping

import jax
import ml_dtypes
import numpy as np

from peagle_jax.convert.errors import ConvertError, listed
from peagle_jax.convert.plan import Plan, Slot
from peagle_jax.convert.quantization import FP8, dequantise, scale_name, scale_problems
from peagle_jax.convert.source import FLOATS, Source, Tensor

_ALIGNMENT = 64  # bytes; JAX takes over a NumPy buffer without a copy only if aligned to this
_CHECK_ELEMENTS = 1 << 20
MXFP4_NAN_SCALE = 255
# By bytes per element: all bits but the sign, and the bits of infinity (bfloat16, float32).
_BITS = {
    2: (np.uint16(0x7FFF), np.uint16(0x7F80)),
    4: (np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)),
}


def check_tensors(source: Source, plan: Plan) -> None:
    """Checks that the plan and the source name the same tensors, of fitting shape and dtype.

    Raises:
      ConvertError: naming every tensor that is missing, unexpected or mis-shaped.
    """
    equal = {name: plan.slots[like] for name, like in plan.equal}
    slots = {**plan.slots, **equal}
    natives = plan.natives()
    weights = {scale_name(tensor.name): tensor for tensor in _fp8_weights(source, plan)}
    wanted = {*slots, *weights}
    problems = [f"{name} is missing" for name in sorted(wanted - set(source.tensors))]
    for name, tensor in sorted(source.tensors.items()):
        if name in weights:
            assert plan.block is not None
            problems += scale_problems(tensor, weights[name], plan.block)
        elif name in slots:
            fp8 = plan.block is not None and name in plan.slots
            problems += _misfit(tensor, slots[name], natives[slots[name].native], fp8)
        elif name not in plan.used:
            problems.append(f"{name} {tensor.shape} is unexpected")
    if problems:
        raise ConvertError(f"{source.folder}: tensors do not fit the config: {listed(problems)}")


def _fp8_weights(source: Source, plan: Plan) -> list[Tensor]:
    """Returns the tensors to dequantise, none where the config says nothing of FP8."""
    if plan.block is None:
        return []
    return [t for name, t in source.tensors.items() if name in plan.slots and t.dtype == FP8]


def _misfit(tensor: Tensor, slot: Slot, native: jax.ShapeDtypeStruct, fp8: bool) -> list[str]:
    allowed = ("U8",) if native.dtype == np.uint8 else (*FLOATS, FP8) if fp8 else FLOATS
    if tensor.dtype not in allowed:
        hint = "; quantization_config says nothing of FP8 here" if tensor.dtype == FP8 else ""
        return [f"{tensor.name} is {tensor.dtype}, expected {', '.join(allowed)}{hint}"]
    fits = tensor.size == slot.shape[0] if slot.any_shape else tensor.shape == slot.shape
    return [] if fits else [f"{tensor.name} is {tensor.shape}, expected {slot.shape}"]


def stored_dtype(source: Source, plan: Plan, wanted: str) -> np.dtype:
    """Returns the dtype to store: the one asked for, or the narrowest that keeps every value.

    Args:
      source: the tensors.
      plan: which of them are stored.
      wanted: "bfloat16", "float32", or "keep", which is bfloat16 if every tensor is, or is
        quantised, else float32 (float16 is no part of bfloat16).

    Raises:
      ConvertError: `wanted` is none of these.
    """
    if wanted not in ("keep", "bfloat16", "float32"):
        raise ConvertError(f"dtype {wanted!r} is not keep, bfloat16 or float32")
    if wanted == "keep":
        every = {source.tensors[name].dtype for name in plan.slots}
        wanted = "bfloat16" if every <= {"BF16", "U8", FP8} else "float32"
    return np.dtype(ml_dtypes.bfloat16 if wanted == "bfloat16" else np.float32)


def read_arrays(
    source: Source, plan: Plan, dtype: np.dtype, update: Callable[[int], object]
) -> dict[str, jax.Array]:
    """Reads every tensor into its place.

    Args:
      source: the tensors, which `check_tensors` found to fit.
      plan: where they go.
      dtype: of the arrays.
      update: is told how many more bytes of the arrays are filled.

    Returns:
      the native arrays by name, on the CPU.

    Raises:
      ConvertError: tensors hold NaN or infinities (or overflow `dtype`), differ where they must
        be equal, or cannot be read; it names them.
    """
    arrays = {
        name: _empty(native.shape, np.dtype(native.dtype))
        for name, native in plan.natives(dtype).items()
    }
    tensors = [source.tensors[name] for name in plan.slots]
    problems = []
    for tensor in sorted(tensors, key=lambda t: (t.path, t.offset)):
        slot = plan.slots[tensor.name]
        view = slot.view(arrays[slot.native])
        if tensor.dtype == FP8:
            assert plan.block is not None
            dequantise(tensor, source.tensors[scale_name(tensor.name)], plan.block, view)
        else:
            tensor.read_into(view)
        if not _is_finite(view, is_scale=slot.native.endswith(".scales")):
            problems.append(f"{tensor.name} holds NaN or infinity")
        update(view.nbytes)
    if not problems:
        problems = [
            f"{name} differs from {like}, though tie_word_embeddings is true"
            for name, like in plan.equal
            if not _same(source.tensors[name], source.tensors[like])
        ]
    if problems:
        raise ConvertError(f"{source.folder}: {listed(problems)}")
    return _on_cpu({**arrays, **plan.given})


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _is_finite(view: np.ndarray, is_scale: bool) -> bool:
    """Whether all values are finite, by their bits, which is quickest.

    Without the sign bit, infinity and NaN are the largest bit patterns of bfloat16 and float32.
    MXFP4 has neither, but its scales have a NaN.
    """
    # In the order of memory no view of a slot is copied: its elements lie together.
    bits = view.ravel(order="K").view(f"u{view.itemsize}")
    for start in range(0, bits.size, _CHECK_ELEMENTS):
        part = bits[start : start + _CHECK_ELEMENTS]
        if view.dtype != np.uint8:
            magnitude, infinity = _BITS[view.itemsize]
            if (part & magnitude).max() >= infinity:
                return False
        elif is_scale and part.max() == MXFP4_NAN_SCALE:
            return False
    return True


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape hold equal values; float32 holds those of all dtypes."""
    if one.dtype == other.dtype:
        pairs = zip(one.chunks(), other.chunks(), strict=True)
        return all(np.array_equal(a, b) for (_, a), (_, b) in pairs)
    whole = np.empty(one.size, np.float32)
    one.read_into(whole)
    parts = ((whole[i : i + len(part)], part) for i, part in other.chunks())
    return all(np.array_equal(a, part.astype(np.float32)) for a, part in parts)


def _on_cpu(arrays: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Returns JAX arrays that share the given buffers, on the CPU whatever else there is.

    Orbax writes JAX arrays as they are, while it copies NumPy arrays first.
    """
    cpu = jax.devices("cpu")[0]
    return {name: jax.device_put(a, cpu, may_alias=True) for name, a in arrays.items()}
