"""Native checkpoints of random weights, one for every thing that an export has to say."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from conftest import DRAFTER, FAMILIES, TARGET

from peagle_jax import checkpoint
from peagle_jax.config import DrafterConfig, RopeConfig, TargetConfig

GPT_OSS = dataclasses.replace(FAMILIES["gpt_oss"], intermediate_size=32)
assert GPT_OSS.moe is not None
YARN = RopeConfig(theta=100.0, kind="yarn", factor=2.0, original_max_position_embeddings=64)
TARGETS = {
    **FAMILIES,
    "gpt_oss": GPT_OSS,
    "gpt_oss_plain": dataclasses.replace(
        GPT_OSS, moe=dataclasses.replace(GPT_OSS.moe, weights="plain", swiglu_alpha=1.5)
    ),
    "llama_biases": dataclasses.replace(
        TARGET,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        rope=RopeConfig(theta=300.0, kind="linear", factor=4.0),
        bos_token_id=1,
        eos_token_ids=(2,),
    ),
    "qwen3_windows": dataclasses.replace(
        FAMILIES["qwen3"],
        rope=dataclasses.replace(YARN, attention_factor=0.1 * float(np.log(2.0)) + 1),
        sliding_windows=(16, None, 16),
        eos_token_ids=(7, 5),
    ),
    "qwen3_moe_windows": dataclasses.replace(
        FAMILIES["qwen3_moe"], sliding_windows=(8, 8, 8), rope=YARN
    ),
}
EAGLE3 = {"mask_token_id": None, "num_depths": None}
FULL = {"draft_vocab_size": 96}
DRAFTERS = {
    "fc_norm": DRAFTER,
    "plain": dataclasses.replace(DRAFTER, fc_norm=False, num_depths=None),
    "norm_before_fc": dataclasses.replace(
        DRAFTER,
        fc_norm=False,
        norm_before_fc=True,
        norm_before_residual=True,
        num_layers=1,
        sliding_windows=(8,),
    ),
    "qwen3": dataclasses.replace(DRAFTER, qk_norm=True, sliding_windows=(None, 16), **FULL),
    "wide": dataclasses.replace(DRAFTER, hidden_size=48, aux_boundaries=(0, 3)),
    "biases": dataclasses.replace(
        DRAFTER,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        rope=dataclasses.replace(YARN, kind="llama3"),
    ),
    "no_output_bias": dataclasses.replace(DRAFTER, attention_bias=True),
    "eagle3": dataclasses.replace(DRAFTER, norm_output=True, **EAGLE3),
    "eagle3_qwen3": dataclasses.replace(DRAFTER, qk_norm=True, **EAGLE3, **FULL),
    "shared": dataclasses.replace(DRAFTER, own_embedding=False, own_lm_head=False, **FULL),
}


def save_native(folder: Path, config: TargetConfig | DrafterConfig, dtype: str = "float32") -> Path:
    """Writes a native checkpoint of random weights and returns its folder."""
    rng = np.random.default_rng(0)

    def draw(name: str, shape: tuple[int, ...], native: np.dtype) -> jax.Array:
        if name == "d2t":
            assert isinstance(config, DrafterConfig)
            chosen = np.sort(rng.choice(config.vocab_size, shape[0], replace=False))
            return jnp.asarray(chosen - np.arange(shape[0]), jnp.int32)
        if native == np.uint8:
            return jnp.asarray(rng.integers(0, 255, shape, np.uint8))
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.dtype(dtype))

    abstract = checkpoint.abstract_parameters(config)
    arrays = {name: draw(name, a.shape, a.dtype) for name, a in abstract.items()}
    checkpoint.save(folder, config, arrays)
    return folder
