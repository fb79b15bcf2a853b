"""Memory of a training step by the number of segments, as XLA's memory analysis tells it.

Nothing runs: the gradient of one packed row is compiled for this machine's CPU, at the sizes of a
real head, with as many segments as are asked for.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.models import Drafter, Frozen
from peagle_jax.models.layers import RMSNorm
from peagle_jax.presets import TARGETS, usual_drafter
from peagle_jax.training import PackedRow, TargetHead, TrainSettings, row_gradients, split

MIB = 2**20


@click.command()
@click.option("--target", default="llama-3.1-8b", show_default=True, help="A known target.")
@click.option("--num-layers", default=4, show_default=True)
@click.option("--row-tokens", default=8192, show_default=True)
@click.option("--num-depths", default=8, show_default=True)
@click.option("--draft-vocab-size", default=32000, show_default=True)
@click.option("--partitions", "-p", multiple=True, default=(1, 2, 4, 8), show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--remat", is_flag=True)
@click.option("--output", type=Path, help="JSON file to write.")
def main(
    target: str,
    num_layers: int,
    row_tokens: int,
    num_depths: int,
    draft_vocab_size: int,
    partitions: tuple[int, ...],
    dtype: str,
    remat: bool,
    output: Path | None,
) -> None:
    """Compile, and print a table."""
    results: dict[int, dict[str, float]] = {}
    for count in partitions:
        settings = TrainSettings(
            target=target,
            data=("none",),
            output="none",
            num_layers=num_layers,
            num_depths=num_depths,
            draft_vocab_size=draft_vocab_size,
            row_tokens=row_tokens,
            partitions=count,
            remat=remat,
            dtype=dtype,  # type: ignore[arg-type]
        )
        found = compiled(settings).memory_analysis()
        results[count] = {
            "temporaries_mib": found.temp_size_in_bytes / MIB,
            "arguments_mib": found.argument_size_in_bytes / MIB,
            "results_mib": found.output_size_in_bytes / MIB,
        }
        click.echo(f"P={count}: {results[count]['temporaries_mib']:,.0f} MiB of temporaries")
    if output:
        output.write_text(json.dumps(results, indent=1) + "\n")


def compiled(settings: TrainSettings) -> Any:
    """Returns the compiled gradient of one row."""
    return row_gradients.lower(settings, *shapes(settings)).compile()


def shapes(settings: TrainSettings) -> Any:
    """Returns what `row_gradients` takes beside the settings, of a head with a frozen embedding."""
    config = usual_drafter(TARGETS[settings.target], settings.num_layers, settings.draft_vocab_size)
    if settings.method == "eagle-3":
        config = dataclasses.replace(config, mask_token_id=None)
    dtype, length, width = jnp.dtype(settings.dtype), settings.row_tokens, config.hidden_size

    def arguments() -> Any:
        head = Drafter(config, dtype=dtype, rngs=nnx.Rngs(0))
        parts = split(head, embedding=False)
        masters = jax.tree.map(lambda x: x.astype(jnp.float32), parts.trainable)
        row = PackedRow(
            jnp.zeros((length,), jnp.int32),
            jnp.zeros((length, config.feature_size), dtype),
            jnp.zeros((length, width), dtype),
            jnp.zeros((length,), bool),
            jnp.zeros((length,), jnp.int32),
        )
        norm = Frozen.of(RMSNorm(width, config.rms_norm_eps, dtype))
        return parts, masters, row, TargetHead(norm, head.lm_head[...]), jax.random.key(0)

    return jax.eval_shape(arguments)


if __name__ == "__main__":
    main()
