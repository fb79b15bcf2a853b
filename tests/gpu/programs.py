"""Programs at the sizes of real models, compiled but not run: `python programs.py DEVICE PROGRAM`.

DEVICE is a name in `ahead_of_time.DEVICES`, or cpu. Prints what the compiler says as JSON.
"""

import dataclasses
import json
import os
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # else the CUDA plugin looks for a driver

import ahead_of_time
import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.config import DrafterConfig, MoEConfig, RopeConfig, TargetConfig
from peagle_jax.decoding import ParallelDraft, Request, generate_tokens
from peagle_jax.models import Drafter, Frozen, KVCache, Target
from peagle_jax.models.moe import MoE

DRAFTS, CAPACITY, BUCKET = 3, 4096, 512

# The published widths; two layers say what any number of them does.
GPT_OSS_20B = TargetConfig(
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_layers=2,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=150000.0),
    max_position_embeddings=131072,
    attention_bias=True,
    attention_output_bias=True,
    mlp_bias=False,
    qk_norm=False,
    sliding_windows=(128, None),
    attention_sinks=True,
    norm_weight_in_float32=True,
    moe=MoEConfig(
        num_experts=32,
        num_experts_per_token=4,
        intermediate_size=2880,
        layers=(True, True),
        router="top_k_softmax",
        norm_topk_prob=False,
        router_bias=True,
        expert_bias=True,
        swiglu_limit=7.0,
        weights="mxfp4",
    ),
    family="gpt_oss",
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_ids=(),
)
QWEN3_CODER_30B = dataclasses.replace(
    GPT_OSS_20B,
    vocab_size=151936,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    attention_bias=False,
    attention_output_bias=False,
    qk_norm=True,
    sliding_windows=(None, None),
    attention_sinks=False,
    norm_weight_in_float32=False,
    moe=MoEConfig(
        num_experts=128,
        num_experts_per_token=8,
        intermediate_size=768,
        layers=(True, True),
        router="softmax_top_k",
        norm_topk_prob=True,
        router_bias=False,
        expert_bias=False,
    ),
    family="qwen3_moe",
)
TARGETS = {"gpt_oss": GPT_OSS_20B, "qwen3_moe": QWEN3_CODER_30B}


def drafter_config(target: TargetConfig) -> DrafterConfig:
    """Returns a head of one layer for the target."""
    return DrafterConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=2 * target.hidden_size,
        num_layers=1,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        max_position_embeddings=131072,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=(None,),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=32000,
        aux_boundaries=(0, 1, 2),
        aux_source_convention="boundary",
        mask_token_id=1,
        num_depths=8,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        own_embedding=False,
        own_lm_head=True,
    )


def shapes(module: type[Any], config: Any, dtype: Any) -> Frozen[Any]:
    """Returns a module's arrays, none of which is made."""
    return Frozen.of(nnx.eval_shape(lambda: module(config, dtype=dtype, rngs=nnx.Rngs(0))))


def generation(target: TargetConfig, device: str) -> Any:
    """Returns the whole generation program, compiled."""
    dtype = jnp.float32 if device == "cpu" else jnp.bfloat16
    model = shapes(Target, target, dtype)
    config = drafter_config(target)
    head = ParallelDraft(shapes(Drafter, config, dtype), DRAFTS, config.aux_boundaries)
    request = Request(
        jnp.zeros((1, BUCKET), jnp.int32),
        *(jnp.zeros((n,), jnp.int32) for n in (1, 1, 3)),
    )
    caches = jax.eval_shape(
        lambda: (
            KVCache.zeros(target, 1, CAPACITY, dtype, DRAFTS + 1),
            KVCache.zeros(config, 1, CAPACITY, dtype, 2 * DRAFTS),
        )
    )
    arguments = (model, head, request, *caches)
    if device != "cpu":
        arguments = ahead_of_time.on_device(device, arguments)
    return generate_tokens.lower(*arguments, capacity=CAPACITY).compile()


def experts(target: TargetConfig, rows: int, device: str) -> Any:
    """Returns one layer's mixture of experts for so many rows, compiled."""
    dtype = jnp.float32 if device == "cpu" else jnp.bfloat16
    layer = Frozen.of(nnx.eval_shape(lambda: MoE(target, dtype, nnx.Rngs(0))))
    arguments: Any = (layer, jax.ShapeDtypeStruct((1, rows, target.hidden_size), dtype))
    if device != "cpu":
        arguments = ahead_of_time.on_device(device, arguments)
    return jax.jit(lambda layer, x: layer.merge()(x)).lower(*arguments).compile()


def report(compiled: Any) -> dict[str, Any]:
    """Returns bytes of arguments, of outputs in their place, and of temporaries."""
    memory = compiled.memory_analysis()
    return {
        "arguments": memory.argument_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
    }


def main() -> None:
    """Compiles what the command line names."""
    device, program, family, *rows = sys.argv[1:]
    target = TARGETS[family]
    if program == "generation":
        compiled = generation(target, device)
    else:
        compiled = experts(target, int(rows[0]), device)
    print(json.dumps(report(compiled)))


if __name__ == "__main__":
    main()
