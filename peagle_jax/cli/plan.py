"""`peagle-jax plan`: what a target and a drafter take of a device's memory."""

import json

import click

from peagle_jax.config import ExpertWeights
from peagle_jax.generate import DEFAULT_SPECULATIVE_TOKENS
from peagle_jax.plan import DTYPES, MemoryPlan, ModelMemory, plan_memory
from peagle_jax.presets import DEVICES, TARGETS, find_device, find_target, with_expert_weights


@click.command(epilog=f"Known targets: {', '.join(sorted(TARGETS))}.")
@click.option(
    "--target",
    required=True,
    help="Name of a known target, folder of a checkpoint, or a config.json.",
)
@click.option(
    "--drafter-layers",
    type=int,
    default=4,
    show_default=True,
    help="Layers of the P-EAGLE head; 0 for plain decoding.",
)
@click.option("--draft-vocab-size", type=int, help="Tokens the head can propose. [default: all]")
@click.option("--device", help=f"One of {', '.join(sorted(DEVICES))}.")
@click.option("--device-memory", help="The device's memory instead: 141e9 (bytes), 141GB, 131GiB.")
@click.option(
    "--batch", type=int, default=8, show_default=True, help="Sequences that run together."
)
@click.option(
    "--context",
    type=int,
    required=True,
    help="Tokens of the longest sequence, prompt and answer together.",
)
@click.option(
    "--prompt-tokens",
    type=int,
    help="Tokens of its prompt. [default: all but one, which takes the most memory]",
)
@click.option(
    "--num-speculative-tokens",
    "-k",
    type=int,
    default=DEFAULT_SPECULATIVE_TOKENS,
    show_default=True,
    help="Drafts per round.",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="bfloat16",
    show_default=True,
    help="Of weights and activations.",
)
@click.option(
    "--expert-weights",
    type=click.Choice(["plain", "mxfp4"]),
    help="How the experts of a mixture are stored. [default: as published]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object.")
def plan(
    target: str,
    drafter_layers: int,
    draft_vocab_size: int | None,
    device: str | None,
    device_memory: str | None,
    batch: int,
    context: int,
    prompt_tokens: int | None,
    num_speculative_tokens: int,
    dtype: str,
    expert_weights: ExpertWeights | None,
    as_json: bool,
) -> None:
    """Tell whether models fit on a device, without loading any.

    Weights and KV caches are exact; what a pass computes in between is an estimate. The exit code
    is 0 whether it fits or not; `fits` of --json tells.
    """
    try:
        figures = plan_memory(
            with_expert_weights(find_target(target), expert_weights),
            device_bytes=find_device(device, device_memory),
            batch_size=batch,
            context=context,
            prompt_tokens=prompt_tokens,
            drafter_layers=drafter_layers,
            draft_vocab_size=draft_vocab_size,
            num_speculative_tokens=num_speculative_tokens,
            dtype=dtype,
        )
    except ValueError as error:  # every error that the user can mend
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(figures.to_json()))
        return
    click.echo(f"target   {target}, {dtype}")
    if figures.drafter is not None:
        layers = f"{drafter_layers} layer{'s' if drafter_layers > 1 else ''}"
        click.echo(f"drafter  P-EAGLE head of {layers}, K = {figures.num_speculative_tokens}")
    click.echo(
        f"shapes   {figures.rows} sequences, prompts of {figures.prompt_rows:,} rows, "
        f"{figures.capacity:,} slots"
    )
    click.echo()
    click.echo(_table(figures))
    click.echo()
    size = f"{abs(figures.spare_bytes) / 2**30:,.2f} GiB"
    click.echo(f"fits: {size} to spare" if figures.fits else f"does not fit: {size} too much")
    if figures.fits and figures.needs_memory_fraction:
        click.echo(
            "JAX takes 75 % of a GPU's memory unless told otherwise: set "
            "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
        )


def _table(figures: MemoryPlan) -> str:
    rows = [("", "bytes", "GiB", ""), *_model("target", figures.target)]
    if figures.drafter is not None:
        rows += _model("drafter", figures.drafter)
    rows += [
        _row("prefill, in between", figures.prefill_bytes, "estimate"),
        _row("round, in between", figures.round_bytes, "estimate"),
        _row("peak", figures.peak_bytes, "with the larger of the two"),
        _row("device", figures.device_bytes),
    ]
    return "\n".join(
        f"{name:21}{size:>18}{gib:>10}  {remark}".rstrip() for name, size, gib, remark in rows
    )


def _model(name: str, model: ModelMemory) -> list[tuple[str, str, str, str]]:
    cache = f"{model.cache_bytes_per_token:,} B per token"
    if model.window_bytes_per_sequence:
        cache += f" + {model.window_bytes_per_sequence:,} B per sequence"
    return [
        _row(f"{name} weights", model.weight_bytes, f"{model.parameters:,} parameters"),
        _row(f"{name} KV cache", model.cache_bytes, cache),
    ]


def _row(name: str, size: int, remark: str = "") -> tuple[str, str, str, str]:
    return name, f"{size:,}", f"{size / 2**30:,.2f}", remark
