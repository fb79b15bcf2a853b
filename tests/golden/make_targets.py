"""Write the golden values of the target models, computed by PyTorch and transformers.

Everything is computed in float32 with eager attention (and eager experts), and every random number
has a seed, so a second run on the same machine writes the same bytes again. On another processor
the checkpoints stay the same, and the golden values differ by rounding (some 1e-5 in the logits).

Tiny random models go to ``tests/golden/targets/<name>/``, each an ordinary Hugging Face
checkpoint directory with a ``golden.npz`` beside the weights:

    ids [2, 64]             two token sequences
    logits [2, 64, V]       logits of both
    boundary_<b> [64, H]    residual stream of sequence 0: b = 0 is the embedding, b = i the output
                            of layer i - 1, and b = L the last layer's, before the final norm
    prompt [10]             a prompt
    greedy [64]             its greedy continuation, ignoring the end-of-sequence ids
    greedy_gap [64]         best minus second-best logit at each of those steps
    router_margin []        sparse models only: the smallest distance, over every sparse layer and
                            every position of ids and of prompt + greedy, between the router logits
                            of the last expert that is chosen and the first that is not

Most are saved by transformers and must load from there to the very logits of the model that was
saved. Two are quantised, which transformers does not write here:

    gpt_oss_mxfp4       random MXFP4 codes and scales. transformers dequantises them itself
                        (``Mxfp4Config(dequantize=True)``, which takes the float32 of the load), and
                        must agree with the rule in ``dequantise_mxfp4``.
    qwen3_moe_fp8       float8_e4m3fn weights with bfloat16 scales of 128 x 128 blocks. The golden
                        values are those of ``dequantise_fp8``: weight times scale in float32,
                        rounded to bfloat16. transformers' own dequantisation cannot be used, as it
                        divides a weight evenly by the shape of its scales and so gets the blocks of
                        a ragged edge wrong.

The real model SmolLM2-135M-Instruct gives ``tests/golden/smollm2.npz``, with one greedy answer per
line of ``examples/chat_prompts.jsonl``:

    prompt_<i>, greedy_<i>, gap_<i>     chat-template ids, at most 128 answer ids up to and with
                                        the end-of-sequence id, and the logit gaps as above
    logits_positions [6]                positions in prompt_0 + greedy_0
    logits [6, V]                       logits of one forward pass over it at those positions

Make the environment once and run (paths are examples):

    python3.11 -m venv /tmp/golden
    /tmp/golden/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors jinja2 numpy
    /tmp/golden/bin/python tests/golden/make_targets.py --smollm2 /tmp/smollm2-hf

``--smollm2`` names a checkpoint folder of SmolLM2-135M-Instruct as ``examples/fetch_smollm2.py``
makes it (bfloat16 weights, read here as float32). Answering the prompts takes some minutes; without
the option only the tiny models are written. Names of tiny models before the options write only
those.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mxfp4Config,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

GOLDEN_DIR = Path(__file__).resolve().parent
CHAT_PROMPTS = GOLDEN_DIR.parents[1] / "examples" / "chat_prompts.jsonl"

SEQUENCES, LENGTH = 2, 64
PROMPT_LENGTH, TINY_NEW_TOKENS, CHAT_NEW_TOKENS = 10, 64, 128
MAX_DIRECTORY_KB = 200

# The bytes of an MXFP4 scale stand for 2 ** (byte - 127); these are the ranges drawn from.
MXFP4_SCALES = {"gate_up_proj": (122, 126), "down_proj": (120, 124)}
MXFP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MXFP4_BLOCK, FP8_BLOCK = 32, 128

# A tiny model is only accepted within these bounds; another seed is the way out.
MIN_TINY_GAP = 1e-3
MIN_LOGIT_STD = 1.0
MAX_ATTENTION_EVENNESS = 0.8
MIN_SCALING_CHANGE = 0.1
MIN_ROUTER_MARGIN = 1e-3  # far above float32 rounding, which must not change the choice of experts

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class TinyTarget:
    """One tiny random model and the way its directory is written."""

    name: str
    seed: int
    config: dict[str, Any]
    family: str = "llama"
    layout: str = "original"  # or "fused", "mxfp4", "fp8"
    bfloat16: bool = False
    old_hub_config: bool = False
    hub_dropped: tuple[str, ...] = ("head_dim", "transformers_version")
    hub_added: dict[str, Any] = field(default_factory=dict)
    shard_size: str = "1GB"
    generation_eos: int | tuple[int, ...] = 2
    generation_added: dict[str, Any] = field(default_factory=dict)
    gate_up_gain: float = 1.0
    must_matter: tuple[dict[str, Any], ...] = ()  # changes of config that must change the logits
    max_kilobytes: int = MAX_DIRECTORY_KB


@dataclass(frozen=True)
class Row:
    """One line of the final table."""

    name: str
    kilobytes: float
    min_gap: float
    note: str


FAMILIES: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
}

SPARSE_FAMILIES = ("qwen3_moe", "gpt_oss")

COMMON_CONFIG: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

TINY_TARGETS = (
    TinyTarget(
        name="llama_gqa",
        seed=6,
        old_hub_config=True,
        config={
            "intermediate_size": 20,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    # Its greedy continuation meets 2 first, an end-of-sequence id in config.json alone, and later 5
    # and 3, which are end-of-sequence ids in generation_config.json alone.
    TinyTarget(
        name="llama_tied",
        seed=30,
        generation_eos=(3, 5),
        config={
            "intermediate_size": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 2000.0},
        },
    ),
    TinyTarget(
        name="llama_rope_scaled",
        seed=36,
        shard_size="40KB",
        config={
            "intermediate_size": 16,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    TinyTarget(
        name="llama_biases",
        seed=8,
        config={
            "intermediate_size": 10,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    TinyTarget(
        name="qwen3",
        seed=27,
        family="qwen3",
        config={
            "intermediate_size": 16,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        },
    ),
    # The oldest spelling of rope_scaling, with "type" instead of "rope_type".
    TinyTarget(
        name="llama_rope_linear",
        seed=2,
        old_hub_config=True,
        hub_added={"rope_scaling": {"type": "linear", "factor": 4.0}},
        config={
            "intermediate_size": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0},
        },
    ),
    # Without layer_types, as in 4.x: layers from max_window_layers on have the window.
    TinyTarget(
        name="qwen3_yarn_window",
        seed=7,
        family="qwen3",
        old_hub_config=True,
        hub_dropped=("layer_types", "transformers_version"),
        must_matter=({"sliding_window": 256}, {"rope_parameters": {"truncate": False}}),
        config={
            "intermediate_size": 16,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 50.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    # Tensors and config.json as Qwen3-Coder has them on the Hub; layer 1 is dense.
    TinyTarget(
        name="qwen3_moe",
        seed=8,
        family="qwen3_moe",
        bfloat16=True,
        old_hub_config=True,
        hub_dropped=("transformers_version", "attention_bias", "bos_token_id", "pad_token_id"),
        hub_added={
            "max_window_layers": 28,
            "qkv_bias": False,
            "shared_expert_intermediate_size": 0,
            "use_qk_norm": True,
        },
        shard_size="40KB",
        must_matter=({"norm_topk_prob": False},),
        config={
            "intermediate_size": 20,
            "moe_intermediate_size": 8,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    # As transformers 5 saves what it holds in memory; layers 0 and 2 are dense.
    TinyTarget(
        name="qwen3_moe_fused",
        seed=9,
        family="qwen3_moe",
        layout="fused",
        gate_up_gain=2.0,
        must_matter=({"norm_topk_prob": True},),
        config={
            "vocab_size": 48,
            "intermediate_size": 10,
            "moe_intermediate_size": 8,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    # As transformers 5 saves a GPT-OSS that is not quantised. The gain takes the outputs of gate_up
    # beyond swiglu_limit now and then.
    TinyTarget(
        name="gpt_oss",
        seed=18,
        family="gpt_oss",
        layout="fused",
        bfloat16=True,
        gate_up_gain=2.5,
        must_matter=(
            {"sliding_window": 256},
            {"swiglu_limit": 1e9},
            {"rope_parameters": {"truncate": True}},
        ),
        config={
            "vocab_size": 64,
            "intermediate_size": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "sliding_window": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        },
    ),
    # Tensors, config.json and generation_config.json as gpt-oss has them on the Hub, with shards
    # that count from 0 and the blocks and scales of one weight in different shards.
    TinyTarget(
        name="gpt_oss_mxfp4",
        seed=1,
        family="gpt_oss",
        layout="mxfp4",
        bfloat16=True,
        old_hub_config=True,
        hub_dropped=("bos_token_id", "swiglu_alpha", "torch_dtype"),
        hub_added={
            "experts_per_token": 2,
            "initial_context_length": 32,
            "quantization_config": {
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
                "quant_method": "mxfp4",
            },
            "rope_theta": 150,
            "transformers_version": "4.55.0.dev0",
        },
        generation_eos=(2, 3, 5),
        generation_added={"do_sample": True, "pad_token_id": 3},
        must_matter=(
            {"sliding_window": 256},
            {"swiglu_limit": 1e9},
            {"rope_parameters": {"truncate": True}},
        ),
        config={
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 16,
            "pad_token_id": 3,
            "router_aux_loss_coef": 0.9,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 32,
                "truncate": False,
            },
        },
    ),
    # Tensors and config.json as Qwen3-Coder-FP8 has them on the Hub. The weights of q_proj and
    # o_proj have 2 x 2 blocks and those of k_proj, v_proj and the experts 1 x 2 or 2 x 1, all of
    # them with a ragged edge.
    TinyTarget(
        name="qwen3_moe_fp8",
        seed=1,
        family="qwen3_moe",
        layout="fp8",
        bfloat16=True,
        old_hub_config=True,
        hub_dropped=("transformers_version", "attention_bias", "bos_token_id", "pad_token_id"),
        hub_added={
            "max_window_layers": 28,
            "qkv_bias": False,
            "quantization_config": {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "modules_to_not_convert": [
                    "lm_head",
                    *(
                        f"model.layers.{layer}.{module}"
                        for layer in range(2)
                        for module in ("input_layernorm", "mlp.gate", "post_attention_layernorm")
                    ),
                ],
                "quant_method": "fp8",
                "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            },
            "shared_expert_intermediate_size": 0,
            "use_qk_norm": True,
        },
        must_matter=({"norm_topk_prob": False},),
        max_kilobytes=400,
        config={
            "vocab_size": 64,
            "hidden_size": 160,
            "intermediate_size": 20,
            "moe_intermediate_size": 8,
            "num_hidden_layers": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
)


def main() -> None:
    """Write all golden files and print what was written."""
    parser = argparse.ArgumentParser(description="Write the golden values of the target models.")
    names = [target.name for target in TINY_TARGETS]
    parser.add_argument(
        "names", nargs="*", help=f"tiny models to write, or all: {', '.join(names)}"
    )
    parser.add_argument("--smollm2", type=Path, help="checkpoint folder of SmolLM2-135M-Instruct")
    args = parser.parse_args()
    if unknown := set(args.names).difference(names):
        parser.error(f"no tiny model is called {', '.join(sorted(unknown))}")
    chosen = [target for target in TINY_TARGETS if target.name in (args.names or names)]

    disable_progress_bar()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    with torch.inference_mode():
        rows = [write_tiny_target(target) for target in chosen]
        if args.smollm2 is None:
            print("No --smollm2 folder given: smollm2.npz is not written.")
        else:
            rows.append(write_smollm2(args.smollm2, GOLDEN_DIR / "smollm2.npz"))
    print_table(rows)


# Tiny random models


def write_tiny_target(target: TinyTarget) -> Row:
    """Write the checkpoint directory of a tiny model and its ``golden.npz``."""
    directory = GOLDEN_DIR / "targets" / target.name
    built = build_tiny_model(target)
    save_checkpoint(built, target, directory)
    model = load_tiny_model(target, directory)

    rng = np.random.default_rng(target.seed)
    vocab = built.config.vocab_size
    ids = rng.integers(0, vocab, (SEQUENCES, LENGTH), dtype=np.int32)
    prompt = rng.integers(0, vocab, PROMPT_LENGTH, dtype=np.int32)
    logits = model(as_batch(ids)).logits
    if target.layout != "fp8":
        assert torch.equal(built(as_batch(ids)).logits, logits), f"{target.name}: loading differs"
    check_tiny_model(target, model, as_batch(ids), logits)

    model.generation_config.eos_token_id = None
    greedy, gap = greedy_continuation(model, prompt, TINY_NEW_TOKENS)
    min_gap = float(gap.min())
    assert min_gap > MIN_TINY_GAP, f"{target.name}: gap {min_gap:.1e}, choose another seed"

    arrays: Arrays = {"ids": ids, "logits": logits.numpy(), **boundaries(model, ids[0])}
    arrays |= {"prompt": prompt, "greedy": greedy, "greedy_gap": gap}
    note = f"{len(set(greedy.tolist()))} distinct ids in {len(greedy)} steps"
    if target.family in SPARSE_FAMILIES:
        margin = router_margin(model, [ids, np.concatenate([prompt, greedy])])
        assert margin > MIN_ROUTER_MARGIN, f"{target.name}: margin {margin:.1e}, as above"
        arrays["router_margin"] = np.float32(margin)
        note += f", router margin {margin:.1e}"
    np.savez_compressed(directory / "golden.npz", **arrays)
    kilobytes = sum(file.stat().st_size for file in directory.iterdir()) / 1000
    assert kilobytes < target.max_kilobytes, f"{target.name} takes {kilobytes:.0f} KB"
    return Row(f"targets/{target.name}/", kilobytes, min_gap, note)


def build_tiny_model(target: TinyTarget) -> PreTrainedModel:
    """Build the model of ``target`` with all parameters drawn anew from its seed."""
    model = empty_model(target, {})
    generator = torch.Generator().manual_seed(target.seed)
    for name, parameter in model.named_parameters():
        drawn = draw_parameter(name, parameter.shape, generator)
        if name.endswith("experts.gate_up_proj"):
            drawn *= target.gate_up_gain
        parameter.copy_(drawn.bfloat16() if target.bfloat16 else drawn)
    if target.layout == "mxfp4":
        for name, (blocks, scales) in draw_mxfp4(target, model).items():
            model.get_parameter(name).copy_(dequantise_mxfp4(blocks, scales))
    eos = target.generation_eos
    model.generation_config = GenerationConfig(
        bos_token_id=1,
        eos_token_id=eos if isinstance(eos, int) else list(eos),
        **target.generation_added,
    )
    return model


def empty_model(target: TinyTarget, changes: dict[str, Any]) -> PreTrainedModel:
    """Build the model of ``target`` with some changes of its config and arbitrary parameters."""
    config_class, model_class = FAMILIES[target.family]
    sparse = {"experts_implementation": "eager"} if target.family in SPARSE_FAMILIES else {}
    config = COMMON_CONFIG | target.config | changes
    return model_class(config_class(**config, **sparse, attn_implementation="eager")).eval()


def draw_parameter(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Draw one parameter, wide enough for uneven attention and uneven logits."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return 1.5 + 0.3 * noise
    if name.endswith("norm.weight"):
        return 1.0 + 0.2 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    if name.endswith("sinks"):
        return 1.0 + noise
    return 0.25 * noise


def save_checkpoint(model: PreTrainedModel, target: TinyTarget, directory: Path) -> None:
    """Save ``model`` as a Hugging Face directory, replacing an older one."""
    shutil.rmtree(directory, ignore_errors=True)
    saved = copy.deepcopy(model).bfloat16() if target.bfloat16 else model
    saved.save_pretrained(
        directory,
        max_shard_size=target.shard_size,
        save_original_format=target.layout != "fused",
    )
    if target.layout == "mxfp4":
        rewrite_weights_as_mxfp4(directory, draw_mxfp4(target, model))
    elif target.layout == "fp8":
        rewrite_weights_as_fp8(directory, target.seed)
    for file in directory.iterdir():
        file.chmod(0o644)  # safetensors makes files that only their owner can read
    if target.old_hub_config:
        rewrite_config_as_4x(directory / "config.json", target)


def rewrite_config_as_4x(path: Path, target: TinyTarget) -> None:
    """Spell ``config.json`` as transformers 4.x did, like most checkpoints on the Hub."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    if target.family == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    for key in target.hub_dropped:
        del config[key]
    config |= target.hub_added
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_tiny_model(target: TinyTarget, directory: Path) -> PreTrainedModel:
    """Load the directory of a tiny model in float32."""
    sparse = {"experts_implementation": "eager"} if target.family in SPARSE_FAMILIES else {}
    if target.layout == "mxfp4":
        return load_model(directory, quantization_config=Mxfp4Config(dequantize=True), **sparse)
    if target.layout == "fp8":
        with tempfile.TemporaryDirectory() as folder:
            write_dequantised_fp8(directory, Path(folder))
            return load_model(Path(folder), **sparse)
    return load_model(directory, **sparse)


