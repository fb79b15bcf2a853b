"""Which form of the product with a weight is the quickest on this CPU, by rows and shape.

The forms that `peagle_jax/kernels/linear.py` chooses from, each in a loop over weights that
together exceed the caches, interleaved: gigabytes of weights per second, medians.
"""

import statistics
import time
from collections.abc import Callable

import click
import jax
import jax.numpy as jnp

from peagle_jax.kernels import linear

Form = Callable[[jax.Array, jax.Array], jax.Array]

# SmolLM2-135M: fused q/k/v, attention output, fused gate/up, down, vocabulary.
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
ROWS = (1, 2, 4, 8, 16)


def packed(rows: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(rows, weight, (((1,), (1,)), ((), ())))


def fused(rows: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.sum(weight * rows[:, None], axis=-1)


def fused_inner(rows: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.sum(weight[:, None] * rows, axis=-1).T


def halves(rows: jax.Array, weight: jax.Array) -> jax.Array:
    cut = weight.reshape(2, weight.shape[0] // 2, -1)
    each = jnp.broadcast_to(rows.T, (2, *rows.T.shape))
    return jnp.matmul(cut, each).reshape(weight.shape[0], -1).T


FORMS: dict[str, Form] = {
    "packed": packed,
    "fused": fused,
    "inner": fused_inner,
    "halves": halves,
    "linear": linear,
}


@click.command()
@click.option("--megabytes", default=256, show_default=True, help="Weights read per pass.")
@click.option("--repeats", default=5, show_default=True)
def main(megabytes: int, repeats: int) -> None:
    """Print GB/s by shape, rows and form; `linear` is what the library chooses."""
    click.echo(f"{'out x in':>12}{'rows':>6}" + "".join(f"{name:>9}" for name in FORMS))
    for out, width in SHAPES:
        count = max(2, megabytes * 10**6 // (4 * out * width))
        keys = jax.random.split(jax.random.key(0), count)
        weights = [jax.random.normal(key, (out, width)) for key in keys]
        for rows in ROWS:
            speeds = measure(weights, rows, repeats)
            cells = "".join(f"{speed:9.1f}" for speed in speeds.values())
            click.echo(f"{f'{out} x {width}':>12}{rows:6}{cells}")


def measure(weights: list[jax.Array], rows: int, repeats: int) -> dict[str, float]:
    """Returns GB/s of each form, over a chain of products with all the weights."""
    x = jnp.ones((rows, weights[0].shape[1]))
    size = sum(w.nbytes for w in weights)
    seconds: dict[str, list[float]] = {name: [] for name in FORMS}
    programs = {name: jax.jit(chain(form)) for name, form in FORMS.items()}
    for repeat in range(repeats + 1):
        for name, program in programs.items():
            started = time.perf_counter()
            program(x, weights).block_until_ready()
            if repeat > 0:  # the first one compiles
                seconds[name].append(time.perf_counter() - started)
    return {name: size / statistics.median(s) / 1e9 for name, s in seconds.items()}


def chain(form: Form) -> Callable[[jax.Array, list[jax.Array]], jax.Array]:
    """Returns a function that multiplies by each weight, every product waiting for the last."""

    def run(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for weight in weights:
            out = jax.lax.optimization_barrier(form(x, weight))
            x = x + 1e-6 * out[:, :1]
        return x

    return run


if __name__ == "__main__":
    main()
