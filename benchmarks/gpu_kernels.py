"""How `gpu.py` checks and times a kernel: programs compiled ahead in threads, then run in turn."""

import concurrent.futures
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from gpu_report import Budget, Report, problem_of

Arrays = tuple[Any, ...]  # or None, where a kernel takes it
Function = Callable[..., Any]
Program = concurrent.futures.Future[Function]

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}  # norm of the error by that of what is right
CALL_SECONDS = 5e-3  # of a timed call at the ceilings; dispatching it takes some 50 us
MOST_PAIRS = 50
# Bytes of the L2 cache of H100 and H200. What comes again after fewer may be read from there; after
# several times as many it comes from memory.
L2_BYTES = 52_428_800


@dataclasses.dataclass(frozen=True)
class Work:
    """What has to be done in one run.

    Attributes:
      size: bytes to move.
      flops: operations.
      cycle: bytes moved until the same ones come again; None for `size`.
    """

    size: float
    flops: float
    cycle: float | None = None


@dataclasses.dataclass(frozen=True)
class Rival:
    """Another implementation: what it computes, of the inputs in the order that it wants."""

    function: Function
    arranged: Callable[..., Arrays]


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one shape.

    Attributes:
      name: of the entry, the kernel's first.
      inputs: makes the arrays from a random key.
      kernel: takes them and returns one array or several.
      xla: the same by XLA. Of inputs in float32 it is the reference.
      work: None for a case that is only checked.
      cudnn: a rival, or None.
      feed: what a run passes to the next one as its first input.
      vary: other inputs for run i, so that it does not find its own in the cache.
    """

    name: str
    inputs: Callable[[jax.Array], Arrays]
    kernel: Function
    xla: Function
    work: Work | None = None
    cudnn: Rival | None = None
    feed: Function = lambda found: found
    vary: Callable[..., Arrays] = lambda i, *inputs: inputs

    def ways(self) -> dict[str, Rival]:
        """Returns what is timed, by name."""
        ways = {"pallas": Rival(self.kernel, tuple_of), "xla": Rival(self.xla, tuple_of)}
        return ways | ({"cudnn": self.cudnn} if self.cudnn else {})

    def error(self, *inputs: Any) -> jax.Array:
        """Returns the largest relative error of the kernel's arrays, `[]` float32."""
        expected = self.xla(*jax.tree.map(_wide, inputs))
        errors = jax.tree.map(_relative, self.kernel(*inputs), expected)
        return jnp.stack(jax.tree.leaves(errors)).max()

    def repeated(self, way: Rival, pairs: int) -> Function:
        """Returns pairs of runs as one function of all arrays: none is a constant of the program.

        What a run returns is the first input of the next one, so none can be left out or moved; and
        the barrier has the other inputs wait for it too, else XLA would do what needs them alone
        (casts to float32, say) once before the loop instead of in every run. The values fade away
        from run to run, which the time of no product depends on. A loop over single runs would copy
        each result to where it found its input; over pairs the second one writes there itself.
        """

        def loop(first: Any, *rest: Any) -> Any:
            def run(i: jax.Array, fed: Any) -> Any:
                inputs = jax.lax.optimization_barrier((fed, *rest))
                return self.feed(way.function(*self.vary(i, *inputs)))

            return jax.lax.fori_loop(0, pairs, lambda i, x: run(2 * i + 1, run(2 * i, x)), first)

        return loop


def tuple_of(*inputs: Any) -> Arrays:
    """Returns its arguments."""
    return inputs


