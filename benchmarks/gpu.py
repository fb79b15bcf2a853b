"""The GPU kernels and the fused program on one GPU: are they right, how fast, and how far from it.

    python benchmarks/gpu.py --output benchmarks/results/gpu-h200.json

Meant for a few minutes on an H200, where it has not run yet. In this order: it measures the card's
own ceilings (copy bandwidth, bfloat16 products); checks every kernel against the XLA reference in
float32, at odd small sizes and at those of real models; times the kernels against XLA's and cuDNN's
attention; and times rounds of the whole program on random weights of real shapes, of their first
layers alone: plain, EAGLE-3 and P-EAGLE drafting, with scripted acceptance. Each result is printed
and written when it is there; what fails is a row of its own; what there is no time for is named.

A kernel that reads where it may not leaves the process without its GPU, so that all after it fails;
`--only` runs the others. `--tiny` runs a selection on a CPU with toy shapes, kernels in interpret
mode: that tests this script alone.
"""

import functools
import os
from collections.abc import Callable
from datetime import date
from pathlib import Path

import click
import jax
import jax.numpy as jnp
from gpu_kernels import Bench, timed
from gpu_programs import WAYS, Cell, Models
from gpu_report import Budget, Journal, Report
from gpu_sizes import kernel_cases, program_sizes


@click.command()
@click.option("--tiny", is_flag=True, help="Toy shapes, on a CPU.")
@click.option("--seconds", default=240.0, show_default=True, help="After these nothing begins.")
@click.option("--only", multiple=True, help="Part of a name, of what is run; may be repeated.")
@click.option("--output", type=Path, help="JSON file to write.")
def main(tiny: bool, seconds: float, only: tuple[str, ...], output: Path | None) -> None:
    """Check and measure; print tables, write JSON."""
    if tiny:  # the threads of an interpreted kernel wait for each other, so XLA needs as many
        os.environ.setdefault("NPROC", "16")
    device = jax.devices()[0]
    if not tiny and device.platform != "gpu":
        raise click.ClickException("no GPU; --tiny runs toy shapes on a CPU")
    dtype = jnp.dtype(jnp.float32 if tiny else jnp.bfloat16)
    facts = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "date": date.today().isoformat(),
        "dtype": str(dtype),
    }
    journal = Journal(facts, Budget(seconds), output)
    found = ceilings(1 << 20, 64) if tiny else ceilings(4 << 30, 8192)
    journal.note("ceilings", found)
    copy, product = found["copy"] / 1e9, found["flops"] / 1e12
    click.echo(f"copy {copy:,.0f} GB/s, product {product:,.1f} TFLOP/s")

    def wanted(name: str) -> bool:
        return not only or any(part in name for part in only)

    kernels(journal, wanted, found, tiny, dtype)
    programs(journal, wanted, found["copy"], tiny, dtype)
    journal.note("ended", True)
    click.echo(f"\n{journal.budget.used:.0f} s")
    if journal.skipped:
        click.echo(f"skipped: {', '.join(journal.skipped)}")
    if wrong := journal.wrong():
        raise click.ClickException(f"wrong: {', '.join(wrong)}")