def check_tiny_model(
    target: TinyTarget, model: PreTrainedModel, ids: torch.Tensor, logits: torch.Tensor
) -> None:
    """Check that the outputs of a tiny model are telling and that its options matter."""
    assert logits.std() > MIN_LOGIT_STD, f"{target.name}: logits are nearly uniform"
    evenness = attention_evenness(model(ids, output_attentions=True).attentions)
    assert evenness < MAX_ATTENTION_EVENNESS, f"{target.name}: attention is nearly uniform"
    state, rope = model.state_dict(), target.config["rope_parameters"]
    variants = [dict(changes) for changes in target.must_matter]
    for changes in variants:
        if "rope_parameters" in changes:
            changes["rope_parameters"] = rope | changes["rope_parameters"]
    if rope["rope_type"] != "default":
        plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        variants.append({"rope_parameters": plain})
    changed = {str(changes): other_logits(target, changes, state, ids) for changes in variants}
    if target.family == "gpt_oss":
        sinkless = state | {name: state[name] - 1e9 for name in state if name.endswith("sinks")}
        changed["no sinks"] = other_logits(target, {}, sinkless, ids)
    for what, other in changed.items():
        change = (other - logits).abs().mean()
        assert change > MIN_SCALING_CHANGE, f"{target.name}: {what} changes hardly anything"


