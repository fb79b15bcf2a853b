"""`peagle-jax generate`: answer prompts from the command line."""

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import peagle_jax
from peagle_jax import SamplingParams
from peagle_jax.cli.options import load_models, model_options, sampling_options
from peagle_jax.cli.prompts_file import Row, read_rows


@click.command()
@model_options
@click.option("--prompt", help="The prompt.")
@click.option(
    "--prompts-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines, each a string, or an object with `prompt`, `messages` or `token_ids`, and "
    "`sampling` for an object of settings of its own.",
)
@click.option("--chat", is_flag=True, help="Apply the chat template to prompts that are text.")
@click.option("--max-new-tokens", type=int, default=256, show_default=True)
@click.option(
    "--exact",
    is_flag=True,
    help="Plain decoding in the drafter's K+1 row program: bit-equal tokens, slower.",
)
@click.option("--batch-size", type=int, default=8, show_default=True)
@sampling_options
@click.option("--logprobs", type=int, help="With --json, report so many log-probabilities a token.")
@click.option("--stream", is_flag=True, help="Print text as rounds complete, all prompts together.")
@click.option("--profile", is_flag=True, help="Time drafting and whole rounds afterwards.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object per prompt, or with --stream per piece, then the metrics.",
)
def generate(
    target: str,
    drafter: str | None,
    dtype: str | None,
    num_speculative_tokens: int | None,
    drafting: Any,
    draft_sampling: Any,
    prompt: str | None,
    prompts_file: Path | None,
    chat: bool,
    max_new_tokens: int,
    exact: bool,
    batch_size: int,
    sampling: SamplingParams,
    stream: bool,
    profile: bool,
    as_json: bool,
) -> None:
    """Answer prompts, with or without a drafter: greedy text is the same.

    Answers go to standard output, everything else to standard error.
    """
    if (prompt is None) == (prompts_file is None):
        raise click.UsageError("give either --prompt or --prompts-file")
    if stream and (exact or profile):
        raise click.UsageError("--stream goes with neither --exact nor --profile")
    rows = [Row(prompt, sampling)] if prompts_file is None else read_rows(prompts_file, sampling)
    if stream and len(rows) > 1 and not as_json:
        raise click.UsageError("--stream of several prompts needs --json")
    prompts = [row.chat() if chat else row.prompt for row in rows]
    options: dict[str, Any] = {
        "sampling": [row.sampling for row in rows],
        "max_new_tokens": max_new_tokens,
        "num_speculative_tokens": num_speculative_tokens,
        "drafting": drafting,
        "draft_sampling": draft_sampling,
    }
    try:
        model, head = load_models(target, drafter, dtype)
        if stream:
            pieces = peagle_jax.stream(model, prompts, drafter=head, **options)
            _print_pieces(pieces, as_json)
            return
        result = peagle_jax.generate(
            model,
            prompts,
            drafter=head,
            exact=exact,
            batch_size=batch_size,
            profile=profile,
            progress=len(prompts) > batch_size,
            **options,
        )
    except ValueError as error:  # every error that the user can mend
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        # A normal exit would wait for the program on the device to end.
        click.echo("Aborted!", err=True)
        os._exit(130)
    for completion in result:
        if as_json:
            click.echo(json.dumps(_fields(completion)))
        else:
            click.echo(completion.text if completion.text is not None else completion.token_ids)
    _print_metrics(result.metrics, as_json)


def _print_pieces(pieces: Iterator[peagle_jax.Piece], as_json: bool) -> None:
    for piece in pieces:
        if as_json:
            shown = dataclasses.asdict(piece)
            del shown["completion"], shown["metrics"]
            if piece.completion is not None:
                shown["completion"] = _fields(piece.completion)
            click.echo(json.dumps(shown))
        else:
            click.echo(piece.token_ids if piece.text is None else piece.text, nl=False)
            if piece.completion is not None:
                click.echo()
        if piece.metrics is not None:
            _print_metrics(piece.metrics, as_json)


def _fields(completion: peagle_jax.Completion) -> dict[str, Any]:
    fields = dataclasses.asdict(completion)
    del fields["prompt_token_ids"]
    return fields


def _print_metrics(metrics: peagle_jax.Metrics, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"metrics": dataclasses.asdict(metrics)}))
    else:
        click.echo(_summary(metrics), err=True)


def _summary(metrics: peagle_jax.Metrics) -> str:
    text = (
        f"{metrics.num_generated_tokens} tokens in {metrics.seconds:.2f} s "
        f"({metrics.tokens_per_second:.1f} tok/s), {metrics.num_rounds} rounds"
    )
    if metrics.acceptance_length is not None and metrics.acceptance_per_position:
        text += f", acceptance length {metrics.acceptance_length:.2f}"
    if metrics.draft_share is not None:
        text += f", drafting {metrics.draft_share:.0%} of a round"
    return f"{text} (and {metrics.compile_seconds:.1f} s to compile)"
