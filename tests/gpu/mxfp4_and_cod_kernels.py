"""Kernels of packed experts and of training attention at real sizes, compiled but not run.

    python mxfp4_and_cod_kernels.py DEVICE CASE...

DEVICE is a name in `ahead_of_time.DEVICES`. Prints what the compiler says of each case in `CASES`,
as JSON.
"""

import dataclasses
import json
import os
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # else the CUDA plugin looks for a driver

import jax
import jax.numpy as jnp
from assembler import kernel_report

from peagle_jax.kernels import mxfp4_product
from peagle_jax.training.mask import Rows, among

WIDTH = 2880  # of GPT-OSS, and of its experts


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """Returns an argument."""
    return jax.ShapeDtypeStruct(shape, dtype)


@dataclasses.dataclass(frozen=True)
class Product:
    """Blocks of so many rows times GPT-OSS' experts."""

    blocks: int
    size: int
    features: int
    experts: int = 32
    dtype: str = "bfloat16"

    def report(self, device: str) -> dict[str, Any]:
        """Returns what the compiler says of it."""
        scales = self.experts, self.features, WIDTH // 32
        arguments = (
            array(self.blocks, self.size, WIDTH, dtype=self.dtype),
            array(self.blocks, dtype=jnp.int32),
            array(dtype=jnp.int32),
            array(*scales, 16, dtype=jnp.uint8),
            array(*scales, dtype=jnp.uint8),
        )
        return kernel_report(device, mxfp4_product, arguments)


@dataclasses.dataclass(frozen=True)
class Attention:
    """A layer's attention in training, with its gradients, as the drafter calls it."""

    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    def report(self, device: str) -> dict[str, Any]:
        """Returns what the compiler says of it."""

        def both(rows: Rows, slopes: jax.Array, *qkv: jax.Array) -> Any:
            out, pull = jax.vjp(lambda *qkv: among(rows)(0, *qkv, self.window, None)[0], *qkv)
            return out, pull(slopes)

        queries = array(1, self.rows, self.heads, self.head_dim)
        keys = array(1, self.kv_heads, self.rows, self.head_dim)
        rows = Rows(*[array(self.rows, dtype=jnp.int32)] * 3)
        return kernel_report(device, both, (rows, queries, queries, keys, keys))


CASES = {
    "gate-up": Product(4, 8, 2 * WIDTH),  # one row, four experts
    "down": Product(4, 8, WIDTH),
    "down-120b": Product(16, 8, WIDTH, 128),
    "gate-up-16": Product(48, 16, 2 * WIDTH),  # 64 rows of the 20B
    "gate-up-32": Product(48, 32, 2 * WIDTH),
    "gate-up-float32": Product(4, 8, 2 * WIDTH, dtype="float32"),
    "down-32-float32": Product(16, 32, WIDTH, dtype="float32"),
    "cod-llama-8b": Attention(8192, 32, 8, 128),
    "cod-qwen3-window": Attention(8192, 32, 4, 128, 512),
    "cod-gpt-oss": Attention(8192, 64, 8, 64),
    "cod-gpt-oss-window": Attention(8192, 64, 8, 64, 128),
    "cod-odd": Attention(8201, 32, 8, 128),
}


def main() -> None:
    """Compiles what the command line names."""
    device, *names = sys.argv[1:]
    print(json.dumps({name: CASES[name].report(device) for name in names}))


if __name__ == "__main__":
    main()
