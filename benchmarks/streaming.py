"""What streaming costs: `stream` in chunks of rounds against `generate` in one dispatch.

SmolLM2-135M with the demo's head, float32, batch 1, chat prompts; every way of answering a prompt
runs in turn, and ratios are of medians.
"""

import json
import os
import platform
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import click
import jax
from tqdm import tqdm

import peagle_jax

ROOT = Path(__file__).parent.parent
TARGET = ROOT / ".cache" / "smollm2-135m-instruct"
DRAFTER = ROOT / "examples" / "smollm2-135m-p-eagle"
PROMPTS = ROOT / "examples" / "chat_prompts.jsonl"
ROUNDS_PER_PIECE = (1, 4, 16)


@click.command()
@click.option("--target", type=Path, default=TARGET, help="Hugging Face folder of the target.")
@click.option("--drafter", type=Path, default=DRAFTER, help="Folder of the drafter.")
@click.option("--num-prompts", default=10, show_default=True)
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--num-speculative-tokens", "-k", default=3, show_default=True)
@click.option("--output", type=Path, help="JSON file to write.")
def main(
    target: Path,
    drafter: Path,
    num_prompts: int,
    max_new_tokens: int,
    num_speculative_tokens: int,
    output: Path | None,
) -> None:
    """Measure; print a table and write JSON."""
    model = peagle_jax.load_target(target, dtype="float32")
    head = peagle_jax.load_drafter(drafter, dtype="float32", target_layers=model.config.num_layers)
    lines = PROMPTS.read_text().splitlines()[:num_prompts]
    chats = [json.loads(line)["messages"] for line in lines]
    report: dict[str, Any] = {}
    for name, options in {
        "plain": {},
        f"P-EAGLE K={num_speculative_tokens}": {
            "drafter": head,
            "num_speculative_tokens": num_speculative_tokens,
        },
    }.items():
        samples = measure(model, chats, {"max_new_tokens": max_new_tokens, **options})
        report[name] = summarise(samples)
    report["setting"] = {
        "prompts": len(chats),
        "max_new_tokens": max_new_tokens,
        "dtype": "float32",
        "batch": 1,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "machine": platform.processor() or platform.machine(),
        "load_average": os.getloadavg()[0],
    }
    show(report)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=2) + "\n")
        click.echo(f"\nwritten to {output}", err=True)


def measure(
    target: peagle_jax.LoadedTarget, chats: list[Any], options: dict[str, Any]
) -> dict[str, list[float]]:
    """Answers every chat in every way, in turn; the first chat once more before, to compile.

    Returns:
      by way: tokens per second of the whole call (`tok/s`), seconds to the first text (`first`).
    """
    samples: dict[str, list[float]] = defaultdict(list)
    for number, chat in enumerate(tqdm([chats[0], *chats], unit="prompt")):
        started = time.perf_counter()
        [whole] = peagle_jax.generate(target, [chat], **options)
        spent = time.perf_counter() - started
        found = {"tok/s generate": len(whole.token_ids) / spent, "first generate": spent}
        for rounds in ROUNDS_PER_PIECE:
            started, first = time.perf_counter(), None
            for piece in peagle_jax.stream(target, [chat], rounds_per_piece=rounds, **options):
                if first is None and piece.text:
                    first = time.perf_counter() - started
            spent = time.perf_counter() - started
            assert piece.completion == whole
            found[f"tok/s {rounds}"] = len(whole.token_ids) / spent
            found[f"first {rounds}"] = first or spent
        if number > 0:
            for key, value in found.items():
                samples[key].append(value)
    return samples


def summarise(samples: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Returns medians, and speeds as shares of `generate`'s."""
    table = {}
    for way in ("generate", *map(str, ROUNDS_PER_PIECE)):
        speed = statistics.median(samples[f"tok/s {way}"])
        table[way] = {
            "tokens_per_second": speed,
            "ratio": speed / statistics.median(samples["tok/s generate"]),
            "seconds_to_first_text": statistics.median(samples[f"first {way}"]),
        }
    return table


def show(report: dict[str, Any]) -> None:
    click.echo(f"{'':14}{'rounds per piece':>18}{'tok/s':>8}{'ratio':>8}{'first text':>12}")
    for name, table in report.items():
        for way, row in table.items() if name != "setting" else ():
            click.echo(
                f"{name:14}{way:>18}{row['tokens_per_second']:8.1f}{row['ratio']:8.3f}"
                f"{row['seconds_to_first_text']:10.2f} s"
            )


if __name__ == "__main__":
    main()
