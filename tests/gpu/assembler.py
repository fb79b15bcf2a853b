"""What the assembler says of Pallas kernels that are compiled but not run.

Mosaic prints it on the process's standard output, partly from C++. Import this before anything is
compiled.
"""

import os
import re
import sys
import tempfile
from collections.abc import Callable
from typing import Any

os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"  # registers and spills
os.environ["MOSAIC_GPU_DUMP_RESOURCES"] = "1"  # shared memory

import ahead_of_time
import jax


def kernel_report(device: str, call: Callable[..., Any], arguments: Any) -> dict[str, Any]:
    """Compiles `call` of arrays of these shapes, and returns what is said of it.

    Returns:
      a list with a number for each kernel in it: "registers" of a thread, "spilled" bytes and
      bytes of "shared" memory; and the program's "temporaries" in bytes.
    """
    placed = ahead_of_time.on_device(device, arguments)
    compiled, log = _captured(lambda: jax.jit(call).lower(*placed).compile())

    def numbers(pattern: str) -> list[int]:
        return [int(number) for number in re.findall(pattern, log)]

    return {
        "registers": numbers(r"Used (\d+) registers"),
        "spilled": numbers(r"(\d+) bytes spill stores"),
        "shared": numbers(r"smem_scratch_bytes=(\d+)"),
        "temporaries": compiled.memory_analysis().temp_size_in_bytes,
    }


def _captured(call: Callable[[], Any]) -> tuple[Any, str]:
    """Returns a call's result, and what was written to standard output meanwhile."""
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        output = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            result = call()
        finally:
            os.dup2(output, 1)
            os.close(output)
        file.seek(0)
        return result, file.read().decode(errors="replace")
