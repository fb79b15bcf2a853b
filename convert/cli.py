"""The command `peagle-convert`."""

import contextlib
import dataclasses
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import click
import jax
from rich.console import Console
from rich.table import Table

from peagle_jax.checkpoint import CheckpointError
from peagle_jax.config import ConfigError, TargetConfig
from peagle_jax.convert.aux_ids import AuxConvention
from peagle_jax.convert.drafters import Given
from peagle_jax.convert.errors import ConvertError
from peagle_jax.convert.summary import Stored, Summary, summarise
from peagle_jax.convert.to_hf import FORMATS, SHARD_BYTES, Export, Format, to_hf
from peagle_jax.convert.to_native import Conversion, to_native

_WIDE = 1000  # columns where no terminal says how many there are, so that no line is broken
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class _Size(click.ParamType[int]):
    """A number of bytes such as 5GB, in powers of ten as transformers counts them."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", value, re.IGNORECASE)
        size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
        if size < 1:
            self.fail(f"{value!r} is no size such as 5GB or 500MB", param, ctx)
        return size


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Convert model checkpoints to the format that peagle_jax loads, and back."""


def _path(name: str) -> Callable[..., Any]:
    return click.argument(name, type=click.Path(path_type=Path))


def _about_drafter(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that say about a foreign drafter what its config does not."""
    for option in (
        click.option(
            "--mask-token-id",
            type=click.IntRange(min=0),
            help="Mask token of a P-EAGLE head, where its config does not name it.",
        ),
        click.option(
            "--aux-convention",
            type=click.Choice(get_args(AuxConvention)),
            help="How a drafter's config numbers the target's hidden states that it reads: by "
            "boundary (the input of layer id), or by the layer whose output it is.",
        ),
        click.option(
            "--target-layers",
            type=click.IntRange(min=1),
            help="Layers of a drafter's target, where its config does not say what it reads.",
        ),
    ):
        command = option(command)
    return command


_progress = click.option(
    "--progress/--no-progress", default=True, help="Show a progress bar on a terminal."
)


@main.command("to-native")
@_path("source")
@_path("destination")
@click.option(
    "--dtype",
    type=click.Choice(["keep", "bfloat16", "float32"]),
    default="keep",
    show_default=True,
    help="Dtype to store; keep is bfloat16 if all weights are, else float32.",
)
@_about_drafter
@_progress
def to_native_command(
    source: Path,
    destination: Path,
    dtype: str,
    target_layers: int | None,
    aux_convention: AuxConvention | None,
    mask_token_id: int | None,
    progress: bool,
) -> None:
    """Convert the Hugging Face folder SOURCE, a target or a drafter, to DESTINATION."""
    with _errors_in_one_line():
        done = to_native(
            source,
            destination,
            dtype,
            target_layers,
            progress,
            aux_convention=aux_convention,
            mask_token_id=mask_token_id,
        )
    click.echo(describe(done))


@main.command("to-hf")
@_path("source")
@_path("destination")
@click.option(
    "--format",
    "layout",
    type=click.Choice(FORMATS),
    required=True,
    help="hf for targets; for drafters vllm (what vllm serve takes) or speculators (the package).",
)
@click.option(
    "--target",
    metavar="NAME_OR_PATH",
    help="Hub id or folder of a drafter's target, which the speculators layout names.",
)
@click.option(
    "--max-shard-size",
    type=_Size(),
    default=SHARD_BYTES,
    show_default="5GB",
    help="Size above which tensors go to several files.",
)
@_progress
def to_hf_command(
    source: Path,
    destination: Path,
    layout: Format,
    target: str | None,
    max_shard_size: int,
    progress: bool,
) -> None:
    """Convert the native checkpoint SOURCE to DESTINATION, for other software to read."""
    with _errors_in_one_line():
        done = to_hf(source, destination, layout, target, max_shard_size, progress)
    for warning in done.warnings:
        click.echo(f"warning: {warning}", err=True)
    click.echo(describe_export(done))


@main.command("inspect")
@_path("folder")
@_about_drafter
@click.option("--tensors", is_flag=True, help="List every tensor too.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def inspect_command(
    folder: Path,
    target_layers: int | None,
    aux_convention: AuxConvention | None,
    mask_token_id: int | None,
    tensors: bool,
    as_json: bool,
) -> None:
    """Say what FOLDER holds, a native checkpoint or a Hugging Face folder."""
    with _errors_in_one_line():
        summary = summarise(folder, Given(target_layers, aux_convention, mask_token_id))
    if as_json:
        click.echo(json.dumps(_as_json(summary, tensors), indent=2))
        return
    _print_table(
        [(key.replace("_", " "), _shown(key, value)) for key, value in summary.facts.items()]
    )
    if tensors:
        click.echo()
        _print_table([_row(tensor) for tensor in summary.tensors])


@contextlib.contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Sets JAX up for work on files, and ends the command in one line where that fails."""
    # Nothing is computed, and an accelerator's client would reserve most of its memory.
    jax.config.update("jax_platforms", "cpu")
    # Orbax logs the traceback of what it raises; the one line below says it.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        yield
    except (ConvertError, CheckpointError, ConfigError) as error:
        click.echo(f"error: {error}", err=True)
        raise SystemExit(1) from error


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


def describe_export(done: Export) -> str:
    """Returns a line about an export."""
    files = f"{done.files} file{'' if done.files == 1 else 's'}"
    return (
        f"{done.path}: {done.format}, {done.tensors:,} tensors in {files}, "
        f"{done.tensor_bytes:,} bytes"
    )


def _as_json(summary: Summary, tensors: bool) -> dict[str, Any]:
    listed = [dataclasses.asdict(tensor) for tensor in summary.tensors]
    return {"facts": summary.facts, **({"tensors": listed} if tensors else {})}


def _row(tensor: Stored) -> tuple[str, str, str, str]:
    axes = ", ".join(map(str, tensor.shape))
    return tensor.name, tensor.dtype, f"[{axes}]", f"{tensor.nbytes:,} bytes"


def _shown(key: str, value: Any) -> str:
    """Returns a fact as text; a token's id is a name, and has no separators."""
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not key.endswith("_id") else str(value)


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    """Prints aligned columns, without a trace of the terminal where there is none."""
    console = Console(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for column in range(len(rows[0])):
        table.add_column(style="" if column else "bold", overflow="fold")
    for row in rows:
        table.add_row(*row)
    with console.capture() as captured:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))
