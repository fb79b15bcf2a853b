"""The GPU kernels and the fused program on one GPU: are they right, how fast, and how far from it.

    python benchmarks/gpu.py --output benchmarks/results/gpu-h200.json

Meant for a few minutes on an H200, where it has not run yet. It measures the card's own ceilings
(copy bandwidth, bfloat16 products), checks every kernel against the XLA reference in float32, times
it against XLA's and cuDNN's attention, and then times rounds of the whole program on random weights
of real shapes, of their first layers alone: plain, EAGLE-3 and P-EAGLE drafting, with scripted
acceptance. `--tiny` runs all of it on a CPU with toy shapes, kernels in interpret mode: that tests
this script alone.
"""

import concurrent.futures
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import peagle_jax
from peagle_jax.batch import Batch
from peagle_jax.config import TargetConfig
from peagle_jax.decoding import (
    AutoregressiveDraft,
    NoDraft,
    ParallelDraft,
    Proposer,
    ScriptedDraft,
)
from peagle_jax.kernels import (
    cod_attention,
    masked_attention,
    mxfp4_product,
    prefill_attention,
    verify_attention,
)
from peagle_jax.kernels.attention import xla_attention
from peagle_jax.load import LoadedTarget
from peagle_jax.models import Drafter, Frozen, Target
from peagle_jax.models.quantized import unpack_mxfp4
from peagle_jax.presets import TARGETS, usual_drafter
from peagle_jax.profile import draft_share
from peagle_jax.training.mask import Rows, sees

