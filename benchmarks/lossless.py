"""How often near ties make speculative and plain decoding differ on a real model, and how near.

Products of different row counts round differently, so the target's best token of the K + 1 row
program can differ from that of the one row program where its two best logits are nearly tied.
For every prompt this compares plain greedy decoding with the drafter's, in float32, and for each
difference gives the gap of the two tokens' logits. It also gives the smallest gaps that were met,
and checks that `exact=True` leaves no difference.
"""

import json
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import peagle_jax
from peagle_jax.models import Frozen, Target, masked

ROOT = Path(__file__).parent.parent


@click.command()
@click.option("--target", default=str(ROOT / ".cache" / "smollm2-135m-instruct"))
@click.option("--drafter", default=str(ROOT / "examples" / "smollm2-135m-p-eagle"))
@click.option("--prompts", type=Path, default=ROOT / "examples" / "chat_prompts.jsonl")
@click.option("--num-prompts", default=20, show_default=True)
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--num-speculative-tokens", "-k", multiple=True, default=(3, 7), show_default=True)
@click.option("--output", type=Path, help="JSON file to write.")
def main(
    target: str,
    drafter: str,
    prompts: Path,
    num_prompts: int,
    max_new_tokens: int,
    num_speculative_tokens: tuple[int, ...],
    output: Path | None,
) -> None:
    """Count differing answers, and show the logit gap at each first difference."""
    model = peagle_jax.load_target(target, dtype="float32")
    head = peagle_jax.load_drafter(drafter, dtype="float32", target_layers=model.config.num_layers)
    lines = prompts.read_text().splitlines()[:num_prompts]
    chats = [json.loads(line)["messages"] for line in lines]

    def answer(index: int, **options: Any) -> list[int]:
        out = peagle_jax.generate(
            model, [chats[index]], max_new_tokens=max_new_tokens, batch_size=1, **options
        )
        return out[0].token_ids

    report: dict[str, object] = {"prompts": len(chats), "max_new_tokens": max_new_tokens}
    differences, gaps = [], []
    for index in tqdm(range(len(chats)), unit="prompt"):
        plain = peagle_jax.generate(model, [chats[index]], max_new_tokens=max_new_tokens)[0]
        gaps += top_gaps(model.weights, plain.prompt_token_ids, plain.token_ids).tolist()
        for drafts in num_speculative_tokens:
            drafted = answer(index, drafter=head, num_speculative_tokens=drafts)
            exact = answer(index, exact=True, num_speculative_tokens=drafts)
            for way, other in (("plain", plain.token_ids), ("exact", exact)):
                if drafted != other:
                    differences.append(
                        first_difference(model, index, drafts, way, plain, drafted, other)
                    )
    report["tokens"] = len(gaps)
    report["differences"] = differences
    report["smallest_gaps"] = sorted(gaps)[:10]
    for way in ("plain", "exact"):
        count = sum(d["compared_with"] == way for d in differences)
        click.echo(f"answers that differ from {way} decoding: {count} of ", nl=False)
        click.echo(f"{len(chats) * len(num_speculative_tokens)}")
    for difference in differences:
        click.echo(json.dumps(difference))
    click.echo(f"{len(gaps)} tokens; smallest gaps between the two best logits:")
    click.echo("  " + "  ".join(f"{gap:.2e}" for gap in sorted(gaps)[:10]))
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=2) + "\n")


def first_difference(
    model: peagle_jax.LoadedTarget,
    index: int,
    drafts: int,
    way: str,
    plain: peagle_jax.Completion,
    drafted: list[int],
    other: list[int],
) -> dict[str, object]:
    """Describes where two answers part."""
    pairs = enumerate(zip(drafted, other, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(drafted), len(other)))
    gap = top_gaps(model.weights, plain.prompt_token_ids, other[: place + 1])[-1]
    return {
        "prompt": index,
        "k": drafts,
        "compared_with": way,
        "position": place,
        "gap": float(gap),
    }


def top_gaps(target: Frozen[Target], prompt: list[int], answer: list[int]) -> np.ndarray:
    """Returns best minus second best logit before each token of the answer, `[n]`."""
    ids = [*prompt, *answer]
    padded = np.zeros((1, -(-len(ids) // 128) * 128), np.int32)
    padded[0, : len(ids)] = ids
    gaps = _gaps(target, jnp.asarray(padded))[0]
    return np.asarray(gaps[len(prompt) - 1 : len(ids) - 1])


@jax.jit
def _gaps(target: Frozen[Target], ids: jax.Array) -> jax.Array:
    model, length = target.merge(), ids.shape[1]
    causal = jnp.tril(jnp.ones((1, length, length), bool))
    positions = jnp.arange(length)[None]
    x, *_ = model(ids, positions, masked([causal] * model.config.num_layers))
    best = jax.lax.top_k(model.logits(x), 2)[0]  # [1, T, 2]
    return best[..., 0] - best[..., 1]


if __name__ == "__main__":
    main()
