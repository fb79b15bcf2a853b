"""What `gpu.py` checks and times, in the order in which it does."""

import dataclasses

import jax.numpy as jnp
from gpu_cases import Attention, Experts, Mode, Training
from gpu_kernels import Case
from gpu_programs import Sizes

from peagle_jax.config import TargetConfig
from peagle_jax.presets import TARGETS

# Layers of the targets: more would only take longer to compile.
LAYERS = {"llama-3.1-8b": 8, "gpt-oss-20b": 4}

# Small, with lengths, circles of slots and rows as they come in programs.
CHECKED = (
    Attention("verify 16 rows, edges of blocks", (0, 1, 29, 30, 31, 96), 4, 8, 2, 128, 100),
    Attention("verify 32 rows, sinks", (0, 37, 66), 6, 10, 2, 128, 72, sinks=True),
    Attention("verify 2 tiles of 40 rows, sinks", (0, 37), 10, 16, 2, 64, 72, sinks=True),
    Attention("verify empty parts, sinks", (0, 700, 2040), 8, 16, 2, 64, 2048, sinks=True),
    Attention("verify ring of 23", (0, 19, 20, 151), 4, 4, 2, 64, 23, window=20, sinks=True),
    Attention("verify ring of 64", (0, 60, 61, 151), 4, 8, 2, 128, 64, window=40),
    Attention("verify window in a cache", (0, 100, 500), 8, 16, 2, 64, 512, window=128, sinks=True),
    Attention(
        "prefill ragged, sinks", (0,) * 4, 97, 6, 2, 64, 97, counts=(0, 1, 32, 97), sinks=True
    ),
    Attention("prefill into a cache", (0, 51), 40, 4, 2, 128, 96, counts=(40, 30)),
    Attention(
        "prefill after a ring", (3, 90), 70, 2, 1, 64, 90, window=20, bases=(-17, 70), sinks=True
    ),
    Attention("prefill 3 tiles, window", (0, 0), 300, 4, 2, 128, 300, window=64, counts=(300, 129)),
    Training("documents", 120, 8, 6, 2, 64, documents=2, padding=9),
    Training("documents, window", 120, 8, 4, 2, 128, documents=2, padding=9, window=11),
    Experts("blocks of 16, unused ones", (1, 0, 3), 4, 192, 576, 16, 3, scales=(97, 158)),
    Experts("blocks of 32, float32", (1, 0, 1), 3, 128, 320, 32, dtype=jnp.float32),
)

# Of real models. What of them is measured in bytes per second is several times as large as the L2
# cache, but for the window.
TIMED = (
    Attention("verify llama-8b B=8 T=8 8k", (8184,) * 8, 8, 32, 8, 128, 8192, timed=True),
    Attention("verify gpt-oss B=16 T=8 8k", (8184,) * 16, 8, 64, 8, 64, 8192, timed=True),
    Experts.chosen("gpt-oss-20b 8 rows", 32, 4, 8, 5760, 2880),
    Attention("prefill llama-8b 8k", (0,), 8192, 32, 8, 128, 8192, timed=True),
    Training("forward", 2048, 8, 32, 8, 128, backward=False, timed=True),
    Training("forward and backward", 2048, 8, 32, 8, 128, timed=True),
    Experts.chosen("gpt-oss-120b 8 rows", 128, 4, 8, 5760, 2880),
    Experts.chosen("gpt-oss-20b 1 row", 32, 4, 1, 5760, 2880),
    Attention("prefill gpt-oss 8k", (0,), 8192, 64, 8, 64, 8192, timed=True),
    Attention("verify llama-8b B=8 T=1 8k", (8191,) * 8, 1, 32, 8, 128, 8192, timed=True),
    Attention("verify llama-8b B=1 T=8 64k", (65528,), 8, 32, 8, 128, 65536, timed=True),
    Attention("verify gpt-oss B=8 T=14 32k", (32754,) * 8, 14, 64, 8, 64, 32768, timed=True),
    Attention("prefill gpt-oss 8k window 128", (0,), 8192, 64, 8, 64, 8192, 128, timed=True),
    Attention(
        "verify gpt-oss B=8 T=8 window 128", (8184,) * 8, 8, 64, 8, 64, 8192, 128, timed=True
    ),
    Experts.chosen("gpt-oss-120b 64 rows", 128, 4, 64, 5760, 2880),
    Attention("prefill llama-8b B=8 1k", (0,) * 8, 1024, 32, 8, 128, 1024, timed=True),
    Attention("verify llama-8b B=8 T=8 32k", (32760,) * 8, 8, 32, 8, 128, 32768, timed=True),
    Attention("verify qwen3-coder B=16 T=8 8k", (8184,) * 16, 8, 32, 4, 128, 8192, timed=True),
)

TINY = (
    Attention("verify tiny", (62,), 2, 4, 2, 16, 64, timed=True),
    Attention("verify ring", (0, 40), 2, 4, 2, 16, 23, window=20, sinks=True),
    Attention("prefill tiny", (0,), 72, 4, 2, 16, 72, timed=True),
    Attention("prefill after a ring", (3,), 20, 2, 1, 16, 40, 20, (-17,), (11,), sinks=True),
    Training("documents", 30, 3, 2, 1, 16, documents=2, padding=3),
    Training("forward", 48, 3, 2, 1, 16, backward=False, timed=True),
    Experts("unused blocks", (1, 0, 2), 4, 64, 64, 16, 2),
    Experts.chosen("tiny", 4, 2, 2, 64, 64),
)


def kernel_cases(tiny: bool, dtype: jnp.dtype) -> list[Case]:
    """Returns the kernels' cases; tiny ones are for a CPU."""
    mode = Mode(dtype, interpret=tiny)
    cases: tuple[Attention | Training | Experts, ...] = TINY if tiny else (*CHECKED, *TIMED)
    return [case.case(mode) for case in cases]


def program_sizes(tiny: bool) -> Sizes:
    """Returns the sizes of whole programs."""
    targets = {name: first_layers(TARGETS[name], count) for name, count in LAYERS.items()}
    if tiny:
        targets = {name: _small(config) for name, config in targets.items()}
        return Sizes(targets, batches=(1, 2), prompt=16, rounds=3)
    return Sizes(targets, batches=(1, 8), prompt=1024, rounds=48)


def first_layers(config: TargetConfig, count: int) -> TargetConfig:
    """Returns a target of the first layers of another; its rounds take that much less time."""
    moe = config.moe and dataclasses.replace(config.moe, layers=config.moe.layers[:count])
    windows = config.sliding_windows[:count]
    return dataclasses.replace(config, num_layers=count, sliding_windows=windows, moe=moe)


def _small(config: TargetConfig) -> TargetConfig:
    config = first_layers(config, 1)
    moe = config.moe and dataclasses.replace(
        config.moe, num_experts=4, num_experts_per_token=2, intermediate_size=64
    )
    return dataclasses.replace(
        config, vocab_size=256, hidden_size=64, intermediate_size=64, num_heads=4, num_kv_heads=2,
        head_dim=16, max_position_embeddings=256, moe=moe, bos_token_id=None, eos_token_ids=(),
    )  # fmt: skip