Report = dict[str, Any]
# Drafts accepted in the rounds of the script, over and over: acceptance length 3 of K = 3 and more.
SCRIPT = (3, 1, 2, 3, 1, 2)
# Layers of the targets: 64 programs have to be compiled in the time there is.
LAYERS = {"llama-3.1-8b": 8, "gpt-oss-20b": 4}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
      attention: name to (B, T, N, N_kv, S, D, window) of verifications.
      prefills: name to (B, T, N, N_kv, D, window).
      cod: (S real rows, chains, depths, N, N_kv, D).
      experts: name to (E, experts a row, rows, out, in).
      targets: name to config.
      batches, prompt, rounds: of the whole program.
      copy: bytes of the copy, and M of the M x M product.
      repeats: runs of a kernel in one timing.
    """

    attention: dict[str, tuple[int, int, int, int, int, int, int | None]]
    prefills: dict[str, tuple[int, int, int, int, int, int | None]]
    cod: tuple[int, int, int, int, int, int]
    experts: dict[str, tuple[int, int, int, int, int]]
    targets: dict[str, TargetConfig]
    batches: tuple[int, ...]
    prompt: int
    rounds: int
    copy: int
    product: int
    repeats: int


def real_sizes() -> Sizes:
    """Returns the sizes of real models."""
    return Sizes(
        attention={
            "llama-8b B=8 T=8 8k": (8, 8, 32, 8, 8192, 128, None),
            "llama-8b B=8 T=8 32k": (8, 8, 32, 8, 32768, 128, None),
            "llama-8b B=8 T=1 8k": (8, 1, 32, 8, 8192, 128, None),
            "llama-8b B=1 T=8 32k": (1, 8, 32, 8, 32768, 128, None),
            "qwen3-coder B=8 T=8 8k": (8, 8, 32, 4, 8192, 128, None),
            "gpt-oss B=8 T=8 8k": (8, 8, 64, 8, 8192, 64, None),
            "gpt-oss B=8 T=14 32k": (8, 14, 64, 8, 32768, 64, None),
            "gpt-oss B=8 T=8 window 128": (8, 8, 64, 8, 8192, 64, 128),
        },
        prefills={
            "llama-8b 8k": (1, 8192, 32, 8, 128, None),
            "llama-8b B=8 1k": (8, 1024, 32, 8, 128, None),
            "gpt-oss 8k": (1, 8192, 64, 8, 64, None),
            "gpt-oss 8k window 128": (1, 8192, 64, 8, 64, 128),
        },
        cod=(2048, 2048, 8, 32, 8, 128),
        experts={
            "gpt-oss-20b 1 row": (32, 4, 1, 5760, 2880),
            "gpt-oss-20b 8 rows": (32, 4, 8, 5760, 2880),
            "gpt-oss-120b 8 rows": (128, 4, 8, 5760, 2880),
            "gpt-oss-120b 64 rows": (128, 4, 64, 5760, 2880),
        },
        targets={name: first_layers(TARGETS[name], count) for name, count in LAYERS.items()},
        batches=(1, 8),
        prompt=1024,
        rounds=48,
        copy=4 << 30,
        product=8192,
        repeats=20,
    )


def first_layers(config: TargetConfig, count: int) -> TargetConfig:
    """Returns a target of the first layers of another; its rounds take that much less time."""
    moe = config.moe and dataclasses.replace(config.moe, layers=config.moe.layers[:count])
    windows = config.sliding_windows[:count]
    return dataclasses.replace(config, num_layers=count, sliding_windows=windows, moe=moe)


def tiny_sizes() -> Sizes:
    """Returns sizes that a CPU runs in a minute."""

    def small(config: TargetConfig) -> TargetConfig:
        moe = config.moe and dataclasses.replace(
            config.moe, num_experts=4, num_experts_per_token=2, intermediate_size=64,
            layers=(True,),
        )  # fmt: skip
        return dataclasses.replace(
            config, vocab_size=256, hidden_size=64, intermediate_size=64, num_layers=1,
            num_heads=4, num_kv_heads=2, head_dim=16, max_position_embeddings=256,
            sliding_windows=config.sliding_windows[:1], moe=moe, bos_token_id=None,
            eos_token_ids=(),
        )  # fmt: skip

    real = real_sizes()
    return Sizes(
        attention={"tiny": (1, 2, 4, 2, 64, 16, None), "window": (1, 2, 4, 2, 64, 16, 24)},
        prefills={"tiny": (1, 72, 4, 2, 16, None)},
        cod=(48, 8, 3, 2, 1, 16),
        experts={"tiny": (4, 2, 2, 64, 64)},
        targets={name: small(config) for name, config in real.targets.items()},
        batches=(1, 2),
        prompt=16,
        rounds=3,
        copy=1 << 20,
        product=64,
        repeats=1,
    )


@click.command()
@click.option("--tiny", is_flag=True, help="Toy shapes, on a CPU.")
@click.option("--output", type=Path, help="JSON file to write.")
def main(tiny: bool, output: Path | None) -> None:
    """Check and measure; print tables, write JSON."""
    device = jax.devices()[0]
    if not tiny and device.platform != "gpu":
        raise click.ClickException("no GPU; --tiny runs toy shapes on a CPU")
    started = time.perf_counter()
    sizes = tiny_sizes() if tiny else real_sizes()
    dtype = jnp.dtype(jnp.float32 if tiny else jnp.bfloat16)
    report: Report = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "date": date.today().isoformat(),
        "dtype": str(dtype),
    }
    report["ceilings"] = ceilings(sizes)
    show_ceilings(report["ceilings"])
    bench = Bench(sizes.repeats, report["ceilings"], dtype, tiny)
    report["kernels"] = [
        *(verify(bench, name, *shape) for name, shape in sizes.attention.items()),
        *(prefill(bench, name, *shape) for name, shape in sizes.prefills.items()),
        *cod(bench, *sizes.cod),
        *(experts(bench, name, *shape) for name, shape in sizes.experts.items()),
    ]
    show_kernels(report["kernels"])
    report["program"] = [
        entry
        for name, config in sizes.targets.items()
        for entry in program(sizes, name, config, dtype, report["ceilings"]["copy"])
    ]
    show_program(report["program"])
    report["seconds"] = time.perf_counter() - started
    click.echo(f"{report['seconds']:.0f} s")
    if output:
        output.write_text(json.dumps(report, indent=1) + "\n")
    if wrong := [entry["name"] for entry in report["kernels"] if not entry["right"]]:
        raise click.ClickException(f"wrong: {', '.join(wrong)}")


def ceilings(sizes: Sizes) -> dict[str, float]:
    """Returns what the card can do: bytes/s of a copy (read and write), FLOP/s of a product."""
    source = jnp.ones((sizes.copy // 4,), jnp.float32)
    copied = timed(jax.jit(lambda x: x + 1), source)
    square = jnp.ones((sizes.product, sizes.product), jnp.bfloat16)
    multiplied = timed(jax.jit(jnp.matmul), square, square)
    return {"copy": 2 * sizes.copy / copied, "flops": 2 * sizes.product**3 / multiplied}


def timed(function: Callable[..., Any], *arguments: Any, repeats: int = 5) -> float:
    """Returns the median seconds of a call that the host waits for; the first one compiles."""
    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


@dataclasses.dataclass(frozen=True)
class Bench:
    """How kernels are timed: many runs in one program, each fed what the one before gave."""

    repeats: int
    ceilings: dict[str, float]
    dtype: jnp.dtype
    interpret: bool

    def seconds(self, function: Callable[[jax.Array], jax.Array], start: jax.Array) -> float:
        """Returns the seconds of one run of a function from an array to one of its shape."""
        loop = jax.jit(lambda x: jax.lax.fori_loop(0, self.repeats, lambda _, y: function(y), x))
        return timed(loop, start) / self.repeats

    def entry(
        self,
        name: str,
        ways: dict[str, Callable[[jax.Array], jax.Array]],
        reference: Callable[[jax.Array], jax.Array],
        start: jax.Array,
        size: float,
        flops: float,
    ) -> Report:
        """Checks and times one kernel, the first of the ways, against the others.

        Args:
          name: of the entry.
          ways: functions by name.
          reference: the same in float32.
          start: what they take.
          size: bytes that have to be moved.
          flops: operations that have to be done.
        """
        kernel, *_ = ways
        expected = jax.jit(reference)(start).astype(jnp.float32)
        found = jax.jit(ways[kernel])(start).astype(jnp.float32)
        error = float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))
        times: dict[str, Any] = {}
        for way, function in ways.items():
            try:
                times[way] = self.seconds(function, start)
            except Exception as problem:  # cuDNN may be missing, or refuse a shape
                times[way] = None
                click.echo(f"{name}, {way}: {str(problem).splitlines()[0][:100]}", err=True)
        seconds = times[kernel]
        return {
            "name": name,
            "error": error,
            "right": bool(error < (1e-5 if self.dtype == jnp.float32 else 1e-2)),
            "seconds": times,
            "bytes_per_second": size / seconds,
            "flops_per_second": flops / seconds,
            "of_copy": size / seconds / self.ceilings["copy"],
            "of_flops": flops / seconds / self.ceilings["flops"],
        }


def randoms(dtype: jnp.dtype, *shapes: tuple[int, ...]) -> list[jax.Array]:
    """Returns normal numbers of these shapes."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True)]


