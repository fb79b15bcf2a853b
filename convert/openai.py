"""The config of GPT-OSS as OpenAI publishes it, in the folder `original` of its repositories.

Keys and meanings as in the dataclass `ModelConfig` of openai/gpt-oss, whose code also fixes what
the file does not say: the epsilon, biases, the windows of even layers, and the ids of Harmony.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from peagle_jax.config import RopeConfig, TargetConfig
from peagle_jax.convert.experts import gpt_oss_experts
from peagle_jax.convert.keys import Keys
from peagle_jax.convert.rope import yarn_attention_factor

_RMS_NORM_EPS = 1e-5
_SWIGLU_ALPHA = 1.702
_STOPS = (200002, 199999, 200012)  # <|return|>, <|endoftext|>, <|call|>
_MARKS = ("rope_ntk_alpha", "rope_ntk_beta", "rope_scaling_factor")


def is_original(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is OpenAI's own."""
    return config.get("model_type") is None and any(mark in config for mark in _MARKS)


def original_config(keys: Keys) -> TargetConfig:
    """Takes every key of OpenAI's config.

    Raises:
      ConvertError: a key is missing, unknown, or holds a value that is not supported.
      ConfigError: the values make no target.
    """
    layers, window = keys.integer("num_hidden_layers"), keys.integer("sliding_window")
    inner = keys.integer("intermediate_size")
    context, factor = keys.integer("initial_context_length"), keys.number("rope_scaling_factor")
    rope = RopeConfig(keys.number("rope_theta"))
    slow, fast = keys.number("rope_ntk_alpha"), keys.number("rope_ntk_beta")
    if factor > 1:
        rope = dataclasses.replace(
            rope,
            kind="yarn",
            factor=factor,
            original_max_position_embeddings=context,
            beta_fast=fast,
            beta_slow=slow,
            truncate=False,
            attention_factor=yarn_attention_factor(factor),
        )
    moe = gpt_oss_experts(
        experts=keys.integer("num_experts"),
        chosen=keys.integer("experts_per_token"),
        intermediate_size=inner,
        layers=layers,
        limit=keys.number("swiglu_limit"),
        alpha=_SWIGLU_ALPHA,
    )
    config = {
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": keys.integer("hidden_size"),
        "num_heads": keys.integer("num_attention_heads"),
        "num_kv_heads": keys.integer("num_key_value_heads"),
        "head_dim": keys.integer("head_dim"),
    }
    keys.done()
    return TargetConfig(
        **config,
        intermediate_size=inner,
        num_layers=layers,
        rms_norm_eps=_RMS_NORM_EPS,
        rope=rope,
        max_position_embeddings=round(context * max(factor, 1)),
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=tuple(None if i % 2 else window for i in range(layers)),
        attention_sinks=True,
        norm_weight_in_float32=True,
        moe=dataclasses.replace(moe, weights="mxfp4"),
        family="gpt_oss",
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_ids=_STOPS,
    )
