"""A tiny training run, for tests in this process and, as a program, for one that is killed.

python tests/training/runs.py OUTPUT [NAME=JSON ...]
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from conftest import TARGET, random_target

from peagle_jax.load import LoadedTarget
from peagle_jax.training.dataset import Document, Recipe, Writer
from peagle_jax.training.prepare import prepare
from peagle_jax.training.settings import TrainSettings
from peagle_jax.training.trainable import Parts
from peagle_jax.training.trainer import Materials, Measure, train

MASK = TARGET.vocab_size - 1


def target(seed: int = 0) -> LoadedTarget:
    config = dataclasses.replace(TARGET, num_layers=1, sliding_windows=(None,))
    return random_target(config, seed)


def make_data(folder: Path, seed: int = 0, documents: int = 16) -> Path:
    """Writes documents of random tokens, the first few of each not learnt."""
    rng = np.random.default_rng(seed)
    writer = Writer(folder, Recipe(TARGET.vocab_size, 1, {"seed": seed, "documents": documents}))
    for index in writer.missing():
        made = [
            Document(rng.integers(0, MASK - 1, n).astype(np.int32), np.arange(n) >= 3)
            for n in rng.integers(6, 20, documents)
        ]
        writer.write(index, made)
    return folder


def settings_of(output: Path, **changes: Any) -> TrainSettings:
    """A run of 6 steps of two rows; its data lies beside its output."""
    values: dict[str, Any] = {
        "target": "random",
        "data": (str(make_data(output.parent / "data")),),
        "output": str(output),
        "num_layers": 1,
        "num_depths": 3,
        "draft_vocab_size": 40,
        "row_tokens": 32,
        "rows_per_step": 2,
        "steps": 6,
        "warmup_steps": 2,
        "dtype": "float32",
        "save_every": 2,
        "learning_rate": 3e-3,
    }
    return TrainSettings(**{**values, **changes})


def prepared(
    settings: TrainSettings, model: LoadedTarget | None = None, mask: int = MASK
) -> tuple[Parts, Materials]:
    model = model or target()
    token = mask if settings.method == "p-eagle" else None
    return prepare(settings, model.config, model.weights, token)[:2]


def run(output: Path, measure: Measure | None = None, **changes: Any) -> Path:
    settings = settings_of(output, **changes)
    return train(settings, *prepared(settings), measure=measure)


def entries(output: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Returns what the metrics say, but for what another run would not repeat."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    found = [entry for entry in map(json.loads, lines) if entry["kind"] == kind]
    for entry in found:
        entry.pop("tokens_per_second", None)
    return found


def cache_programs(folder: Path) -> None:
    """Keeps compiled programs, which runs with other folders in their settings share."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


if __name__ == "__main__":
    if folder := os.environ.get("PROGRAMS"):
        cache_programs(Path(folder))
        # Read alone: JAX writes in place, and who is killed meanwhile would leave half a program.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    given = dict(argument.split("=", 1) for argument in sys.argv[2:])
    run(Path(sys.argv[1]), **{name: json.loads(value) for name, value in given.items()})
