"""`peagle-jax train`: train a P-EAGLE or an EAGLE-3 head."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import peagle_jax
from peagle_jax.cli.options import load_models, user_errors
from peagle_jax.cli.prompts_file import read_rows
from peagle_jax.cli.settings import settings_options
from peagle_jax.load import LoadedDrafter, LoadedTarget
from peagle_jax.models import Drafter, Frozen
from peagle_jax.prompts import Prompt, PromptError, check_room, encode_prompts
from peagle_jax.training.prepare import find_mask_token, prepare
from peagle_jax.training.settings import TrainSettings
from peagle_jax.training.trainer import Measure, TrainingError, check_output
from peagle_jax.training.trainer import train as run


@click.command()
@settings_options
def train(settings: TrainSettings) -> None:
    """Train a head for a target, from datasets that `peagle-jax data` made.

    A run that was interrupted goes on from its last checkpoint when it is started again. The head
    is written to OUTPUT/head, which `peagle-convert to-hf` turns into what vLLM and speculators
    load.
    """
    with user_errors(TrainingError):
        check_output(settings)
        prompts = _read_prompts(settings) if settings.generate_every else []
        target, _ = load_models(settings.target, None, settings.dtype)
        measure = _measure(settings, target, prompts) if prompts else None
        mask_token = find_mask_token(settings, target.config, target.tokenizer)
        parts, materials, summary = prepare(settings, target.config, target.weights, mask_token)
        for line in summary.lines():
            click.echo(line, err=True)
        try:
            head = run(settings, parts, materials, measure=measure, progress=True)
        except KeyboardInterrupt:
            click.echo("Interrupted: run it again to go on from the last checkpoint.", err=True)
            raise
    click.echo(head)


def _read_prompts(settings: TrainSettings) -> list[Prompt]:
    assert settings.generate_prompts is not None
    rows = read_rows(Path(settings.generate_prompts), greedy := peagle_jax.SamplingParams())
    if any(row.sampling != greedy for row in rows):
        raise PromptError(
            f"{settings.generate_prompts}: rows with settings of their own are not supported"
        )
    return [row.chat() for row in rows]


def _measure(settings: TrainSettings, target: LoadedTarget, prompts: Sequence[Prompt]) -> Measure:
    """Returns what measures the real acceptance length of a head, greedy, on the prompts."""
    encoded = encode_prompts(prompts, target.tokenizer, target.config.vocab_size)
    try:
        check_room(encoded, target.config.max_position_embeddings)
    except PromptError as error:
        raise PromptError(f"{settings.generate_prompts}: {error}") from None

    def measure(head: Drafter) -> dict[str, Any]:
        out = peagle_jax.generate(
            target,
            encoded,
            drafter=LoadedDrafter(head.config, Frozen.of(head), Path(settings.output)),
            max_new_tokens=settings.generate_tokens,
            num_speculative_tokens=settings.num_depths,
        )
        return {
            "acceptance_length": out.metrics.acceptance_length,
            "acceptance_per_position": out.metrics.acceptance_per_position,
        }

    return measure