def wide(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries, keys and values in float32."""
    return q.astype(jnp.float32), k.astype(jnp.float32), v.astype(jnp.float32)


def verify(
    bench: Bench, name: str, b: int, t: int, n: int, n_kv: int, s: int, d: int, window: int | None
) -> Report:
    """`verify_attention` of rows that end a full cache."""
    q, k, v = randoms(bench.dtype, (b, t, n, d), (b, n_kv, s, d), (b, n_kv, s, d))
    first, base = jnp.full((b,), s - t, jnp.int32), jnp.zeros((b,), jnp.int32)
    positions, held = first[:, None] + jnp.arange(t), jnp.arange(s)

    def kernel(q: jax.Array) -> jax.Array:
        return verify_attention(q, k, v, first, base, window, interpret=bench.interpret)

    ways = {
        "pallas": kernel,
        "xla": lambda q: xla_attention(q, k, v, positions, held, window),
        "cudnn": functools.partial(_cudnn, k=k, v=v, lengths=s, window=window),
    }
    seen = min(s, window or s)
    size = (2 * b * n_kv * seen * d + 2 * b * t * n * d) * bench.dtype.itemsize
    return bench.entry(
        f"verify {name}",
        _without_cudnn(bench, ways),
        lambda q: xla_attention(*wide(q, k, v), positions, held, window),
        q,
        size,
        4 * b * t * n * seen * d,
    )


def prefill(
    bench: Bench, name: str, b: int, t: int, n: int, n_kv: int, d: int, window: int | None
) -> Report:
    """`prefill_attention` of whole prompts."""
    q, k, v = randoms(bench.dtype, (b, t, n, d), (b, n_kv, t, d), (b, n_kv, t, d))
    first = jnp.zeros((b,), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(t), (b, t))

    def kernel(q: jax.Array) -> jax.Array:
        return prefill_attention(q, k, v, first, first, window=window, interpret=bench.interpret)

    ways = {
        "pallas": kernel,
        "xla": lambda q: xla_attention(q, k, v, positions, positions, window, own=True),
        "cudnn": functools.partial(_cudnn, k=k, v=v, lengths=t, window=window),
    }
    pairs = sum(min(i + 1, window or t) for i in range(t))
    size = 2 * b * t * (n + n_kv) * d * bench.dtype.itemsize
    return bench.entry(
        f"prefill {name}",
        _without_cudnn(bench, ways),
        lambda q: xla_attention(*wide(q, k, v), positions, positions, window, own=True),
        q,
        size,
        4 * b * n * pairs * d,
    )


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, lengths: int, window: int | None) -> jax.Array:
    """Attention by cuDNN, whose rows see the first keys by their number, not the last.

    So of a verification it does the work, not the same: all rows see all keys.
    """
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    causal = q.shape[1] == keys.shape[1]
    return jax.nn.dot_product_attention(
        q,
        keys,
        values,
        is_causal=causal,
        key_value_seq_lengths=None if causal else jnp.full((q.shape[0],), lengths, jnp.int32),
        local_window_size=(window - 1, 0) if window and causal else None,
        implementation="cudnn",
    )


def _without_cudnn(bench: Bench, ways: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in ways.items() if not (bench.interpret and k == "cudnn")}


def cod(
    bench: Bench, real: int, chains: int, depths: int, n: int, n_kv: int, d: int
) -> list[Report]:
    """`cod_attention`, forward alone and with its gradients, of one document."""
    kept = [np.arange(real)] + [np.arange(0, chains, i + 1) for i in range(1, depths)]
    anchors = np.concatenate(kept).astype(np.int32)
    levels = np.repeat(np.arange(depths), [len(some) for some in kept]).astype(np.int32)
    length = len(anchors)
    rows = jnp.stack([jnp.asarray(anchors), jnp.asarray(levels), jnp.zeros((length,), jnp.int32)])
    q, k, v = randoms(bench.dtype, (length, n, d), (n_kv, length, d), (n_kv, length, d))

    def reference(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        of = Rows(*rows)
        return masked_attention(q[None], k[None], v[None], sees(of, of)[None])[0]

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return cod_attention(q, k, v, rows, rows, interpret=bench.interpret)

    def slope(
        function: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array
    ) -> jax.Array:
        def summed(*arrays: jax.Array) -> jax.Array:
            return jnp.sum(function(*arrays).astype(jnp.float32) ** 2)

        slopes = jax.grad(summed, argnums=(0, 1, 2))(q, k, v)
        shares = [x.astype(jnp.float32).sum() * 0 for x in slopes[1:]]  # keeps them computed
        return (slopes[0].astype(jnp.float32) + sum(shares)).astype(q.dtype)

    pairs = sum(int(a) + 1 + int(level) for a, level in zip(anchors, levels, strict=True))
    size = 2 * length * (n + n_kv) * d * bench.dtype.itemsize
    forward = bench.entry(
        f"cod forward, {length} rows",
        {"pallas": lambda q: kernel(q, k, v), "xla": lambda q: reference(q, k, v)},
        lambda q: reference(*wide(q, k, v)),
        q,
        size,
        4 * n * pairs * d,
    )
    both = bench.entry(
        f"cod forward and backward, {length} rows",
        {"pallas": lambda q: slope(kernel, q, k, v), "xla": lambda q: slope(reference, q, k, v)},
        lambda q: slope(reference, *wide(q, k, v)),
        q,
        4 * size,
        18 * n * pairs * d,
    )
    return [forward, both]


def experts(
    bench: Bench, name: str, count: int, k: int, rows: int, features: int, inputs: int
) -> Report:
    """`mxfp4_product` of rows that chose their experts at random, 8 rows a block."""
    key = jax.random.key(0)
    packed = jax.random.randint(key, (count, features, inputs // 32, 16), 0, 256, jnp.uint8)
    scales = jax.random.randint(key, (count, features, inputs // 32), 118, 124, jnp.uint8)
    rng = np.random.default_rng(0)
    chosen = np.concatenate([rng.permutation(count)[:k] for _ in range(rows)])
    used, amounts = np.unique(chosen, return_counts=True)
    of_block = np.repeat(used, -(-amounts // 8)).astype(np.int32)
    (x,) = randoms(bench.dtype, (len(of_block), 8, inputs))
    ids, amount = jnp.asarray(of_block), jnp.int32(len(of_block))

    def fitted(out: jax.Array) -> jax.Array:  # [blocks, 8, out] -> [blocks, 8, in]
        return (out[..., :inputs] * 0.01).astype(bench.dtype)

    def reference(x: jax.Array) -> jax.Array:
        weights = unpack_mxfp4(packed[ids], scales[ids], x.dtype)
        return fitted(jnp.einsum("bni,boi->bno", x, weights, precision="highest"))

    return bench.entry(
        f"mxfp4 {name}",
        {
            "pallas": lambda x: fitted(
                mxfp4_product(x, ids, amount, packed, scales, interpret=bench.interpret)
            ),
            "xla": reference,
        },
        lambda x: reference(x.astype(jnp.float32)),
        x,
        len(used) * features * inputs * 17 / 32,
        2 * len(of_block) * 8 * features * inputs,
    )


def program(
    sizes: Sizes, name: str, config: TargetConfig, dtype: jnp.dtype, bandwidth: float
) -> list[Report]:
    """Times rounds of the whole program with random weights.

    The script's tokens are those of plain decoding in the same K + 1 row program, so that they are
    accepted as the script says.
    """
    target = LoadedTarget(config, randomised(Target, config, dtype), None, Path(name))
    heads = drafters(config, dtype)
    prompts = [
        np.random.default_rng(i).integers(1, config.vocab_size - 1, sizes.prompt).tolist()
        for i in range(max(sizes.batches))
    ]
    params = peagle_jax.SamplingParams(ignore_eos=True)
    most = (sizes.rounds + 8) * (max(SCRIPT) + 1)

    def run_of(batch: int, proposer: Proposer) -> Batch:
        return Batch(target, proposer, prompts[:batch], [params] * batch, most)

    def scripted(head: Head, tokens: np.ndarray | None, batch: int) -> ScriptedDraft:
        known = np.full((batch, 2 * (sizes.prompt + most) + 512), -1, np.int32)
        if tokens is not None:
            known[:, : tokens.shape[1]] = tokens[:batch]
        return ScriptedDraft(jnp.asarray(known), jnp.asarray(SCRIPT, jnp.int32), head)

    def warm(run: Batch) -> None:
        run.run(0)
        run.run(1)

    drafts = sorted({head.num_drafts for head in heads.values()})
    cold = []
    for batch in sizes.batches:
        scripts = [scripted(head, None, batch) for head in heads.values()]
        ways: list[Proposer] = [NoDraft(), *map(NoDraft, drafts), *scripts]
        cold += [run_of(batch, proposer) for proposer in ways]
    with concurrent.futures.ThreadPoolExecutor() as pool:  # XLA compiles them side by side
        list(pool.map(warm, cold))
    del cold
    entries: list[Report] = []
    for batch in sizes.batches:
        known = {}
        for count in drafts:
            exact = run_of(batch, NoDraft(count))
            known[count] = np.asarray(exact.run().tokens)
        plain = None
        for way, head in {"plain": None, **heads}.items():
            proposer: Proposer = NoDraft()
            if head is not None:
                proposer = scripted(head, known[head.num_drafts], batch)
            run = run_of(batch, proposer)
            run.run(0)
            before, tokens = run.seconds, int(run.generation.lengths[:batch].sum())
            run.run(sizes.rounds)
            seconds = (run.seconds - before) / sizes.rounds
            made = int(run.generation.lengths[:batch].sum()) - tokens
            share = draft_share(run) if head else 0.0
            plain = plain or seconds
            size = read_bytes(target.weights, config, batch * (proposer.num_drafts + 1))
            entries.append(
                {
                    "target": name,
                    "batch": batch,
                    "way": way,
                    "round_ms": 1e3 * seconds,
                    "draft_ms": 1e3 * seconds * share,
                    "verify_ms": 1e3 * seconds * (1 - share),
                    "round_in_plain_steps": seconds / plain,
                    "acceptance_length": made / batch / sizes.rounds,
                    "tokens_per_second": made / seconds / sizes.rounds,
                    "bound_ms": 1e3 * size / bandwidth,
                    "verify_of_bound": size / bandwidth / (seconds * (1 - share)),
                }
            )
    return entries


Head = ParallelDraft | AutoregressiveDraft


def drafters(config: TargetConfig, dtype: jnp.dtype) -> dict[str, Head]:
    """Returns a P-EAGLE head of four layers at three K, and an EAGLE-3 head of one."""
    parallel = usual_drafter(config, 4)
    single = dataclasses.replace(usual_drafter(config, 1), mask_token_id=None)
    weights = randomised(Drafter, parallel, dtype)
    heads: dict[str, Head] = {
        f"P-EAGLE K={k}": ParallelDraft(weights, k, parallel.aux_boundaries) for k in (3, 5, 7)
    }
    weights = randomised(Drafter, single, dtype)
    return {"EAGLE-3 K=3": AutoregressiveDraft(weights, 3, single.aux_boundaries), **heads}


def randomised(module: Any, config: Any, dtype: jnp.dtype) -> Frozen[Any]:
    """Returns a module with random weights, made on the device."""

    @jax.jit
    def make() -> Frozen[Any]:
        made = Frozen.of(module(config, dtype=dtype, rngs=nnx.Rngs(0)))
        keys = jax.random.split(jax.random.key(1), len(made.leaves))
        leaves = [
            jax.random.randint(k, x.shape, 0, 256, jnp.uint8) if _packed(x) else x
            for k, x in zip(keys, made.leaves, strict=True)
        ]
        return Frozen(leaves, made.structure)

    return make()


def _packed(x: jax.Array) -> bool:
    return x.dtype == jnp.uint8 and x.shape[-1] == 16


def read_bytes(weights: Frozen[Target], config: TargetConfig, rows: int) -> float:
    """Returns the bytes of weights that a step of so many rows reads: of experts, those in use."""
    model = weights.merge()
    total = float(sum(leaf.nbytes for leaf in weights.leaves))
    if not config.tie_word_embeddings:
        total -= model.embedding[...].nbytes
    if config.moe is None:
        return total
    idle = (1 - config.moe.num_experts_per_token / config.moe.num_experts) ** rows
    of_experts = sum(leaf.nbytes for leaf in weights.leaves if leaf.ndim > 2)
    return total - idle * of_experts


def show_ceilings(found: dict[str, float]) -> None:
    """Prints the ceilings."""
    click.echo(
        f"copy {found['copy'] / 1e9:,.0f} GB/s, product {found['flops'] / 1e12:,.1f} TFLOP/s"
    )


def show_kernels(entries: list[Report]) -> None:
    """Prints the kernels' table."""
    click.echo(
        f"\n{'kernel':42}{'error':>9}{'us':>10}{'xla us':>10}{'cudnn us':>10}{'GB/s':>8}"
        f"{'of copy':>9}{'TFLOP/s':>9}{'of peak':>9}"
    )
    for entry in entries:
        times = entry["seconds"]
        micros = "".join(
            f"{1e6 * times[way]:10.1f}" if times.get(way) else f"{'-':>10}"
            for way in ("pallas", "xla", "cudnn")
        )
        click.echo(
            f"{entry['name']:42}{entry['error']:9.1e}{micros}"
            f"{entry['bytes_per_second'] / 1e9:8.0f}{entry['of_copy']:9.2f}"
            f"{entry['flops_per_second'] / 1e12:9.1f}{entry['of_flops']:9.2f}"
            + ("" if entry["right"] else "  WRONG")
        )


def show_program(entries: list[Report]) -> None:
    """Prints the program's table."""
    click.echo(
        f"\n{'target':16}{'B':>3} {'way':14}{'round ms':>9}{'draft':>8}{'verify':>8}"
        f"{'plain steps':>12}{'bound ms':>9}{'of bound':>9}{'AL':>6}{'tok/s':>9}"
    )
    for entry in entries:
        click.echo(
            f"{entry['target']:16}{entry['batch']:3} {entry['way']:14}{entry['round_ms']:9.2f}"
            f"{entry['draft_ms']:8.2f}{entry['verify_ms']:8.2f}"
            f"{entry['round_in_plain_steps']:12.2f}{entry['bound_ms']:9.2f}"
            f"{entry['verify_of_bound']:9.2f}{entry['acceptance_length']:6.2f}"
            f"{entry['tokens_per_second']:9.1f}"
        )


if __name__ == "__main__":
    main()
