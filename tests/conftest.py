"""Tiny random models that several test modules share, and where the demo models lie."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import peagle_jax
from peagle_jax import batch
from peagle_jax.config import DrafterConfig, MoEConfig, RopeConfig, TargetConfig
from peagle_jax.load import LoadedDrafter, LoadedTarget
from peagle_jax.models import Drafter, Frozen, Target

ROOT = Path(__file__).parent.parent
GOLDEN = ROOT / "tests" / "golden"
DEMO_TARGET = ROOT / ".cache" / "smollm2-135m-instruct"
DEMO_DRAFTER = ROOT / "examples" / "smollm2-135m-p-eagle"

TARGET = TargetConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0),
    max_position_embeddings=256,
    attention_bias=False,
    attention_output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    sliding_windows=(None, None, None),
    family="llama",
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_ids=(),
)

# One of every family; contexts of a few dozen tokens run well past the windows.
FAMILIES = {
    "llama": dataclasses.replace(
        TARGET,
        rope=RopeConfig(
            theta=500.0,
            kind="llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=2.0,
            original_max_position_embeddings=32,
        ),
    ),
    "qwen3": dataclasses.replace(TARGET, family="qwen3", qk_norm=True, tie_word_embeddings=True),
    "qwen3_moe": dataclasses.replace(
        TARGET,
        family="qwen3_moe",
        qk_norm=True,
        moe=MoEConfig(
            num_experts=6,
            num_experts_per_token=2,
            intermediate_size=24,
            layers=(True, False, True),
            router="softmax_top_k",
            norm_topk_prob=True,
            router_bias=False,
            expert_bias=False,
        ),
    ),
    "gpt_oss": dataclasses.replace(
        TARGET,
        family="gpt_oss",
        rope=RopeConfig(
            theta=1500.0,
            kind="yarn",
            factor=8.0,
            original_max_position_embeddings=16,
            truncate=False,
            attention_factor=1.2,
        ),
        attention_bias=True,
        attention_output_bias=True,
        sliding_windows=(8, None, 8),
        attention_sinks=True,
        norm_weight_in_float32=True,
        moe=MoEConfig(
            num_experts=8,
            num_experts_per_token=3,
            intermediate_size=32,
            layers=(True, True, True),
            router="top_k_softmax",
            norm_topk_prob=False,
            router_bias=True,
            expert_bias=True,
            swiglu_limit=7.0,
            weights="mxfp4",
        ),
    ),
}

DRAFTER = DrafterConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500.0),
    max_position_embeddings=256,
    attention_bias=False,
    attention_output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    sliding_windows=(None, None),
    target_hidden_size=32,
    draft_vocab_size=64,
    aux_boundaries=(1, 2, 3),
    aux_source_convention="boundary",
    mask_token_id=95,
    num_depths=8,
    norm_before_residual=False,
    norm_before_fc=False,
    fc_norm=True,
    norm_output=False,
    own_embedding=True,
    own_lm_head=True,
)


def randomise[M: nnx.Module](module: M, seed: int) -> M:
    """Gives every array values that make logits and attention far from uniform."""
    rng = np.random.default_rng(seed)
    graphdef, state = nnx.split(module)
    flat = []
    for path, variable in nnx.to_flat_state(state):
        shape, name = variable.get_value().shape, str(path[-1])
        if name == "d2t":  # offsets of a random increasing choice of target ids
            chosen = np.sort(rng.choice(module.config.vocab_size, shape[0], replace=False))
            value = (chosen - np.arange(shape[0])).astype(np.int32)
        elif name == "weight":  # of a norm
            value = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        elif name == "blocks":  # of MXFP4
            value = rng.integers(0, 256, shape).astype(np.uint8)
        elif name == "scales":
            value = rng.integers(122, 125, shape).astype(np.uint8)
        elif name in ("embedding", "mask_hidden", "sinks") or name.endswith("bias"):
            value = rng.standard_normal(shape, np.float32)
        else:
            value = 1.5 * rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1])
        flat.append((path, variable.replace(jnp.asarray(value))))
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def random_target(config: TargetConfig = TARGET, seed: int = 0) -> LoadedTarget:
    """Returns a target with random weights and no tokenizer."""
    module = randomise(Target(config, dtype=jnp.float32, rngs=nnx.Rngs(0)), seed)
    return LoadedTarget(config, Frozen.of(module), None, Path("random"))


def random_drafter(config: DrafterConfig = DRAFTER, seed: int = 1) -> LoadedDrafter:
    """Returns a head with random weights."""
    module = randomise(Drafter(config, dtype=jnp.float32, rngs=nnx.Rngs(0)), seed)
    return LoadedDrafter(config, Frozen.of(module), Path("random"))


@pytest.fixture(scope="module", autouse=True)
def room_for_programs() -> Iterator[None]:
    """Drops compiled programs once they hold half of the mappings that Linux gives a process.

    Past all of them, 65530, LLVM ends the process.
    """
    yield
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > 30_000:
        batch._programs.clear()
        jax.clear_caches()


@pytest.fixture(scope="session")
def target() -> LoadedTarget:
    """A random target."""
    return random_target()


@pytest.fixture(scope="session")
def drafter() -> LoadedDrafter:
    """A random head for `target`: its drafts are hardly ever right."""
    return random_drafter()


@pytest.fixture(scope="session")
def demo_target() -> LoadedTarget:
    """SmolLM2-135M-Instruct; `make test` fetches it first."""
    if not DEMO_TARGET.is_dir():
        pytest.skip("the demo's target is not there: make model")
    return peagle_jax.load_target(DEMO_TARGET)
