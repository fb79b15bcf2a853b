"""Hugging Face folders of tiny random models, and the native arrays that they must become.

What a native array must hold is written out here once more, independently of the converter.
"""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from peagle_jax import checkpoint
from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.convert.aux_ids import AuxConvention
from peagle_jax.convert.drafters import Given, drafter_plan, is_drafter
from peagle_jax.convert.source import open_source
from peagle_jax.models import Drafter, Target

GOLDEN = Path(__file__).parents[1] / "golden"
BF16 = np.dtype(ml_dtypes.bfloat16)

Tensors = dict[str, np.ndarray]
Config = dict[str, Any]
Draw = Callable[[tuple[int, ...]], np.ndarray]

LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "rope_scaling": None,
    "max_position_embeddings": 64,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
QWEN3: Config = {key: value for key, value in LLAMA.items() if key != "mlp_bias"} | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 1,
}
# The AWS/vLLM layout: reduced vocabulary, three boundaries of a target of 8 layers.
PEAGLE: Config = {key: value for key, value in LLAMA.items() if key != "eos_token_id"} | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 10,
    "ptd_token_id": 39,
    "num_depths": 5,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
}
# The same head in the speculators layout.
SPECULATORS: Config = {
    "architectures": ["PEagleDraftModel"],
    "draft_vocab_size": 10,
    "dtype": "float32",
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
    "mask_token_id": 39,
    "speculators_config": {
        "algorithm": "peagle",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "verifier"},
    },
    "speculators_model_type": "peagle",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        key: value for key, value in LLAMA.items() if key not in ("architectures", "torch_dtype")
    },
    "transformers_version": "5.19.0",
}
DRAFT_IDS = np.array([0, 1, 4, 9, 16, 17, 25, 30, 36, 38])


def block_tensors(config: Config, prefix: str, input_size: int, draw: Draw) -> Tensors:
    """Returns a decoder block's tensors in the source's naming."""
    hidden, inner, size = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    queries = config["num_attention_heads"] * size
    keys = config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, input_size),
        "self_attn.k_proj.weight": (keys, input_size),
        "self_attn.v_proj.weight": (keys, input_size),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    for flag, part in (("attention_bias", "self_attn"), ("mlp_bias", "mlp")):
        if config.get(flag):
            biased = [name for name in shapes if name.startswith(part)]
            shapes |= {n.replace("weight", "bias"): shapes[n][:1] for n in biased}
    if config["model_type"] == "qwen3":
        shapes |= {f"self_attn.{name}_norm.weight": (size,) for name in "qk"}
    return {f"{prefix}.{name}": draw(shape) for name, shape in shapes.items()}


def normal(seed: int) -> Draw:
    """Returns a source of standard normal float32 arrays."""
    rng = np.random.default_rng(seed)
    return lambda shape: rng.standard_normal(shape, np.float32)


def random_bits(seed: int) -> Draw:
    """Returns a source of bfloat16 arrays that do not compress, quick to make."""
    rng = np.random.default_rng(seed)
    return lambda shape: rng.integers(0, 0x3F80, shape, np.uint16).view(BF16)


def target_tensors(config: Config, draw: Draw | None = None) -> Tensors:
    """Returns a target's tensors in the source's naming, by default float32."""
    draw = draw or normal(0)
    hidden, table = config["hidden_size"], (config["vocab_size"], config["hidden_size"])
    tensors = {"model.embed_tokens.weight": draw(table)}
    for i in range(config["num_hidden_layers"]):
        tensors |= block_tensors(config, f"model.layers.{i}", hidden, draw)
    tensors["model.norm.weight"] = draw((hidden,))
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = draw(table)
    return tensors


def drafter_tensors(
    config: Config = PEAGLE,
    *,
    first: str = "midlayer",
    boundaries: int = 3,
    fc_norm: bool = False,
    norm_before_fc: bool = False,
) -> Tensors:
    """Returns a head's tensors in the source's naming, for a target of the same hidden size."""
    draw = normal(1)
    hidden, vocab, size = (config[k] for k in ("hidden_size", "vocab_size", "draft_vocab_size"))
    features = boundaries * hidden
    tensors = {
        "embed_tokens.weight": draw((vocab, hidden)),
        "fc.weight": draw((hidden, features)),
        "mask_hidden": draw((1, 1, features)),
        f"{first}.hidden_norm.weight": draw((hidden,)),
        "norm.weight": draw((hidden,)),
        "lm_head.weight": draw((size, hidden)),
    }
    tensors |= block_tensors(config, first, 2 * hidden, draw)
    for i in range(1, config["num_hidden_layers"]):
        tensors |= block_tensors(config, f"layers.{i}", hidden, draw)
    if fc_norm:
        tensors |= {f"fc_norm.{i}.weight": draw((hidden,)) for i in range(boundaries)}
    if norm_before_fc:
        tensors["input_norm.weight"] = draw((features,))
    if size < vocab:
        tensors |= vocabulary(DRAFT_IDS, vocab)
    return tensors


def vocabulary(ids: np.ndarray, vocab: int) -> Tensors:
    """Returns d2t and t2d of a draft vocabulary."""
    mask = np.zeros(vocab, np.bool_)
    mask[ids] = True
    return {"d2t": (ids - np.arange(len(ids))).astype(np.int64), "t2d": mask}


