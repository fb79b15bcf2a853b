"""Answers a prompt with and without the drafter, and shows that only the speed differs.

Run by `make demo`, which fetches the target first.
"""

import statistics
import sys
from pathlib import Path

import click

import peagle_jax

ROOT = Path(__file__).parent.parent
TARGET = ROOT / ".cache" / "smollm2-135m-instruct"
DRAFTER = ROOT / "examples" / "smollm2-135m-p-eagle"
PROMPT = "A shop sells pens at 3 dollars each. How much do 12 pens cost? Explain step by step."
REPEATS = 5


@click.command()
@click.option("--target", default=str(TARGET), help="Folder or hub id of the target.")
@click.option("--drafter", default=str(DRAFTER), help="Folder or hub id of the drafter.")
@click.option("--prompt", default=PROMPT, show_default=True)
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--num-speculative-tokens", "-k", default=3, show_default=True)
def main(
    target: str, drafter: str, prompt: str, max_new_tokens: int, num_speculative_tokens: int
) -> None:
    """Compare plain decoding with P-EAGLE on one prompt."""
    click.echo("Loading target and drafter (converted once, at the first run) ...", err=True)
    try:
        model = peagle_jax.load_target(target)
        head = peagle_jax.load_drafter(drafter, target_layers=model.config.num_layers)
        runs = compare(model, head, prompt, max_new_tokens, num_speculative_tokens)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    plain, drafted = runs["plain"][0], runs["P-EAGLE"][0]
    click.echo(f"\n> {prompt}\n\n{plain[0].text}\n")
    click.echo(f"{'':10}{'tokens':>8}{'rounds':>8}{'tokens/round':>14}{'tokens/s':>10}")
    speeds = {}
    for name, results in runs.items():
        metrics = results[0].metrics
        speeds[name] = statistics.median(r.metrics.tokens_per_second for r in results)
        click.echo(
            f"{name:10}{metrics.num_generated_tokens:8}{metrics.num_rounds:8}"
            f"{metrics.acceptance_length or 1:14.2f}{speeds[name]:10.1f}"
        )
    identical = plain[0].token_ids == drafted[0].token_ids
    click.echo(f"\nacceptance length {drafted.metrics.acceptance_length or 1:.2f}", nl=False)
    click.echo(f", speed {speeds['P-EAGLE'] / speeds['plain']:.2f} times plain", nl=False)
    click.echo(f" (medians of {REPEATS} interleaved runs)")
    click.echo(f"tokens identical: {'yes' if identical else 'NO'}")
    sys.exit(0 if identical else 1)


def compare(
    target: peagle_jax.LoadedTarget,
    drafter: peagle_jax.LoadedDrafter,
    prompt: str,
    max_new_tokens: int,
    num_speculative_tokens: int,
) -> dict[str, list[peagle_jax.GenerationResult]]:
    """Runs both ways in turn, so that a busy machine slows both."""
    runs: dict[str, list[peagle_jax.GenerationResult]] = {"plain": [], "P-EAGLE": []}
    for repeat in range(REPEATS):
        for name, results in runs.items():
            if repeat == 0:
                click.echo(f"Compiling and running: {name} ...", err=True)
            results.append(
                peagle_jax.generate(
                    target,
                    [[{"role": "user", "content": prompt}]],
                    drafter=drafter if name == "P-EAGLE" else None,
                    max_new_tokens=max_new_tokens,
                    num_speculative_tokens=num_speculative_tokens,
                )
            )
    return runs


if __name__ == "__main__":
    main()
