"""The command `peagle-convert`."""

import logging
from pathlib import Path

import click
import jax

from peagle_jax.config import TargetConfig
from peagle_jax.convert.errors import ConvertError
from peagle_jax.convert.to_native import Conversion, to_native


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Convert model checkpoints to the format that peagle_jax loads."""


@main.command("to-native")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["keep", "bfloat16", "float32"]),
    default="keep",
    show_default=True,
    help="Dtype to store; keep is bfloat16 if all weights are, else float32.",
)
@click.option(
    "--target-layers",
    type=click.IntRange(min=1),
    help="Layers of a drafter's target, where the drafter's config does not say what it reads.",
)
@click.option("--progress/--no-progress", default=True, help="Show a progress bar on a terminal.")
def to_native_command(
    source: Path, destination: Path, dtype: str, target_layers: int | None, progress: bool
) -> None:
    """Convert the Hugging Face folder SOURCE, a target or a drafter, to DESTINATION."""
    # Nothing is computed, and an accelerator's client would reserve most of its memory.
    jax.config.update("jax_platforms", "cpu")
    # Orbax logs the traceback of what it raises; the one line below says it.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        done = to_native(source, destination, dtype, target_layers, progress)
    except ConvertError as error:
        click.echo(f"error: {error}", err=True)
        raise SystemExit(1) from error
    click.echo(describe(done))


def describe(done: Conversion) -> str:
    """Returns a line or two about a conversion."""
    config = done.config
    size = f"{done.parameters:,} parameters, {done.dtype}, {done.array_bytes:,} bytes"
    if isinstance(config, TargetConfig):
        kind = f"target, family {config.family}, {config.num_layers} layers"
        return f"{done.path}: {kind}, {size}"
    name = "EAGLE-3" if config.mask_token_id is None else "P-EAGLE"
    kind = f"drafter, {name} head, {config.num_layers} layers"
    vocabulary = f"draft vocabulary {config.draft_vocab_size} of {config.vocab_size}"
    reads = ", ".join(map(str, config.aux_boundaries))
    return (
        f"{done.path}: {kind}, {vocabulary}, {size}\n"
        f"reads the target at boundaries {reads} ({config.aux_source_convention})"
    )