class Bench:
    """Checks and times cases whose programs were compiled side by side."""

    def __init__(
        self, cases: Sequence[Case], ceilings: dict[str, float], budget: Budget, tiny: bool = False
    ):
        """Begins to compile: first what checks, then what is timed.

        Args:
          cases: in the order in which they will be asked for.
          ceilings: bytes per second of a copy, "copy", and operations per second, "flops".
          budget: nothing is waited for longer.
          tiny: two runs per timing.
        """
        self._ceilings, self._budget, self._tiny = ceilings, budget, tiny
        self._pool = concurrent.futures.ThreadPoolExecutor()
        self._lowering = threading.Lock()
        self._key = jax.random.key(0)
        self._inputs: dict[str, Program] = {}
        self._checks: dict[str, Program] = {}
        self._loops: dict[tuple[str, str], Program] = {}
        for case in cases:
            self._inputs[case.name] = self._ahead(case.inputs, lambda: (self._key,))
            self._checks[case.name] = self._ahead(case.error, self._shapes(case, tuple_of))
        for case in cases:
            if case.work:
                pairs = self._pairs(case.work)
                for name, way in case.ways().items():
                    shapes = self._shapes(case, way.arranged)
                    self._loops[case.name, name] = self._ahead(case.repeated(way, pairs), shapes)

    def check(self, case: Case) -> Report:
        """Compares a kernel with the reference."""
        error = float(self._ready(self._checks[case.name])(*self._made(case)))
        dtype = self._shapes(case, tuple_of)()[0].dtype
        return {"right": error < TOLERANCE[str(dtype)], "error": error}

    def settle(self) -> None:
        """Waits until all is compiled: tracing in a thread would disturb what is timed."""
        concurrent.futures.wait(self._loops.values(), timeout=self._budget.left)

    def time(self, case: Case) -> Report:
        """Times a kernel and its rivals; a rival may be missing, or refuse a shape."""
        assert case.work
        inputs = self._made(case)
        runs = 2 * self._pairs(case.work)
        times: dict[str, float | None] = {}
        missing: dict[str, str] = {}
        for name, way in case.ways().items():
            try:
                loop = self._ready(self._loops[case.name, name])
                times[name] = timed(loop, *way.arranged(*inputs)) / runs
            except Exception as error:
                if name == "pallas" or isinstance(error, TimeoutError):
                    raise
                times[name], missing[name] = None, problem_of(error)
        seconds = times["pallas"]
        assert seconds is not None
        bandwidth, speed = case.work.size / seconds, case.work.flops / seconds
        cached = (case.work.cycle or case.work.size) <= L2_BYTES
        return {
            "seconds": times,
            "missing": missing,
            "bytes_per_second": bandwidth,
            "flops_per_second": speed,
            "in_l2": cached,
            "of_copy": None if cached else bandwidth / self._ceilings["copy"],
            "of_flops": speed / self._ceilings["flops"],
        }

    def close(self) -> None:
        """Compiles no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _pairs(self, work: Work) -> int:
        if self._tiny:
            return 1
        least = max(work.size / self._ceilings["copy"], work.flops / self._ceilings["flops"])
        return max(1, min(MOST_PAIRS, round(CALL_SECONDS / least / 2)))

    def _shapes(self, case: Case, arranged: Callable[..., Arrays]) -> Callable[[], Arrays]:
        return lambda: jax.eval_shape(lambda key: arranged(*case.inputs(key)), self._key)

    def _ahead(self, function: Function, shapes: Callable[[], Arrays]) -> Program:
        def compiled() -> Function:
            with self._lowering:  # Python runs in one thread at a time anyway
                lowered = jax.jit(function).lower(*shapes())
            return lowered.compile()

        return self._pool.submit(compiled)

    def _ready(self, program: Program) -> Function:
        return program.result(timeout=self._budget.left)

    def _made(self, case: Case) -> Arrays:
        return self._ready(self._inputs[case.name])(self._key)


def timed(function: Function, *inputs: Any, repeats: int = 5) -> float:
    """Returns the median seconds of a call that the host waits for, after one that warms up.

    Slow ones are repeated less often: no more begin after a second.
    """
    jax.block_until_ready(function(*inputs))
    seconds: list[float] = []
    while len(seconds) < repeats and sum(seconds) < 1:
        begin = time.perf_counter()
        jax.block_until_ready(function(*inputs))
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _wide(x: jax.Array) -> jax.Array:
    """Returns floats in float32, and zeros where NaN says that a kernel may not look."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jnp.nan_to_num(x.astype(jnp.float32))


def _relative(found: jax.Array, expected: jax.Array) -> jax.Array:
    difference = found.astype(jnp.float32) - expected.astype(jnp.float32)
    return jnp.linalg.norm(difference) / jnp.linalg.norm(expected.astype(jnp.float32))