def other_logits(
    target: TinyTarget, changes: dict[str, Any], state: dict[str, torch.Tensor], ids: torch.Tensor
) -> torch.Tensor:
    """Logits of a model with these parameters and a changed config."""
    other = empty_model(target, changes)
    other.load_state_dict(state)
    return other(ids).logits


def attention_evenness(attentions: tuple[torch.Tensor, ...]) -> float:
    """Mean attention entropy of the last query, as a share of the uniform one's."""
    weights = torch.stack(attentions)[..., -1, :]
    entropy = torch.special.entr(weights).sum(-1).mean()
    return float(entropy) / math.log(weights.shape[-1])


def boundaries(model: PreTrainedModel, ids: np.ndarray) -> Arrays:
    """Residual stream of one sequence at every boundary, from the embedding to the last layer."""
    stream: list[torch.Tensor] = []
    modules = (model.model.embed_tokens, *model.model.layers)
    hooks = [
        module.register_forward_hook(lambda *call: stream.append(call[2])) for module in modules
    ]
    hidden_states = model(as_batch(ids), output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    # transformers reports the same tensors, except that its last one is after the final norm.
    for ours, theirs in zip(stream[:-1], hidden_states[:-1], strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(model.model.norm(stream[-1]), hidden_states[-1])
    return {f"boundary_{b}": state[0].numpy() for b, state in enumerate(stream)}


def router_margin(model: PreTrainedModel, sequences: list[np.ndarray]) -> float:
    """Smallest distance between the logits of the last chosen and the first unchosen expert."""
    margins: list[torch.Tensor] = []

    def record(router: torch.nn.Module, _inputs: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        best = outputs[0].topk(router.top_k + 1).values
        margins.append(best[:, -2] - best[:, -1])

    routers = [module for module in model.modules() if type(module).__name__.endswith("Router")]
    hooks = [router.register_forward_hook(record) for router in routers]
    for ids in sequences:
        model(as_batch(ids))
    for hook in hooks:
        hook.remove()
    assert len(margins) == len(sequences) * len(routers) > 0
    return float(torch.cat(margins).min())


# Quantised tiny models


def draw_mxfp4(
    target: TinyTarget, model: PreTrainedModel
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Draw the blocks and scales of every expert weight of a GPT-OSS model."""
    generator = torch.Generator().manual_seed(target.seed + 1000)
    drawn = {}
    for name, parameter in model.named_parameters():
        if not name.endswith(tuple(MXFP4_SCALES)):
            continue
        experts, inputs, outputs = parameter.shape
        shape = (experts, outputs, inputs // MXFP4_BLOCK)
        blocks = torch.randint(256, (*shape, MXFP4_BLOCK // 2), generator=generator)
        low, high = MXFP4_SCALES[name.rpartition(".")[2]]
        scales = torch.randint(low, high, shape, generator=generator)
        drawn[name] = (blocks.to(torch.uint8), scales.to(torch.uint8))
    return drawn


def dequantise_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Turn blocks [E, out, in/32, 16] and scales [E, out, in/32] into a weight [E, in, out]."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()  # low nibble first
    values = torch.cat([MXFP4_VALUES, -MXFP4_VALUES])[codes]
    weight = values * torch.exp2(scales.float() - 127)[..., None]
    return weight.flatten(-2).transpose(1, 2)


def rewrite_weights_as_mxfp4(
    directory: Path, quantised: dict[str, tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Replace the expert weights of a saved directory by blocks and scales, in two shards."""
    tensors = load_file(directory / "model.safetensors")
    for name, (blocks, scales) in quantised.items():
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    last_of_first = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    write_two_shards(directory, tensors, last_of_first, first_number=0)


def rewrite_weights_as_fp8(directory: Path, seed: int) -> None:
    """Replace the projections of a saved directory by float8 weights and scales, in two shards."""
    generator = torch.Generator().manual_seed(seed + 1000)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in sorted(load_file(directory / "model.safetensors").items()):
        tensors[name] = weight
        if name.endswith("proj.weight"):
            tensors[name], scales = quantise_fp8(weight.float())
            # Nothing asks for the weights as drawn, so let the blocks differ more than they do.
            spread = 0.4 + 1.2 * torch.rand(scales.shape, generator=generator)
            tensors[f"{name}_scale_inv"] = (scales * spread).bfloat16()
    last_of_first = "model.layers.0.self_attn.q_proj.weight"
    write_two_shards(directory, tensors, last_of_first, first_number=1)


def quantise_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight in 128 x 128 blocks, the last ones of a row or column perhaps smaller."""
    rows, columns = (math.ceil(size / FP8_BLOCK) for size in weight.shape)
    scales = torch.empty(rows, columns)
    for row, strip in enumerate(weight.split(FP8_BLOCK)):
        for column, block in enumerate(strip.split(FP8_BLOCK, dim=1)):
            scales[row, column] = block.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    return (weight / spread_scales(scales, weight.shape)).to(torch.float8_e4m3fn), scales


def dequantise_fp8(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply a float8 weight by the scales of its blocks, rounding once to bfloat16."""
    return (weight.float() * spread_scales(scales.float(), weight.shape)).bfloat16()


def spread_scales(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Repeat the scale of every block over its elements."""
    spread = scales.repeat_interleave(FP8_BLOCK, dim=0).repeat_interleave(FP8_BLOCK, dim=1)
    return spread[: shape[0], : shape[1]]


def write_dequantised_fp8(directory: Path, folder: Path) -> None:
    """Write the checkpoint in ``directory`` to ``folder`` with bfloat16 weights."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    plain = {
        name: dequantise_fp8(tensor, tensors[f"{name}_scale_inv"])
        if tensor.dtype == torch.float8_e4m3fn
        else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale_inv")
    }
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(directory / "generation_config.json", folder)


def write_two_shards(
    directory: Path, tensors: dict[str, torch.Tensor], last_of_first: str, first_number: int
) -> None:
    """Write the tensors, sorted by name, as two shards in place of ``model.safetensors``."""
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    cut = names.index(last_of_first) + 1
    weight_map = {}
    for number, part in enumerate([names[:cut], names[cut:]], first_number):
        file = f"model-{number:05d}-of-00002.safetensors"
        shard = {name: tensors[name].contiguous() for name in part}
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


# The real model


def write_smollm2(checkpoint: Path, path: Path) -> Row:
    """Write the greedy answers of SmolLM2 to the example prompts."""
    model = load_model(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    arrays: Arrays = {}
    for i, messages in enumerate(read_chats(CHAT_PROMPTS)):
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        prompt = np.array(encoded["input_ids"], dtype=np.int32)
        greedy, gap = greedy_continuation(model, prompt, CHAT_NEW_TOKENS)
        arrays |= {f"prompt_{i}": prompt, f"greedy_{i}": greedy, f"gap_{i}": gap}
        print(f"smollm2 prompt {i}: {len(greedy)} ids, min gap {gap.min():.1e}", flush=True)
    arrays |= chosen_logits(model, arrays["prompt_0"], arrays["greedy_0"])
    np.savez_compressed(path, **arrays)

    gaps = np.concatenate([value for key, value in arrays.items() if key.startswith("gap_")])
    note = f"{len(gaps)} steps, {np.count_nonzero(gaps < MIN_TINY_GAP)} below {MIN_TINY_GAP:g}"
    return Row(path.name, path.stat().st_size / 1000, float(gaps.min()), note)


def read_chats(path: Path) -> list[list[dict[str, str]]]:
    """Read the message lists of a JSON-lines file."""
    return [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]


def chosen_logits(model: PreTrainedModel, prompt: np.ndarray, greedy: np.ndarray) -> Arrays:
    """Logits of one forward pass over prompt and answer at six positions."""
    ids = np.concatenate([prompt, greedy])
    logits = model(as_batch(ids)).logits[0]
    first, last = len(prompt) - 1, len(ids) - 2
    assert torch.equal(logits[first : last + 1].argmax(-1), torch.from_numpy(greedy).long())
    positions = np.array([0, first // 2, first, first + 1, (first + last) // 2, last], np.int32)
    return {"logits_positions": positions, "logits": logits[positions].numpy()}


# Shared by both


def load_model(directory: Path, **options: Any) -> PreTrainedModel:
    """Load a checkpoint directory in float32 with eager attention."""
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", **options
    ).eval()


def as_batch(ids: np.ndarray) -> torch.Tensor:
    """Token ids as a batch for torch."""
    return torch.from_numpy(np.atleast_2d(ids)).long()


def greedy_continuation(
    model: PreTrainedModel, prompt: np.ndarray, new_tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """Greedy ids after ``prompt`` and the gap between the two best logits at each step."""
    ids = as_batch(prompt)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    top_two = torch.cat(output.logits).topk(2)
    greedy = output.sequences[0, len(prompt) :]
    assert torch.equal(top_two.indices[:, 0], greedy)
    gap = top_two.values[:, 0] - top_two.values[:, 1]
    return greedy.numpy().astype(np.int32), gap.numpy()


def print_table(rows: list[Row]) -> None:
    """Print what was written."""
    print(f"{'written':<28}{'KB':>8}{'min gap':>11}  note")
    for row in rows:
        print(f"{row.name:<28}{row.kilobytes:>8.1f}{row.min_gap:>11.1e}  {row.note}")


if __name__ == "__main__":
    main()
