"""Weights that stay packed in memory and are unpacked where they are used."""

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.kernels import Blocks, mxfp4_product, mxfp4_supports
from peagle_jax.kernels.mosaic import Interpret

# Weights that share one scale, and the bytes that hold them.
BLOCK, BLOCK_BYTES = 32, 16


class Buffer(nnx.Variable):
    """A part of the checkpoint that is no trainable weight."""


class MXFP4(nnx.Module):
    """Weights `[..., out, in]` in the OCP microscaling format MXFP4: 4.25 bits each.

    32 consecutive weights along `in` share a scale. A byte holds two E2M1 codes, the even
    weight's in its low bits; a scale is the exponent of E8M0, biased by 127.

    Args:
      shape: `[..., out, in]` of the weights; `in` is a multiple of 32.
    """

    def __init__(self, shape: tuple[int, ...]):
        *lead, size = shape
        self.blocks = Buffer(jnp.zeros((*lead, size // BLOCK, BLOCK_BYTES), jnp.uint8))
        self.scales = Buffer(jnp.full((*lead, size // BLOCK), 127, jnp.uint8))

    def unpack(self, index: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Returns the weights `[out, in]` at `index` of the first axis.

        They are exact in bfloat16 and float32 as long as the scale is a normal number there.
        """
        weights = unpack_mxfp4(self.blocks[...][index], self.scales[...][index], dtype)
        # XLA CPU would fuse this into the product, and unpack again for every row.
        return jax.lax.platform_dependent(
            weights, cpu=jax.lax.optimization_barrier, default=lambda unpacked: unpacked
        )

    @property
    def has_kernel(self) -> bool:
        """Whether `product` takes these weights, `[E, out, in]`."""
        _, features, blocks = self.scales[...].shape
        return mxfp4_supports(features, blocks * BLOCK)

    def product(self, rows: jax.Array, blocks: Blocks, interpret: Interpret) -> jax.Array:
        """Returns the product `[B, size, out]` of each block of rows `[B, size, in]`."""
        packed = self.blocks[...], self.scales[...]
        out = mxfp4_product(rows, blocks.experts, blocks.used, *packed, interpret=interpret)
        return out.astype(rows.dtype)


def unpack_mxfp4(blocks: jax.Array, scales: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns weights `[..., in]` of blocks `[..., in / 32, 16]`, scales `[..., in / 32]`."""
    # Shifts instead of one bitcast to pairs, which XLA does not fuse into a product's reading.
    codes = (blocks[..., None] >> jnp.array([0, 4], jnp.uint8)) & 15  # [..., in / 32, 16, 2]
    codes = jax.lax.bitcast_convert_type(codes.astype(jnp.uint4), jnp.float4_e2m1fn)
    factors = jax.lax.bitcast_convert_type(scales, jnp.float8_e8m0fnu)  # [..., in / 32]
    values = codes.astype(dtype) * factors.astype(dtype)[..., None, None]
    return values.reshape(*blocks.shape[:-2], -1)
