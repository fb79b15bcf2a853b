"""What the Pallas Mosaic GPU kernels share: tiles in shared memory, and the tensor core's product.

One source serves sm_90 and sm_100: the warp-level `mma.sync`, which both have, and TMA copies.
On a CPU a kernel runs in GPU interpret mode, which simulates shared memory and barriers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

Transforms = tuple[Any, Any]  # tiling and swizzle; Pallas' types of refs and layouts are private
# False: on a GPU. True, or how: on a CPU.
Interpret = bool | plgpu.InterpretGPUParams


def devices_serve() -> bool:
    """Returns whether all GPUs of this process are Hoppers or data-centre Blackwells (9.x, 10.x).

    Older ones have no TMA, and consumer Blackwells (12.x) less shared memory than the kernels take.
    True if the process has no GPU.
    """
    gpus = (device for device in jax.local_devices() if device.platform == "gpu")
    return all(int(float(getattr(gpu, "compute_capability", 0))) in (9, 10) for gpu in gpus)


def swizzled(width: int, dtype: jnp.dtype) -> Transforms:
    """Returns how a matrix of so many columns lies in shared memory, for `mma` to read.

    Its rows, and those of the array that TMA copies it from, have to be a multiple of 8, and the
    bytes of a row one of 32.
    """
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = next(size for size in (128, 64, 32) if itemsize * width % size == 0)  # bytes
    tiling: Any = plgpu.TilingTransform  # whose base class is abstract to mypy
    swizzling: Any = plgpu.SwizzleTransform
    return tiling((8, swizzle // itemsize)), swizzling(swizzle)


def matrices(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Returns a scratch type: matrices `[..., rows, columns]` in shared memory, for `mma`."""
    return plgpu.SMEM(shape, dtype, transforms=swizzled(shape[-1], dtype))


def mma(acc: jax.Array, left: jax.Array, right: jax.Array, interpret: Interpret) -> jax.Array:
    """Returns `acc + left @ right`; interpret mode has no rule for `plgpu.mma`.

    Args:
      acc: `[M, N]` float32, `Layout.MMA_ACC`; M is a multiple of 16 for each warp along the rows.
      left: `[M, K]`, `Layout.MMA_LHS`.
      right: `[K, N]`, `Layout.MMA_RHS`.
      interpret: in interpret mode, which also takes float32 operands.
    """
    if interpret:
        return acc + jnp.dot(left, right, preferred_element_type=jnp.float32, precision="highest")
    return plgpu.mma(acc, left, right)


def filled(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    """Returns float32 registers that all hold `value`."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def interpreter(interpret: Interpret) -> Interpret:
    """Returns the argument `interpret` of `plgpu.kernel`."""
    return plgpu.InterpretGPUParams() if interpret is True else interpret
