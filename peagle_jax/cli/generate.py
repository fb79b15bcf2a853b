"""`peagle-jax generate`: answer prompts from the command line."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import click
import jax

import peagle_jax
from peagle_jax.load import cache_folder


@click.command()
@click.option("--target", required=True, help="Folder or Hugging Face hub id of the target.")
@click.option("--drafter", help="Folder or hub id of the drafter; without it, plain decoding.")
@click.option("--prompt", help="The prompt.")
@click.option(
    "--prompts-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines, each a string, or an object with `prompt`, `messages` or `token_ids`.",
)
@click.option("--chat", is_flag=True, help="Apply the chat template to prompts that are text.")
@click.option("--max-new-tokens", type=int, default=256, show_default=True)
@click.option(
    "--num-speculative-tokens",
    "-k",
    type=int,
    help="Drafts per round. [default: 5, or fewer if the head was trained for fewer]",
)
@click.option(
    "--exact",
    is_flag=True,
    help="Plain decoding in the drafter's K+1 row program: bit-equal tokens, slower.",
)
@click.option("--batch-size", type=int, default=8, show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Of weights and activations. [default: float32 on CPU, else as stored]",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object per prompt (text, token_ids, finish_reason), then the metrics.",
)
def generate(
    target: str,
    drafter: str | None,
    prompt: str | None,
    prompts_file: Path | None,
    chat: bool,
    max_new_tokens: int,
    num_speculative_tokens: int | None,
    exact: bool,
    batch_size: int,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Answer prompts greedily, with or without a drafter: the text is the same.

    Answers go to standard output, everything else to standard error.
    """
    if (prompt is None) == (prompts_file is None):
        raise click.UsageError("give either --prompt or --prompts-file")
    prompts: list[Any] = [prompt] if prompts_file is None else _read_prompts(prompts_file)
    if chat:
        prompts = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]
    _keep_compiled_programs()
    try:
        loaded_target = peagle_jax.load_target(target, dtype=dtype)
        loaded_drafter = None
        if drafter is not None:
            layers = loaded_target.config.num_layers
            loaded_drafter = peagle_jax.load_drafter(drafter, dtype=dtype, target_layers=layers)
        result = peagle_jax.generate(
            loaded_target,
            prompts,
            drafter=loaded_drafter,
            max_new_tokens=max_new_tokens,
            num_speculative_tokens=num_speculative_tokens,
            exact=exact,
            batch_size=batch_size,
            progress=len(prompts) > batch_size,
        )
    except ValueError as error:  # every error that the user can mend
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        # A normal exit would wait for the program on the device to end.
        click.echo("Aborted!", err=True)
        os._exit(130)
    if as_json:
        for completion in result:
            fields = dataclasses.asdict(completion)
            del fields["prompt_token_ids"]
            click.echo(json.dumps(fields))
        click.echo(json.dumps({"metrics": dataclasses.asdict(result.metrics)}))
        return
    for completion in result:
        click.echo(completion.text if completion.text is not None else completion.token_ids)
    click.echo(_summary(result.metrics), err=True)


def _summary(metrics: peagle_jax.Metrics) -> str:
    text = (
        f"{metrics.num_generated_tokens} tokens in {metrics.seconds:.2f} s "
        f"({metrics.tokens_per_second:.1f} tok/s), {metrics.num_rounds} rounds"
    )
    if metrics.acceptance_length is not None and metrics.acceptance_per_position:
        text += f", acceptance length {metrics.acceptance_length:.2f}"
    return f"{text} (and {metrics.compile_seconds:.1f} s to compile)"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"cannot read {path}: {error}") from error


def _read_prompts(path: Path) -> list[Any]:
    prompts = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise click.ClickException(f"{path}, line {number}: no JSON ({error})") from error
        if isinstance(row, str):
            prompts.append(row)
            continue
        keys = row if isinstance(row, dict) else ()
        named = [key for key in ("prompt", "messages", "token_ids") if key in keys]
        if len(named) != 1:
            raise click.ClickException(
                f"{path}, line {number}: expected a string, or an object with exactly one of "
                "prompt, messages, token_ids"
            )
        prompts.append(row[named[0]])
    if not prompts:
        raise click.ClickException(f"{path} holds no prompt")
    return prompts


def _keep_compiled_programs() -> None:
    """Turns on JAX's persistent compilation cache, so that a second run starts faster."""
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
