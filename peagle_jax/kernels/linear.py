"""Products with a weight in the checkpoint's `[out, in]` order, in each platform's best form.

On CPU the form depends on the (static) number of rows. XLA's product of one row is a single
threaded matrix-vector product, and that of two or more rows packs the weights before it
multiplies, which costs more than reading them. So one row is multiplied in two halves that run
on two threads, a few rows are multiplied and summed in one fused loop that reads the weights
once, and many rows take the packing product. `benchmarks/products.py` measures the forms.
"""

import jax
import jax.numpy as jnp

# Up to this many rows the fused multiply-and-sum beats the packing product on CPU.
FUSED_ROWS = 8
# From this many output features on it also beats the matrix-vector product of one row.
FUSED_FEATURES = 8192


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Returns `x @ weight.T + bias`.

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
    return jax.lax.dot_general(rows, weight, (((1,), (1,)), ((), ())))


def _cpu_product(rows: jax.Array, weight: jax.Array) -> jax.Array:
    count, features = rows.shape[0], weight.shape[0]
    if count > FUSED_ROWS:
        return _product(rows, weight)
    if count == 1 and features < FUSED_FEATURES and features % 2 == 0:
        halves = weight.reshape(2, features // 2, -1)
        both = jnp.broadcast_to(rows, (2, *rows.shape))
        out = jax.lax.dot_general(halves, both, (((2,), (2,)), ((0,), (0,))))  # [2, out/2, 1]
        return out.reshape(1, features)
    return jnp.sum(weight * rows[:, None, :], axis=-1)