def write(
    folder: Path,
    config: Config,
    tensors: Tensors,
    *,
    shards: int = 1,
    generation: Config | None = None,
) -> Path:
    """Writes a Hugging Face folder and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read_source(folder: Path) -> Tensors:
    """Returns all tensors of a Hugging Face folder, by the library's own loader."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def read_native[C: (TargetConfig, DrafterConfig)](
    folder: Path, config_type: type[C]
) -> tuple[C, Tensors]:
    """Returns the config and the arrays of a native checkpoint, in the stored dtype."""
    config, dtype = checkpoint.read_config(folder, config_type)
    module: type[Any] = Target if config_type is TargetConfig else Drafter
    device = SingleDeviceSharding(jax.devices("cpu")[0])
    loaded = checkpoint.load(module, folder, config, dtype, device)
    flat = nnx.to_flat_state(nnx.state(loaded))
    return config, {".".join(map(str, p)): np.asarray(v.get_value()) for p, v in flat}


def expected_block(tensors: Tensors, source: str, native: str) -> Tensors:
    """Returns the native arrays of a block."""

    def stacked(part: str, names: str, kind: str) -> np.ndarray:
        parts = [tensors[f"{source}.{part}.{name}_proj.{kind}"] for name in names.split()]
        return np.concatenate(parts)

    expected = {
        "attention_norm.weight": tensors[f"{source}.input_layernorm.weight"],
        "mlp_norm.weight": tensors[f"{source}.post_attention_layernorm.weight"],
    }
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        if f"{source}.self_attn.q_proj.{kind}" in tensors:
            expected[f"attention.qkv{suffix}"] = stacked("self_attn", "q k v", kind)
        if f"{source}.self_attn.o_proj.{kind}" in tensors:
            expected[f"attention.out{suffix}"] = stacked("self_attn", "o", kind)
        if f"{source}.mlp.up_proj.{kind}" in tensors:
            expected[f"mlp.gate_up{suffix}"] = stacked("mlp", "gate up", kind)
            expected[f"mlp.down{suffix}"] = stacked("mlp", "down", kind)
    for name in ("q_norm", "k_norm"):
        if f"{source}.self_attn.{name}.weight" in tensors:
            weight = tensors[f"{source}.self_attn.{name}.weight"]
            expected[f"attention.{name}.weight"] = weight
    return {f"{native}.{name}": value for name, value in expected.items()}


def expected_target(tensors: Tensors, layers: int) -> Tensors:
    """Returns the native arrays of a target."""
    expected = {
        "embedding": tensors["model.embed_tokens.weight"],
        "final_norm.weight": tensors["model.norm.weight"],
    }
    for i in range(layers):
        expected |= expected_block(tensors, f"model.layers.{i}", f"layers.{i}")
    if "lm_head.weight" in tensors:
        expected["lm_head"] = tensors["lm_head.weight"]
    return expected


def expected_drafter(tensors: Tensors, layers: int, first: str) -> Tensors:
    """Returns the native arrays of a head, `d2t` as in the source."""
    copied = {
        "embed_tokens.weight": "embedding",
        "fc.weight": "fc",
        "norm.weight": "final_norm.weight",
        "lm_head.weight": "lm_head",
        f"{first}.hidden_norm.weight": "layers.0.hidden_norm.weight",
        "input_norm.weight": "input_norm.weight",
        **{f"fc_norm.{i}.weight": f"fc_norm.{i}.weight" for i in range(9)},
    }
    expected = {native: tensors[name] for name, native in copied.items() if name in tensors}
    expected |= expected_block(tensors, first, "layers.0")
    for i in range(1, layers):
        expected |= expected_block(tensors, f"layers.{i}", f"layers.{i}")
    if "mask_hidden" in tensors:
        expected["mask_hidden"] = tensors["mask_hidden"].reshape(-1)
    if "d2t" in tensors:
        expected["d2t"] = tensors["d2t"].astype(np.int32)
    return expected


def assert_identical(arrays: Tensors, expected: Tensors) -> None:
    """Checks names, dtypes, shapes and every bit."""
    assert set(arrays) == set(expected)
    for name, value in expected.items():
        got = arrays[name]
        assert (got.dtype, got.shape) == (value.dtype, value.shape), name
        assert got.tobytes() == value.tobytes(), name


def run_python(program: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts a Python program on the CPU that imports what this process imports."""
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", textwrap.dedent(program), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    """Returns the dictionary without some of its keys."""
    assert set(names) <= set(values)
    return {name: value for name, value in values.items() if name not in names}


def parse_drafter(
    folder: Path,
    config: Config,
    tensors: Tensors,
    target_layers: int | None = None,
    aux_convention: AuxConvention | None = None,
    mask_token_id: int | None = None,
) -> DrafterConfig:
    """Writes a head's folder and returns the config that it converts to."""
    source = open_source(write(folder, config, tensors))
    assert is_drafter(source)
    parsed = drafter_plan(source, Given(target_layers, aux_convention, mask_token_id)).config
    assert isinstance(parsed, DrafterConfig)
    return parsed
