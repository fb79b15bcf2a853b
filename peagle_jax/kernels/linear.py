"""Products with a weight in the checkpoint's `[out, in]` order, in each platform's best form.

On CPU the form depends on the (static) number of rows; `benchmarks/products.py` measures them.
XLA's product of one row is a single-threaded matrix-vector product, so it is made in two halves,
which run on two threads. Its product of two or more rows packs the weights before it multiplies.
For a few rows that costs more than multiplying and summing in one fused loop, which reads the
weights once; so does the product of one row with a large weight, such as the vocabulary's.
"""

import jax
import jax.numpy as jnp

# Up to this many rows the fused loop beats the packing product.
FUSED_ROWS = 8
# In the fused loop, rows shorter than this are the inner loop, longer ones the outer.
LONG_ROW = 1024
# From this many output features on it also beats the matrix-vector product of one row, if the
# features are cut into blocks that threads share.
FUSED_FEATURES, FUSED_BLOCKS = 32768, 8


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Returns `x @ weight.T + bias`.

    A row's result does not depend on the other rows or on its place among them.

    Args:
      x: `[..., in]`.
      weight: `[out, in]`.
      bias: `[out]` or None.

    Returns:
      `[..., out]` in the dtype of `x`.
    """
    rows = x.reshape(-1, x.shape[-1])  # [R, in]
    out = jax.lax.platform_dependent(rows, weight, cpu=_cpu_product, default=_product)
    out = out.reshape(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


def _product(rows: jax.Array, weight: jax.Array) -> jax.Array:
    # "highest" keeps float32 products float32 on GPUs, which else round to TF32.
    return jax.lax.dot_general(rows, weight, (((1,), (1,)), ((), ())), precision="highest")


def _cpu_product(rows: jax.Array, weight: jax.Array) -> jax.Array:
    count, features = rows.shape[0], weight.shape[0]
    if count > FUSED_ROWS:
        return _product(rows, weight)
    if count > 1 and rows.shape[1] < LONG_ROW:
        return jnp.sum(weight[:, None] * rows, axis=-1).T
    if count > 1:
        return jnp.sum(weight * rows[:, None], axis=-1)
    if features >= FUSED_FEATURES and features % FUSED_BLOCKS == 0:
        blocks = weight.reshape(FUSED_BLOCKS, features // FUSED_BLOCKS, -1)
        return jnp.sum(blocks * rows, axis=-1).reshape(1, features)
    if features % 2 == 0:
        halves = weight.reshape(2, features // 2, -1)
        both = jnp.broadcast_to(rows, (2, rows.shape[1]))  # else XLA makes one product of it
        return jnp.matvec(halves, both).reshape(1, features)
    return _product(rows, weight)
