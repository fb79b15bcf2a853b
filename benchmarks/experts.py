"""Which schedule of a mixture of experts is the quickest on this machine, by rows and layer.

`peagle_jax/kernels/experts.py` chooses between blocks and pairs. Here both run in turns with
`jax.lax.ragged_dot` over rows sorted by expert and with the product of all rows with all experts:
medians, as multiples of the blocks' time. Every repeat has routes of its own, the same for all
schedules, whose results are compared.
"""

import dataclasses
import functools
import json
import statistics
import time
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


class Layer:
    """Random experts, each `down(silu(gate(x)) * up(x))`, as a JAX argument."""

    def __init__(self, shape: Shape, gate_up: jax.Array | MXFP4, down: jax.Array | MXFP4):
        self.shape, self.gate_up, self.down = shape, gate_up, down

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
    return weights.unpack(index, jnp.float32) if isinstance(weights, MXFP4) else weights[index]


def every(weights: jax.Array | MXFP4) -> jax.Array:
    """Returns all experts' weights `[E, out, in]`."""
    if isinstance(weights, MXFP4):
        return unpack_mxfp4(weights.blocks[...], weights.scales[...], jnp.float32)
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
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    inner = jax.lax.ragged_dot_general(rows[order // k], every(layer.gate_up), sizes, numbers)
    out = jax.lax.ragged_dot_general(gated(inner), every(layer.down), sizes, numbers)
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
@click.option("--repeats", default=7, show_default=True)
@click.option("--limit", default=2.0, show_default=True, help="Seconds above which once is enough.")
@click.option("--gigabytes", default=8.0, show_default=True, help="Most that pairs may unpack.")
@click.option("--output", type=Path, help="JSON file to write.")
def main(repeats: int, limit: float, gigabytes: float, output: Path | None) -> None:
    """Print milliseconds of the blocks and multiples of them; write JSON."""
    measured = []
    with tqdm(total=len(SHAPES) * len(ROWS), unit="case") as bar:
        for name, shape in SHAPES.items():
            layer = Layer.random(shape)
            for rows in ROWS:
                most = gigabytes * 1e9 / shape.expert_bytes
                left_out = {"pairs"} if rows * shape.chosen > most else set()
                found = measure(layer, rows, repeats, limit, left_out)
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


def measure(
    layer: Layer, num_rows: int, repeats: int, limit: float, left_out: set[str]
) -> dict[str, Any]:
    """Times the schedules in turns.

    Returns:
      `milliseconds` by schedule (medians), `times_blocks` (ratios of them), and
      `largest_difference` of a result from that of the blocks, relative to their largest value.
    """
    rng = np.random.default_rng(num_rows)
    programs = {
        name: jax.jit(functools.partial(schedule, layer))
        for name, schedule in SCHEDULES.items()
        if name not in left_out
    }
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    largest = 0.0
    for repeat in range(repeats + 1):
        arguments = routes(layer.shape, num_rows, rng)
        results = {}
        for name, program in programs.items():
            if seconds[name] and seconds[name][0] > limit:
                continue
            started = time.perf_counter()
            results[name] = np.asarray(program(*arguments))
            if repeat > 0:  # the first one compiles
                seconds[name].append(time.perf_counter() - started)
        scale = np.abs(results["blocks"]).max()
        for result in results.values():
            largest = max(largest, float(np.abs(result - results["blocks"]).max() / scale))
    medians = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
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
