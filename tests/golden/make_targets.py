"""Write the golden values of the target models, computed by PyTorch and transformers.

Everything is computed in float32 with eager attention, and every random number has a seed,
so a second run writes the same bytes again.

Tiny random models go to ``tests/golden/targets/<name>/``, each an ordinary Hugging Face
checkpoint directory with a ``golden.npz`` beside the weights:

    ids [2, 64]             two token sequences
    logits [2, 64, V]       logits of both
    boundary_<b> [64, H]    residual stream of sequence 0: b = 0 is the embedding, b = i the output
                            of layer i - 1, and b = L the last layer's, before the final norm
    prompt [10]             a prompt
    greedy [64]             its greedy continuation, ignoring the end-of-sequence ids
    greedy_gap [64]         best minus second-best logit at each of those steps

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
the option only the tiny models are written.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

GOLDEN_DIR = Path(__file__).resolve().parent
CHAT_PROMPTS = GOLDEN_DIR.parents[1] / "examples" / "chat_prompts.jsonl"

SEQUENCES, LENGTH = 2, 64
PROMPT_LENGTH, TINY_NEW_TOKENS, CHAT_NEW_TOKENS = 10, 64, 128
MAX_DIRECTORY_KB = 200

# A tiny model is only accepted within these bounds; another seed is the way out.
MIN_TINY_GAP = 1e-3
MIN_LOGIT_STD = 1.0
MAX_ATTENTION_EVENNESS = 0.8
MIN_SCALING_CHANGE = 0.1

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class TinyTarget:
    """One tiny random model and the way its directory is written."""

    name: str
    seed: int
    config: dict[str, Any]
    qwen3: bool = False
    old_hub_config: bool = False
    shard_size: str = "1GB"
    generation_eos: int | tuple[int, ...] = 2


@dataclass(frozen=True)
class Row:
    """One line of the final table."""

    name: str
    kilobytes: float
    min_gap: float
    note: str


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
        qwen3=True,
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
)


def main() -> None:
    """Write all golden files and print what was written."""
    parser = argparse.ArgumentParser(description="Write the golden values of the target models.")
    parser.add_argument("--smollm2", type=Path, help="checkpoint folder of SmolLM2-135M-Instruct")
    args = parser.parse_args()

    disable_progress_bar()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    with torch.inference_mode():
        rows = [write_tiny_target(target) for target in TINY_TARGETS]
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
    model = load_model(directory)

    rng = np.random.default_rng(target.seed)
    vocab = built.config.vocab_size
    ids = rng.integers(0, vocab, (SEQUENCES, LENGTH), dtype=np.int32)
    prompt = rng.integers(0, vocab, PROMPT_LENGTH, dtype=np.int32)
    logits = model(as_batch(ids)).logits
    check_tiny_model(target, built, as_batch(ids), logits)

    model.generation_config.eos_token_id = None
    greedy, gap = greedy_continuation(model, prompt, TINY_NEW_TOKENS)
    min_gap = float(gap.min())
    assert min_gap > MIN_TINY_GAP, f"{target.name}: gap {min_gap:.1e}, choose another seed"

    arrays: Arrays = {"ids": ids, "logits": logits.numpy(), **boundaries(model, ids[0])}
    arrays |= {"prompt": prompt, "greedy": greedy, "greedy_gap": gap}
    np.savez_compressed(directory / "golden.npz", **arrays)
    kilobytes = sum(file.stat().st_size for file in directory.iterdir()) / 1000
    assert kilobytes < MAX_DIRECTORY_KB, f"{target.name} takes {kilobytes:.0f} KB"
    note = f"{len(set(greedy.tolist()))} distinct ids in {len(greedy)} steps"
    return Row(f"targets/{target.name}/", kilobytes, min_gap, note)


def build_tiny_model(target: TinyTarget) -> PreTrainedModel:
    """Build the model of ``target`` with all parameters drawn anew from its seed."""
    config_class, model_class = (
        (Qwen3Config, Qwen3ForCausalLM) if target.qwen3 else (LlamaConfig, LlamaForCausalLM)
    )
    config = config_class(**COMMON_CONFIG | target.config, attn_implementation="eager")
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(target.seed)
    for name, parameter in model.named_parameters():
        parameter.copy_(draw_parameter(name, parameter.shape, generator))
    eos = target.generation_eos
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=eos if isinstance(eos, int) else list(eos)
    )
    return model


def draw_parameter(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Draw one parameter, wide enough for uneven attention and uneven logits."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return 1.5 + 0.3 * noise
    if name.endswith("norm.weight"):
        return 1.0 + 0.2 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    return 0.25 * noise


def save_checkpoint(model: PreTrainedModel, target: TinyTarget, directory: Path) -> None:
    """Save ``model`` as a Hugging Face directory, replacing an older one."""
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory, max_shard_size=target.shard_size)
    for file in directory.iterdir():
        file.chmod(0o644)  # safetensors makes files that only their owner can read
    if target.old_hub_config:
        rewrite_config_as_4x(directory / "config.json")


def rewrite_config_as_4x(path: Path) -> None:
    """Spell ``config.json`` as transformers 4.x did, like most checkpoints on the Hub."""
    config = json.loads(path.read_text())
    for key in ("head_dim", "transformers_version"):
        del config[key]
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def check_tiny_model(
    target: TinyTarget, built: PreTrainedModel, ids: torch.Tensor, logits: torch.Tensor
) -> None:
    """Check that the saved directory loads to ``built`` and that its outputs are telling."""
    output = built(ids, output_attentions=True)
    assert torch.equal(output.logits, logits), f"{target.name}: loading changed the logits"
    assert logits.std() > MIN_LOGIT_STD, f"{target.name}: logits are nearly uniform"
    evenness = attention_evenness(output.attentions)
    assert evenness < MAX_ATTENTION_EVENNESS, f"{target.name}: attention is nearly uniform"
    if target.config["rope_parameters"]["rope_type"] != "default":
        change = (without_rope_scaling(target)(ids).logits - logits).abs().mean()
        assert change > MIN_SCALING_CHANGE, f"{target.name}: rope scaling hardly matters"


def without_rope_scaling(target: TinyTarget) -> PreTrainedModel:
    """Build the same model with plain rotary frequencies."""
    theta = target.config["rope_parameters"]["rope_theta"]
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    return build_tiny_model(replace(target, config=target.config | plain))


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


def load_model(directory: Path) -> PreTrainedModel:
    """Load a checkpoint directory in float32 with eager attention."""
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
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