def ceilings(size: int, width: int) -> dict[str, float]:
    """Returns what the card can do.

    Args:
      size: bytes that are copied.
      width: M of the M x M product.

    Returns:
      "copy", bytes per second (read and written), and "flops", operations per second.
    """
    source = jax.random.normal(jax.random.key(0), (size // 4,))
    copied = timed(jax.jit(lambda x: x + 1), source)
    # Random: a product of ones changes few bits, so it takes less power and may clock higher.
    square = jax.random.normal(jax.random.key(0), (width, width), jnp.bfloat16)
    multiplied = timed(jax.jit(jnp.matmul), square, square)
    return {"copy": 2 * size / copied, "flops": 2 * width**3 / multiplied}


def kernels(
    journal: Journal,
    wanted: Callable[[str], bool],
    found: dict[str, float],
    tiny: bool,
    dtype: jnp.dtype,
) -> None:
    """Checks all kernels, then times those that ran."""
    cases = [case for case in kernel_cases(tiny, dtype) if wanted(case.name)]
    bench = Bench(cases, found, journal.budget, tiny)
    click.echo(f"\n{'kernel':44}{'error':>9}")
    for case in cases:
        check = functools.partial(bench.check, case)
        if entry := journal.attempt("kernels", "check", case.name, check):
            click.echo(check_row(entry))
    bench.settle()
    click.echo(
        f"\n{'kernel':44}{'us':>10}{'xla us':>10}{'cudnn us':>10}{'GB/s':>8}{'of copy':>9}"
        f"{'TFLOP/s':>9}{'of peak':>9}"
    )
    for case in cases:
        if case.work and not journal.failed(case.name):
            time = functools.partial(bench.time, case)
            if entry := journal.attempt("kernels", "time", case.name, time):
                click.echo(time_row(entry))
    bench.close()


def programs(
    journal: Journal,
    wanted: Callable[[str], bool],
    bandwidth: float,
    tiny: bool,
    dtype: jnp.dtype,
) -> None:
    """Times whole programs, the smaller batch of all targets first."""
    sizes = program_sizes(tiny)
    models = functools.cache(lambda name: Models.random(name, sizes.targets[name], dtype))
    click.echo(
        f"\n{'program':34}{'round ms':>9}{'draft':>8}{'verify':>8}{'plain steps':>12}"
        f"{'bound ms':>9}{'of bound':>9}{'AL':>6}{'scripted':>9}{'tok/s':>9}"
    )
    for batch in sizes.batches:
        for target in sizes.targets:
            names = {way: f"{target} B={batch} {way}" for way in WAYS}
            ways = [way for way in WAYS if wanted(names[way])]
            of_target = functools.partial(models, target)
            cell = Cell(of_target, ways, batch, sizes, bandwidth, journal.budget)
            for way in ways:
                measure = functools.partial(cell.measure, way)
                if entry := journal.attempt("program", "program", names[way], measure):
                    click.echo(program_row(entry))
            cell.close()


def check_row(entry: Report) -> str:
    """Returns a row of the first table."""
    if "problem" in entry:
        return problem_row(entry)
    return f"{entry['name']:44}{entry['error']:9.1e}" + ("" if entry["right"] else "  WRONG")


def time_row(entry: Report) -> str:
    """Returns a row of the second table; what the L2 cache can hold is not compared with memory."""
    if "problem" in entry:
        return problem_row(entry)
    times = [entry["seconds"].get(way) for way in ("pallas", "xla", "cudnn")]
    micros = "".join(f"{1e6 * time:10.1f}" if time else f"{'-':>10}" for time in times)
    share = f"{'L2':>9}" if entry["in_l2"] else f"{entry['of_copy']:9.2f}"
    missing = "".join(f"  {way}: {problem}" for way, problem in entry["missing"].items())
    return (
        f"{entry['name']:44}{micros}{entry['bytes_per_second'] / 1e9:8.0f}{share}"
        f"{entry['flops_per_second'] / 1e12:9.1f}{entry['of_flops']:9.2f}{missing[:100]}"
        + ("" if entry["right"] else "  WRONG")
    )


def program_row(entry: Report) -> str:
    """Returns a row of the third table; off the script, tokens per second say nothing."""
    if "problem" in entry:
        return problem_row(entry)
    steps, share = entry["round_in_plain_steps"], entry["verify_of_bound"]
    in_steps = f"{steps:12.2f}" if steps else f"{'-':>12}"
    of_bound = f"{share:9.2f}" if share else f"{'-':>9}"
    return (
        f"{entry['name']:34}{entry['round_ms']:9.2f}{entry['draft_ms']:8.2f}"
        f"{entry['verify_ms']:8.2f}{in_steps}{entry['bound_ms']:9.2f}{of_bound}"
        f"{entry['acceptance_length']:6.2f}{entry['expected_acceptance_length']:9.2f}"
        f"{entry['tokens_per_second']:9.1f}"
        + ("" if entry["as_scripted"] else "  OFF THE SCRIPT: no speed")
    )


def problem_row(entry: Report) -> str:
    """Returns the row of what raised."""
    return f"{entry['name']:44}  FAILED  {entry['problem']}"


if __name__ == "__main__":
    main()
