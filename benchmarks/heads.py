"""What heads are worth on prompts: acceptance lengths, and speed against plain decoding.

Greedy, with the chat template, in float32. Acceptance is measured on all prompts of a file in
batches; beside it stand prompt lookup on the same answers, and the share of answers that end in a
repetition loop, which any drafter guesses. Speed is measured on the first prompts of each file, one
at a time, plain decoding and every head and K in turns.
"""

import json
import platform
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np
from tqdm import tqdm

import peagle_jax

ROOT = Path(__file__).parent.parent
# An answer that did not end loops if its last tokens repeat this often with a period up to that.
LOOP_TIMES, LOOP_PERIOD = 3, 24
# Prompt lookup: the longest n-gram that is looked for.
LOOKUP_NGRAM = 3


@click.command()
@click.option("--target", default=str(ROOT / ".cache" / "smollm2-135m-instruct"))
@click.option("--head", "heads", multiple=True, required=True, help="NAME=FOLDER. Repeatable.")
@click.option("--prompts", "files", type=Path, multiple=True, required=True, help="Repeatable.")
@click.option("--num-speculative-tokens", "-k", "ks", multiple=True, default=(1, 3, 5, 7))
@click.option("--max-new-tokens", default=160, show_default=True)
@click.option("--batch-size", default=16, show_default=True)
@click.option("--num-prompts", type=int, help="Of each file. [default: all]")
@click.option("--speed-prompts", default=8, show_default=True, help="Of each file; 0 for none.")
@click.option("--output", type=Path, help="JSON file to write.")
def main(
    target: str,
    heads: tuple[str, ...],
    files: tuple[Path, ...],
    ks: tuple[int, ...],
    max_new_tokens: int,
    batch_size: int,
    num_prompts: int | None,
    speed_prompts: int,
    output: Path | None,
) -> None:
    """Measure heads; print tables, write JSON."""
    model = peagle_jax.load_target(target, dtype="float32")
    layers = model.config.num_layers
    loaded = {}
    for head in heads:
        name, _, folder = head.partition("=")
        loaded[name] = peagle_jax.load_drafter(folder, dtype="float32", target_layers=layers)
    report: dict[str, Any] = {
        "setting": {
            "max_new_tokens": max_new_tokens,
            "jax": jax.__version__,
            "machine": platform.processor() or platform.machine(),
        },
        "sets": {},
    }
    for path in files:
        lines = path.read_text().splitlines()[:num_prompts]
        chats = [json.loads(line)["messages"] for line in lines]
        entry = acceptance(model, loaded, chats, ks, max_new_tokens, batch_size)
        if speed_prompts:
            entry["speed"] = speed(model, loaded, chats[:speed_prompts], ks, max_new_tokens)
        report["sets"][path.stem] = entry
        show(path.stem, entry, ks)
    if output:
        output.write_text(json.dumps(report, indent=1) + "\n")


def acceptance(
    model: peagle_jax.LoadedTarget,
    heads: dict[str, peagle_jax.LoadedDrafter],
    chats: list[Any],
    ks: Sequence[int],
    max_new_tokens: int,
    batch_size: int,
) -> dict[str, Any]:
    """Returns acceptance by head and K, with what prompt lookup would have reached."""
    answers: list[peagle_jax.Completion] = []
    by_head: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, head in heads.items():
        for k in ks:
            out = peagle_jax.generate(
                model,
                chats,
                drafter=head,
                num_speculative_tokens=k,
                max_new_tokens=max_new_tokens,
                batch_size=batch_size,
                progress=True,
            )
            answers = list(out)
            by_head[name][str(k)] = {
                "acceptance_length": out.metrics.acceptance_length,
                "acceptance_per_position": out.metrics.acceptance_per_position,
            }
    texts = [(a.prompt_token_ids, a.token_ids, a.finish_reason) for a in answers]
    return {
        "answers": len(answers),
        "tokens": sum(len(made) for _, made, _ in texts),
        "loops": float(np.mean([why == "length" and loops(made) for _, made, why in texts])),
        "prompt_lookup": {str(k): lookup([t[:2] for t in texts], k) for k in ks},
        "heads": by_head,
    }


def loops(tokens: list[int]) -> bool:
    """Whether the last tokens repeat with one period."""
    return any(
        len(tokens) >= LOOP_TIMES * period
        and tokens[-(LOOP_TIMES - 1) * period :] == tokens[-LOOP_TIMES * period : -period]
        for period in range(1, LOOP_PERIOD + 1)
    )


def lookup(texts: Sequence[tuple[list[int], list[int]]], k: int) -> float:
    """Returns the acceptance length of prompt lookup: what followed the last same n-gram."""
    tokens = rounds = 0
    for prompt, answer in texts:
        whole, at = [*prompt, *answer], len(prompt) + 1
        while at < len(whole):
            draft = _guess(whole[:at], k)
            kept = 0
            while kept < len(draft) and at + kept < len(whole) and draft[kept] == whole[at + kept]:
                kept += 1
            emitted = min(kept + 1, len(whole) - at)
            tokens, rounds, at = tokens + emitted, rounds + 1, at + emitted
    return tokens / rounds


def _guess(seen: list[int], k: int) -> list[int]:
    for size in range(LOOKUP_NGRAM, 0, -1):
        tail = seen[-size:]
        for start in range(len(seen) - size - 1, -1, -1):
            if seen[start : start + size] == tail:
                return seen[start + size : start + size + k]
    return []


def speed(
    model: peagle_jax.LoadedTarget,
    heads: dict[str, peagle_jax.LoadedDrafter],
    chats: list[Any],
    ks: Sequence[int],
    max_new_tokens: int,
) -> dict[str, float]:
    """Returns tokens per second, times plain decoding's of the same prompt, as medians."""
    ways: dict[str, dict[str, Any]] = {"plain": {}}
    for name, head in heads.items():
        ways |= {f"{name} K={k}": {"drafter": head, "num_speculative_tokens": k} for k in ks}
    ratios: dict[str, list[float]] = defaultdict(list)
    for repeat, chat in enumerate(tqdm([chats[0], *chats], unit="prompt")):
        seconds = {}
        for way, options in ways.items():
            out = peagle_jax.generate(model, [chat], max_new_tokens=max_new_tokens, **options)
            seconds[way] = out.metrics.tokens_per_second
        if repeat:  # the first compiles
            for way, value in seconds.items():
                ratios[way].append(value / seconds["plain"])
    return {way: statistics.median(values) for way, values in ratios.items()}


def show(name: str, entry: dict[str, Any], ks: Sequence[int]) -> None:
    """Prints one file's table."""
    click.echo(f"\n{name}: {entry['answers']} answers, {entry['loops']:.0%} end in a loop")
    click.echo(f"{'':16}" + "".join(f"{f'K={k}':>8}" for k in ks) + "   accepted at position")
    row = "".join(f"{entry['prompt_lookup'][str(k)]:8.2f}" for k in ks)
    click.echo(f"{'prompt lookup':16}{row}")
    for head, by_k in entry["heads"].items():
        row = "".join(f"{by_k[str(k)]['acceptance_length']:8.2f}" for k in ks)
        places = by_k[str(max(ks))]["acceptance_per_position"]
        click.echo(f"{head:16}{row}   " + " ".join(f"{p:.2f}" for p in places))
    for way, ratio in entry.get("speed", {}).items():
        click.echo(f"  {way:24}{ratio:6.2f} times plain")


if __name__ == "__main__":
    main()
