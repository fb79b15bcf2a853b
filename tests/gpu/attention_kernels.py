"""The attention kernels at the sizes of real models, compiled but not run.

    python attention_kernels.py DEVICE CASE...

DEVICE is a name in `ahead_of_time.DEVICES`. Prints what the compiler says of each case in `CASES`,
as JSON.
"""

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # else the CUDA plugin looks for a driver

import jax
import jax.numpy as jnp
from assembler import kernel_report

from peagle_jax.kernels import prefill_attention, verify_attention


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel and the shapes that it is called with, in the letters of its docstring."""

    kernel: Callable[..., jax.Array]
    batch: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    slots: int
    window: int | None = None
    sinks: bool = False

    def report(self, device: str) -> dict[str, Any]:
        """Returns what the compiler says of it."""

        def bfloat16(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

        numbers = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        cached = bfloat16(self.batch, self.kv_heads, self.slots, self.head_dim)
        queries = bfloat16(self.batch, self.rows, self.heads, self.head_dim)
        arguments = {"queries": queries, "keys": cached, "values": cached}
        arguments |= {"first": numbers, "base": numbers}
        if self.kernel is prefill_attention:
            arguments["counts"] = numbers
        if self.sinks:
            arguments["sinks"] = bfloat16(self.heads)
        call = functools.partial(self.kernel, window=self.window)
        return kernel_report(device, lambda given: call(**given), (arguments,))


verify = functools.partial(Case, verify_attention)
prefill = functools.partial(Case, prefill_attention)
CASES = {
    "verify-llama-8b": verify(8, 4, 32, 8, 128, 8192),  # 16 rows
    "verify-llama-70b": verify(1, 8, 64, 8, 128, 32768),  # 64 rows
    "verify-qwen3-14b": verify(8, 6, 40, 8, 128, 8192),  # 30 rows
    "verify-qwen3-0.6b": verify(1, 1, 16, 8, 128, 512),  # 2 rows
    "verify-gpt-oss": verify(8, 4, 64, 8, 64, 8192, sinks=True),
    "verify-gpt-oss-window": verify(8, 4, 64, 8, 64, 131, window=128, sinks=True),
    "verify-smollm": verify(1, 4, 9, 3, 64, 1024),
    "draft-gpt-oss": verify(8, 10, 64, 8, 64, 8192),  # two tiles
    "draft-70b": verify(1, 16, 64, 8, 128, 8192),  # two tiles of 64 rows
    "prefill-llama-8b": prefill(8, 1024, 32, 8, 128, 1024),
    "prefill-gpt-oss-window": prefill(8, 1024, 64, 8, 64, 1155, window=128, sinks=True),
    "prefill-gpt-oss": prefill(8, 1024, 64, 8, 64, 32768, sinks=True),
    "prefill-short": prefill(1, 65, 9, 3, 64, 65),
}


def main() -> None:
    """Compiles what the command line names."""
    device, *names = sys.argv[1:]
    print(json.dumps({name: CASES[name].report(device) for name in names}))


if __name__ == "__main__":
    main()
