"""Decoding speed on this machine, everything interleaved in one run.

Plain decoding against Hugging Face transformers and against the memory bandwidth; the drafter
against plain decoding; and what a round costs in plain steps, with a scripted drafter whose
acceptance is set. float32, batch 1, chat prompts. `make bench` runs it; transformers runs in a
Python of its own, because torch is no part of this project.
"""

import dataclasses
import json
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import click
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import peagle_jax
from peagle_jax.batch import Batch
from peagle_jax.decoding import (
    AutoregressiveDraft,
    NoDraft,
    ParallelDraft,
    Proposer,
    ScriptedDraft,
)
from peagle_jax.generate import make_proposer

ROOT = Path(__file__).parent.parent
TARGET = ROOT / ".cache" / "smollm2-135m-instruct"
DRAFTER = ROOT / "examples" / "smollm2-135m-p-eagle"
PROMPTS = ROOT / "examples" / "chat_prompts.jsonl"

# (K, drafts accepted every round): acceptance length 3 at K = 3, and the engine at K = 7.
SCRIPTS = ((3, 2), (7, 2))


@dataclasses.dataclass
class Transformers:
    """A process that answers token ids with transformers' greedy `generate`."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, python: Path, model: Path) -> Self:
        worker = Path(__file__).parent / "transformers_worker.py"
        process = subprocess.Popen(
            [python, worker, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        engine = cls(process)
        engine.answer([1, 2, 3], 2)  # loaded and warm
        return engine

    def answer(self, ids: list[int], max_new_tokens: int) -> tuple[list[int], float]:
        """Returns the new tokens and the seconds that `generate` took."""
        assert self.process.stdin and self.process.stdout
        print(json.dumps([ids, max_new_tokens]), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise click.ClickException("the transformers process ended; see its messages above")
        tokens, seconds = json.loads(line)
        return tokens, seconds


@click.command()
@click.option("--target", type=Path, default=TARGET, help="Hugging Face folder of the target.")
@click.option("--drafter", type=Path, default=DRAFTER, help="Folder of the drafter.")
@click.option("--prompts", type=click.Path(exists=True, path_type=Path), default=PROMPTS)
@click.option("--num-prompts", default=20, show_default=True)
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--num-speculative-tokens", "-k", multiple=True, default=(3, 7), show_default=True)
@click.option(
    "--torch-python",
    type=click.Path(exists=True, path_type=Path),
    help="A Python with torch and transformers; without it they are left out.",
)
@click.option("--output", type=Path, help="JSON file to write.")
def main(
    target: Path,
    drafter: Path,
    prompts: Path,
    num_prompts: int,
    max_new_tokens: int,
    num_speculative_tokens: tuple[int, ...],
    torch_python: Path | None,
    output: Path | None,
) -> None:
    """Measure decoding speed; print medians and ratios, write JSON."""
    model = peagle_jax.load_target(target, dtype="float32")
    head = peagle_jax.load_drafter(drafter, dtype="float32", target_layers=model.config.num_layers)
    lines = prompts.read_text().splitlines()[:num_prompts]
    chats = [json.loads(line)["messages"] for line in lines]
    encoded = [
        list(model.tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"])
        for c in chats
    ]
    engine = Transformers.start(torch_python, target) if torch_python else None
    samples, identical = measure(
        model, head, encoded, max_new_tokens, num_speculative_tokens, engine
    )
    report = summarise(samples, weight_bytes(model))
    report["tokens_identical"] = identical
    report["setting"] = {
        "prompts": len(encoded),
        "max_new_tokens": max_new_tokens,
        "dtype": "float32",
        "batch": 1,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "machine": _cpu_name(),
    }
    show(report)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=2) + "\n")
        click.echo(f"\nwritten to {output}", err=True)


def measure(
    target: peagle_jax.LoadedTarget,
    drafter: peagle_jax.LoadedDrafter,
    prompts: list[list[int]],
    max_new_tokens: int,
    draft_counts: tuple[int, ...],
    engine: Transformers | None,
) -> tuple[dict[str, list[float]], dict[str, bool]]:
    """Runs every way of decoding once per prompt, in turn.

    Returns:
      samples by name: tokens per second of whole answers (`tok/s ...`), milliseconds per round
      after the prefill (`round ms ...`), acceptance lengths, bandwidth in bytes per second; and
      whether all tokens were those of plain decoding, by way of decoding.
    """
    samples: dict[str, list[float]] = defaultdict(list)
    identical: dict[str, bool] = defaultdict(lambda: True)
    read = read_bandwidth(weight_bytes(target))
    for number, prompt in enumerate(tqdm([prompts[0], *prompts], unit="prompt")):
        found: dict[str, float] = {"bandwidth": read()}
        plain = timed(target, NoDraft(), prompt, max_new_tokens, "plain", found)
        tokens = new_tokens(plain)
        if engine is not None:
            theirs, seconds = engine.answer(prompt, len(tokens))
            found["tok/s transformers"] = len(theirs) / seconds
            identical["transformers"] &= theirs == tokens
        proposers: dict[str, Proposer] = {}
        for drafts in draft_counts:
            proposers[f"P-EAGLE K={drafts}"] = make_proposer(drafter, drafts)
        for drafts, accepts in SCRIPTS:
            for name, beside in (
                ("verify only", NoDraft(drafts)),
                ("with the head", make_proposer(drafter, drafts)),
            ):
                label = f"scripted K={drafts}, acceptance length {accepts + 1}, {name}"
                proposers[label] = scripted(plain, accepts, beside)
        for name, proposer in proposers.items():
            run = timed(target, proposer, prompt, max_new_tokens, name, found)
            identical[name] &= new_tokens(run) == tokens
        if number > 0:  # the first round over everything only compiles and warms up
            for name, value in found.items():
                samples[name].append(value)
    return dict(samples), dict(identical)


def timed(
    target: peagle_jax.LoadedTarget,
    proposer: Proposer,
    prompt: list[int],
    max_new_tokens: int,
    name: str,
    found: dict[str, float],
) -> Batch:
    """Times one whole answer, and one that ends with the prefill, to tell rounds from it."""
    prefill, run = (
        Batch(target, proposer, [prompt], [peagle_jax.SamplingParams()], max_new_tokens)
        for _ in range(2)
    )
    prefill.run(rounds=0)
    run.run()
    count, rounds = len(new_tokens(run)), int(run.generation.rounds)
    found[f"tok/s {name}"] = count / run.seconds
    found[f"round ms {name}"] = 1e3 * (run.seconds - prefill.seconds) / max(rounds, 1)
    found[f"acceptance length {name}"] = (count - 1) / max(rounds, 1)
    return run


def new_tokens(batch: Batch) -> list[int]:
    """Returns the answer to the batch's one prompt."""
    generation = batch.generation
    return generation.tokens[0, len(batch.prompts[0]) : int(generation.lengths[0])].tolist()


