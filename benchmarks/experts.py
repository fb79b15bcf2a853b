"""Which schedule of a mixture of experts is the quickest on this machine, by rows and layer.

`peagle_jax/kernels/experts.py` chooses between blocks and pairs. Here both run in turns with
`jax.lax.ragged_dot` over rows sorted by expert and with the product of all rows with all experts:
medians, as multiples of the blocks' time. Every repeat has routes of its own, the same for all
schedules, whose results are compared. `ragged_dot` is given its plain weights `[E, in, out]`, which
it is quicker with.
"""

import dataclasses
import functools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from peagle_jax.kernels import Product, experts, linear
from peagle_jax.models.quantized import MXFP4, unpack_mxfp4

ROWS = (1, 8, 64, 512)
TOLERANCE = 1e-5  # of the largest value
FLOAT32 = jnp.dtype("float32")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a layer: experts, those of a row, width of the rows and of an expert."""

    experts: int
    chosen: int
    hidden: int
    inner: int
    mxfp4: bool = False

    @property
    def expert_bytes(self) -> int:
        """Size of one expert in float32, as it is multiplied."""
        return 3 * self.hidden * self.inner * 4


# Half as wide as the models: the matrices are a quarter of theirs, the experts as many.
SHAPES = {
    "Qwen3-Coder": Shape(128, 8, 1024, 384),
    "GPT-OSS": Shape(32, 4, 1440, 1440),
    "GPT-OSS, MXFP4": Shape(32, 4, 1440, 1440, mxfp4=True),
}


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["gate_up", "down"], meta_fields=["shape"]
)
@dataclasses.dataclass(frozen=True)
class Layer:
    """Random experts, each `down(silu(gate(x)) * up(x))`, as an argument of compiled functions.

    Attributes:
      shape: sizes.
      gate_up: `[E, 2I, H]`.
      down: `[E, H, I]`.
    """

    shape: Shape
    gate_up: jax.Array | MXFP4
    down: jax.Array | MXFP4

    @classmethod
    def random(cls, shape: Shape) -> "Layer":
        """Makes a layer with random weights."""
        rng = np.random.default_rng(0)

        def stacked(out: int, width: int) -> jax.Array | MXFP4:
            if not shape.mxfp4:
                scale = np.float32(width**-0.5)
                values = rng.standard_normal((shape.experts, out, width), np.float32) * scale
                return jnp.asarray(values)
            weights = MXFP4((shape.experts, out, width))
            blocks = rng.integers(0, 256, weights.blocks.shape, np.uint8)
            weights.blocks[...] = jnp.asarray(blocks)
            weights.scales[...] = jnp.full(weights.scales.shape, 127 - 6, jnp.uint8)
            return weights

        return cls(
            shape,
            stacked(2 * shape.inner, shape.hidden),
            stacked(shape.hidden, shape.inner),
        )

    def expert(self, index: jax.Array, rows: jax.Array, product: Product) -> jax.Array:
        """Computes one expert for rows `[T, H]`; as the kernel wants it."""
        inner = gated(product(rows, one(self.gate_up, index)))
        return product(inner, one(self.down, index))


def gated(fused: jax.Array) -> jax.Array:
    gate, up = jnp.split(fused, 2, axis=-1)
    return jax.nn.silu(gate) * up


def one(weights: jax.Array | MXFP4, index: jax.Array) -> jax.Array:
    """Returns one expert's weight `[out, in]`."""
    return weights.unpack(index, FLOAT32) if isinstance(weights, MXFP4) else weights[index]


def input_first(layer: Layer) -> Layer:
    """Returns the layer with plain weights as `[E, in, out]`."""

    def swapped(weights: jax.Array | MXFP4) -> jax.Array | MXFP4:
        return weights if isinstance(weights, MXFP4) else jnp.swapaxes(weights, 1, 2)

    return Layer(layer.shape, swapped(layer.gate_up), swapped(layer.down))


def every(weights: jax.Array | MXFP4) -> jax.Array:
    """Returns all experts' weights `[E, in, out]` of a layer that `input_first` made."""
    if isinstance(weights, MXFP4):
        unpacked = unpack_mxfp4(weights.blocks[...], weights.scales[...], FLOAT32)
        return jnp.swapaxes(unpacked, 1, 2)
    return weights


# Each of them: rows [R, H], chosen [R, k] and weights [R, k] to [R, H].


