"""The gradient of a packed row at the sizes of a real head, compiled but not run.

    python training_step.py DEVICE METHOD TARGET ROW_TOKENS PARTITIONS

DEVICE is a name in `ahead_of_time.DEVICES`; METHOD is p-eagle or eagle-3; TARGET is a preset, for
which the head has one layer. Prints what the compiler says as JSON.
"""

import json
import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # else the CUDA plugin looks for a driver
sys.path.insert(0, str(Path(__file__).parents[2]))

import ahead_of_time

from benchmarks.training_memory import shapes
from peagle_jax.training import TrainSettings, row_gradients


def main() -> None:
    """Compiles what the command line names."""
    device, method, target, row_tokens, partitions = sys.argv[1:]
    settings = TrainSettings(
        target=target,
        data=("none",),
        output="none",
        method=method,  # type: ignore[arg-type]
        num_layers=1,
        num_depths=8 if method == "p-eagle" else 3,
        draft_vocab_size=32000,
        row_tokens=int(row_tokens),
        partitions=int(partitions),
    )
    arguments = ahead_of_time.on_device(device, shapes(settings))
    compiled = row_gradients.lower(settings, *arguments).compile()
    memory = compiled.memory_analysis()
    report = {
        "temporaries": memory.temp_size_in_bytes,
        "results": memory.output_size_in_bytes,
        "kernels": compiled.as_text().count('custom_call_target="mosaic_gpu'),  # Pallas
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