def scripted(
    plain: Batch,
    accepts: int,
    beside: NoDraft | ParallelDraft | AutoregressiveDraft,
) -> ScriptedDraft:
    """Returns a drafter that knows the plain continuation."""
    tokens = np.zeros((1, plain.generation.tokens.shape[1] + 128), np.int32)
    tokens[:, : plain.generation.tokens.shape[1]] = plain.generation.tokens
    return ScriptedDraft(jnp.asarray(tokens), jnp.asarray([accepts], jnp.int32), beside)


def read_bandwidth(size: int) -> Callable[[], float]:
    """Returns a function that sums `size` bytes of float32 and gives the bytes per second."""
    array = jax.random.normal(jax.random.key(0), (size // 4,))
    total = jax.jit(jnp.sum)
    total(array).block_until_ready()

    def measure_once() -> float:
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            total(array).block_until_ready()
            seconds.append(time.perf_counter() - started)
        return size / statistics.median(seconds)

    return measure_once


def weight_bytes(target: peagle_jax.LoadedTarget) -> int:
    """Bytes of weights that every decode step reads."""
    config = target.config
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size * 4
    return sum(leaf.nbytes for leaf in target.weights.leaves) - table


def summarise(samples: dict[str, list[float]], size: int) -> dict[str, Any]:
    """Returns medians, and ratios of medians."""
    medians = {name: statistics.median(values) for name, values in samples.items()}
    step = medians["round ms plain"]
    bound = 1e3 * size / medians["bandwidth"]
    ratios = {"plain step: fraction of the bandwidth bound": bound / step}
    if "tok/s transformers" in medians:
        ratios["plain / transformers, tok/s"] = (
            medians["tok/s plain"] / medians["tok/s transformers"]
        )
    for name, value in medians.items():
        way = name.removeprefix("tok/s ")
        if way not in (name, "plain", "transformers"):
            ratios[f"{way} / plain, tok/s"] = value / medians["tok/s plain"]
            ratios[f"{way}: round in plain steps"] = medians[f"round ms {way}"] / step
    return {"medians": medians, "ratios": ratios, "bandwidth_bound_ms": bound}


def show(report: dict[str, Any]) -> None:
    """Prints the tables."""
    medians, ratios = report["medians"], report["ratios"]
    ways = [name.removeprefix("tok/s ") for name in medians if name.startswith("tok/s ")]
    click.echo(f"{'':58}{'tok/s':>8}{'ms/round':>10}{'AL':>7}{'x plain':>9}{'steps':>7}")
    for way in ways:
        cells = (
            f"{medians[f'tok/s {way}']:8.1f}",
            _cell(medians.get(f"round ms {way}"), 10, 1),
            _cell(medians.get(f"acceptance length {way}"), 7, 2),
            _cell(ratios.get(f"{way} / plain, tok/s"), 9, 2),
            _cell(ratios.get(f"{way}: round in plain steps"), 7, 2),
        )
        click.echo(f"{way:58}" + "".join(cells))
    click.echo(
        f"\nread bandwidth {medians['bandwidth'] / 1e9:.1f} GB/s, "
        f"bound {report['bandwidth_bound_ms']:.1f} ms per step; plain decoding reaches "
        f"{ratios['plain step: fraction of the bandwidth bound']:.2f} of it"
    )
    if "plain / transformers, tok/s" in ratios:
        click.echo(f"plain / transformers: {ratios['plain / transformers, tok/s']:.2f}")
    different = [way for way, same in report["tokens_identical"].items() if not same]
    click.echo(f"tokens identical to plain decoding: {different or 'all'}")


def _cell(value: float | None, width: int, digits: int) -> str:
    return " " * width if value is None else f"{value:{width}.{digits}f}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