def blocks(layer: Layer, rows: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
    out = experts._by_block(rows, chosen, layer.shape.experts, layer.expert)
    return jnp.einsum("rkh,rk->rh", out, weights)


def pairs(layer: Layer, rows: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
    out = experts._by_pair(rows, chosen, layer.expert)
    return jnp.einsum("rkh,rk->rh", out, weights)


def ragged(layer: Layer, rows: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
    flat, k = chosen.reshape(-1), chosen.shape[1]
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=layer.shape.experts).astype(jnp.int32)
    inner = jax.lax.ragged_dot(rows[order // k], every(layer.gate_up), sizes)
    out = jax.lax.ragged_dot(gated(inner), every(layer.down), sizes)
    out = out[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return jnp.einsum("rkh,rk->rh", out, weights)


def all_experts(layer: Layer, rows: jax.Array, chosen: jax.Array, weights: jax.Array) -> jax.Array:
    row = jnp.arange(len(rows))[:, None]
    shares = jnp.zeros((len(rows), layer.shape.experts)).at[row, chosen].set(weights)  # [R, E]

    def add(index: jax.Array, total: jax.Array) -> jax.Array:
        return total + shares[:, index, None] * layer.expert(index, rows, linear)

    return jax.lax.fori_loop(0, layer.shape.experts, add, jnp.zeros_like(rows))


SCHEDULES: dict[str, Callable[..., jax.Array]] = {
    "blocks": blocks,
    "pairs": pairs,
    "ragged_dot": ragged,
    "all experts": all_experts,
}


@click.command()
@click.option("--repeats", default=5, show_default=True)
@click.option("--limit", default=1.0, show_default=True, help="Seconds above which once is enough.")
@click.option("--gigabytes", default=4.0, show_default=True, help="Most that pairs may gather.")
@click.option("--output", type=Path, help="JSON file to write.")
def main(repeats: int, limit: float, gigabytes: float, output: Path | None) -> None:
    """Print milliseconds of the blocks and multiples of them; write JSON."""
    measured = []
    with tqdm(total=len(SHAPES) * len(ROWS), unit="case", disable=None) as bar:
        for name, shape in SHAPES.items():
            layers = dict.fromkeys(SCHEDULES, Layer.random(shape))
            layers["ragged_dot"] = input_first(layers["ragged_dot"])
            for rows in ROWS:
                if rows * shape.chosen * shape.expert_bytes > gigabytes * 1e9:
                    layers.pop("pairs", None)
                found = measure(layers, rows, repeats, limit)
                measured.append({"layer": name, "rows": rows, **found})
                bar.update()
    show(measured)
    if output:
        report = {
            "measured": measured,
            "setting": {
                "layers": {name: dataclasses.asdict(shape) for name, shape in SHAPES.items()},
                "repeats": repeats,
                "dtype": "float32",
                "jax": jax.__version__,
                "device": jax.devices()[0].device_kind,
                "machine": _cpu_name(),
            },
        }
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=2) + "\n")
        click.echo(f"\nwritten to {output}", err=True)
    worst = max(case["largest_difference"] for case in measured)
    if worst > TOLERANCE:
        raise click.ClickException(f"results differ by {worst:.1e}, more than {TOLERANCE:.0e}")


def measure(layers: dict[str, Layer], num_rows: int, repeats: int, limit: float) -> dict[str, Any]:
    """Times schedules in turns.

    Args:
      layers: by schedule, the same layer as each of them wants it.
      num_rows: R.
      repeats: passes over the schedules after the first.
      limit: seconds above which the first pass is enough.

    Returns:
      `milliseconds` by schedule (medians; what took longer than `limit` in the first pass over
      everything ran only there), `times_blocks` (ratios of them), and `largest_difference` of a
      result from that of the blocks, relative to their largest value.
    """
    rng = np.random.default_rng(num_rows)
    shape = layers["blocks"].shape
    arguments = routes(shape, num_rows, rng)
    programs = {
        name: jax.jit(SCHEDULES[name]).lower(layer, *arguments).compile()
        for name, layer in layers.items()
    }
    seconds: dict[str, list[float]] = defaultdict(list)
    slow: dict[str, float] = {}
    largest = 0.0
    for repeat in range(repeats + 1):
        results = {}
        for name, program in programs.items():
            if name in slow:
                continue
            started = time.perf_counter()
            results[name] = np.asarray(program(layers[name], *arguments))
            taken = time.perf_counter() - started
            if repeat > 0:
                seconds[name].append(taken)
            elif taken > limit and name != "blocks":
                slow[name] = taken
        scale = np.abs(results["blocks"]).max()
        for result in results.values():
            largest = max(largest, float(np.abs(result - results["blocks"]).max() / scale))
        arguments = routes(shape, num_rows, rng)
    medians = {
        name: 1e3 * (slow[name] if name in slow else statistics.median(seconds[name]))
        for name in programs
    }
    return {
        "milliseconds": medians,
        "times_blocks": {name: value / medians["blocks"] for name, value in medians.items()},
        "largest_difference": largest,
    }


def routes(shape: Shape, num_rows: int, rng: np.random.Generator) -> tuple[jax.Array, ...]:
    """Returns random rows `[R, H]`, and k different experts of each with their weights."""
    rows = rng.standard_normal((num_rows, shape.hidden), np.float32)
    order = np.argsort(rng.random((num_rows, shape.experts)), axis=1)
    weights = rng.dirichlet(np.ones(shape.chosen), num_rows).astype(np.float32)
    chosen = order[:, : shape.chosen].astype(np.int32)
    return jnp.asarray(rows), jnp.asarray(chosen), jnp.asarray(weights)


def show(measured: list[dict[str, Any]]) -> None:
    """Prints the table."""
    others = [name for name in SCHEDULES if name != "blocks"]
    click.echo(f"{'layer':16}{'rows':>5}{'blocks, ms':>12}", nl=False)
    click.echo("".join(f"{name:>13}" for name in others) + f"{'difference':>13}")
    for case in measured:
        ratios = case["times_blocks"]
        cells = (f"{ratios[name]:12.2f}x" if name in ratios else f"{'-':>13}" for name in others)
        click.echo(
            f"{case['layer']:16}{case['rows']:5}{case['milliseconds']['blocks']:12.2f}", nl=False
        )
        click.echo("".join(cells) + f"{case['largest_difference']:13.1e}")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"


if __name__ == "__main__":
    main()
