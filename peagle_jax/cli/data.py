"""`peagle-jax data`: what a head learns from."""

import dataclasses
from pathlib import Path
from typing import Any

import click

import peagle_jax
from peagle_jax.chat_data import write_chats
from peagle_jax.cli.options import load_models, sampling_options, user_errors
from peagle_jax.cli.prompts_file import read_rows
from peagle_jax.cli.settings import settings_options
from peagle_jax.distill import Written, write_answers, write_prompts
from peagle_jax.load import load_tokenizer
from peagle_jax.training.features import write_features
from peagle_jax.training.prepare import online_source
from peagle_jax.training.settings import TrainSettings

_TARGET = click.option("--target", required=True, help="Folder or hub id of the target.")
_DTYPE = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Of the target's weights. [default: float32 on CPU, else as stored]",
)
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_NEW = click.Path(path_type=Path)


@click.group()
def data() -> None:
    """Make the data that `peagle-jax train` takes."""


@data.command()
@_TARGET
@_DTYPE
@click.option(
    "--count", type=click.IntRange(1), default=1000, show_default=True, help="Prompts to ask for."
)
@click.option("--out", type=_NEW, required=True, help="File of JSON lines to write.")
@click.option("--opening", default="", help="How every prompt begins.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=256, show_default=True)
@click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True)
@sampling_options
def prompts(
    target: str,
    dtype: str | None,
    count: int,
    out: Path,
    sampling: peagle_jax.SamplingParams,
    **options: Any,
) -> None:
    """Let the target write prompts, as a user of its chat template would.

    They are drawn at temperature 1 unless --temperature gives another (0 is no other), from seed 0
    unless --seed does. Run it again to go on after an interruption, or with a larger --count.
    """
    if sampling.temperature == 0:
        sampling = dataclasses.replace(sampling, temperature=1.0)
    seed = sampling.seed or 0
    with user_errors():
        model, _ = load_models(target, None, dtype)
        written = write_prompts(
            model, count, out, sampling=sampling, seed=seed, progress=True, **options
        )
    _report(written, "prompts", out)


@data.command()
@_TARGET
@_DTYPE
@click.option("--prompts", type=_FILE, required=True, help="JSON lines, as `generate` takes them.")
@click.option("--out", type=_NEW, required=True, help="Folder of the dataset.")
@click.option("--chat", is_flag=True, help="Apply the chat template to prompts that are text.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=1024, show_default=True)
@click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True)
@sampling_options
def generate(
    target: str,
    dtype: str | None,
    prompts: Path,
    out: Path,
    chat: bool,
    sampling: peagle_jax.SamplingParams,
    **options: Any,
) -> None:
    """Let the target answer prompts: self-distillation data, of which the answers are learnt.

    Answers are greedy unless --temperature says otherwise; then they are drawn from seed 0 unless
    --seed gives another. Run it again to go on after an interruption.
    """
    rows = read_rows(prompts, sampling)
    if any(row.sampling != sampling for row in rows):
        raise click.ClickException(f"{prompts}: rows with settings of their own are not supported")
    asked = [row.chat() if chat else row.prompt for row in rows]
    with user_errors():
        model, _ = load_models(target, None, dtype)
        written = write_answers(
            model, asked, out, sampling=sampling, seed=sampling.seed or 0, progress=True, **options
        )
    _report(written, "answers", out)


@data.command()
@_TARGET
@click.option("--chats", type=_FILE, required=True, help="JSON lines of chats or token ids.")
@click.option("--out", type=_NEW, required=True, help="Folder of the dataset.")
@click.option(
    "--max-tokens", type=click.IntRange(2), default=2048, show_default=True, help="Cut longer ones."
)
def prepare(target: str, chats: Path, out: Path, max_tokens: int) -> None:
    """Take chats that exist: `messages`, `conversations`, or `input_ids` and `loss_mask`."""
    with user_errors():
        config, tokenizer = load_tokenizer(target)
        made = write_chats(tokenizer, config, chats, out, max_tokens=max_tokens, progress=True)
    click.echo(
        f"{made.documents} documents of {made.tokens} tokens, {made.supervised} of them learnt, in "
        f"{out}; {made.cut} cut at {max_tokens}, {made.dropped} dropped because nothing to learn "
        "was left"
    )


@data.command()
@settings_options
@click.option("--out", type=_NEW, required=True, help="Folder of the features.")
@click.option(
    "--stored-dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Of the numbers on disk.",
)
def features(settings: TrainSettings, out: Path, stored_dtype: str) -> None:
    """Run the target over a run's packed rows once, and keep what the head reads.

    Give `train` the same configuration and `features`. The target runs in --dtype, as it does in
    `train`. Run it again to go on after an interruption.
    """
    with user_errors():
        model, _ = load_models(settings.target, None, settings.dtype)
        source = online_source(settings, model.config, model.weights)
        size = write_features(source, out, stored_dtype, progress=True)
    click.echo(f"{len(source.rows)} rows of {source.rows.row_tokens} tokens, {size:,} bytes, {out}")


def _report(written: Written, what: str, out: Path) -> None:
    if not written.documents and not written.tokens:
        click.echo(f"{out} is complete")
        return
    click.echo(
        f"{written.documents} {what}, {written.tokens} tokens in {written.seconds:.0f} s "
        f"({written.tokens / written.seconds:.0f} tok/s), in {out}"
    )
