"""Programs at the sizes of real models, compiled but not run.

    python programs.py DEVICE generation TARGET BATCH PROMPT NEW K [sampled]
    python programs.py DEVICE experts TARGET ROWS

DEVICE is a name in `ahead_of_time.DEVICES`, or cpu; TARGET a preset, of which two layers are taken:
they say what any number of them does. A head has two layers too; K = 0 decodes plainly. Prints
what the compiler says as JSON, beside what `plan_memory` says.
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

from peagle_jax.config import TargetConfig
from peagle_jax.decoding import (
    NoDraft,
    ParallelDraft,
    Penalties,
    Proposer,
    Request,
    Sampling,
    generate_tokens,
)
from peagle_jax.models import Drafter, Frozen, KVCache, Target
from peagle_jax.models.moe import MoE
from peagle_jax.plan import MemoryPlan, plan_memory, usual_drafter
from peagle_jax.presets import TARGETS

LAYERS = 2


def two_layers(config: TargetConfig) -> TargetConfig:
    """Returns a target with the first layers of another, mixtures of experts if it has any."""
    moe = config.moe and dataclasses.replace(config.moe, layers=(True,) * LAYERS)
    windows = config.sliding_windows[:LAYERS]
    return dataclasses.replace(config, num_layers=LAYERS, sliding_windows=windows, moe=moe)


def frozen(module: type[Any], config: Any, dtype: Any) -> Frozen[Any]:
    """Returns a module's arrays, none of which is made."""
    return Frozen.of(nnx.eval_shape(lambda: module(config, dtype=dtype, rngs=nnx.Rngs(0))))


def generation(
    config: TargetConfig, plan: MemoryPlan, sampled: bool, dtype: Any, device: str
) -> Any:
    """Returns the whole generation program for the plan's shapes, compiled."""
    batch, capacity, drafts = plan.rows, plan.capacity, plan.num_speculative_tokens
    proposer: Proposer = NoDraft()
    if drafts:
        head = usual_drafter(config, LAYERS)
        proposer = ParallelDraft(frozen(Drafter, head, dtype), drafts, head.aux_boundaries)
    arguments = (
        frozen(Target, config, dtype),
        proposer,
        *jax.eval_shape(
            lambda: (
                request(batch, capacity, config.vocab_size if sampled else None),
                KVCache.zeros(config, batch, capacity, dtype, drafts + 1),
                proposer.new_cache(batch, capacity, dtype),
            )
        ),
    )
    lowered = generate_tokens.lower(
        *on_device(device, arguments),
        prompt_rows=plan.prompt_rows,
        num_logprobs=5 if sampled else None,
    )
    return lowered.compile()


def request(batch: int, capacity: int, sampled_vocab: int | None) -> Request:
    """Returns a request; with a vocabulary everything that can be asked for is."""

    def rows(*shape: int, dtype: Any = jnp.int32) -> jax.Array:
        return jnp.zeros((batch, *shape), dtype)

    sampling = None
    if sampled_vocab is not None:
        number = rows(dtype=jnp.float32)
        sampling = Sampling(
            seeds=rows(2, dtype=jnp.uint32),
            temperature=number,
            top_k=rows(),
            top_p=number,
            min_p=number,
            min_new_tokens=rows(),
            bias=rows(sampled_vocab, dtype=jnp.float32),
            penalties=Penalties(number, number, number),
        )
    return Request(rows(capacity), rows(), rows(), rows(4), sampling)


def experts(config: TargetConfig, rows: int, dtype: Any, device: str) -> Any:
    """Returns one layer's mixture of experts for so many rows, compiled."""
    layer = Frozen.of(nnx.eval_shape(lambda: MoE(config, dtype, nnx.Rngs(0))))
    x = jax.ShapeDtypeStruct((1, rows, config.hidden_size), dtype)
    program = jax.jit(lambda layer, x: layer.merge()(x))
    return program.lower(*on_device(device, (layer, x))).compile()


def on_device(device: str, arguments: Any) -> Any:
    """Places shapes on a device that is not there; CPU needs no such thing."""
    return arguments if device == "cpu" else ahead_of_time.on_device(device, arguments)


def main() -> None:
    """Compiles what the command line names."""
    device, program, name, *sizes = sys.argv[1:]
    config = two_layers(TARGETS[name])
    dtype = jnp.dtype("float32" if device == "cpu" else "bfloat16")
    report: dict[str, int] = {}
    if program == "experts":
        compiled = experts(config, int(sizes[0]), dtype, device)
    else:
        batch, prompt, new, drafts = map(int, sizes[:4])
        plan = plan_memory(
            config,
            device_bytes=0,
            batch_size=batch,
            context=prompt + new,
            prompt_tokens=prompt,
            drafter_layers=LAYERS if drafts else 0,
            num_speculative_tokens=drafts,
            dtype=dtype.name,
        )
        compiled = generation(config, plan, "sampled" in sizes, dtype, device)
        models = [plan.target, *([plan.drafter] if plan.drafter else [])]
        report = {
            "weights": sum(model.weight_bytes for model in models),
            "caches": sum(model.cache_bytes for model in models),
            "estimate": max(plan.prefill_bytes, plan.round_bytes),
        }
    memory = compiled.memory_analysis()
    report |= {
        "arguments": memory.argument_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,  # outputs that lie where arguments did
        "temporaries": memory.temp_size_in_bytes,
        "kernels": compiled.as_text().count('custom_call_target="mosaic_gpu'),  # Pallas
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
