"""Tiny Qwen3-MoE and GPT-OSS checkpoints in every layout, and the arrays they must become.

As in `convert_sources`, what an array must hold is written out here independently.
"""

import json
import re
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from convert_sources import (
    LLAMA,
    QWEN3,
    Config,
    Tensors,
    block_tensors,
    expected_block,
    normal,
    read_native,
    without,
    write,
)

from peagle_jax.config import TargetConfig
from peagle_jax.convert import ConvertError, convert_target
from peagle_jax.convert.source import open_source
from peagle_jax.convert.targets import target_config

F8 = np.dtype(ml_dtypes.float8_e4m3fn)
_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U8": np.dtype(np.uint8),
    "F8_E4M3": F8,
}

# As on the Hub: every second layer could be sparse, but layer 3 is said to be dense.
QWEN3_MOE: Config = without(QWEN3, "attention_bias") | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [3],
    "moe_intermediate_size": 6,
    "norm_topk_prob": True,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "qkv_bias": False,
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
}
YARN: Config = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
    "truncate": False,
}
GPT_OSS: Config = without(LLAMA, "mlp_bias", "bos_token_id") | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 32,
    "attention_bias": True,
    "experts_per_token": 2,
    "initial_context_length": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
    "num_local_experts": 3,
    "output_router_logits": False,
    "rope_scaling": YARN,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 8,
    "swiglu_limit": 7.0,
}
MXFP4: Config = {
    "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
    "quant_method": "mxfp4",
}
FP8: Config = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head"],
    "quant_method": "fp8",
    "weight_block_size": [8, 4],
}
# The same model as GPT_OSS in OpenAI's own words, but for the vocabulary, which holds the stops.
ORIGINAL: Config = {
    "num_hidden_layers": 2,
    "num_experts": 3,
    "experts_per_token": 2,
    "vocab_size": 201088,
    "hidden_size": 64,
    "intermediate_size": 32,
    "swiglu_limit": 7.0,
    "head_dim": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "sliding_window": 8,
    "initial_context_length": 16,
    "rope_theta": 500.0,
    "rope_scaling_factor": 8.0,
    "rope_ntk_alpha": 1,
    "rope_ntk_beta": 32,
}


def qwen3_moe_tensors(fused: bool = False, seed: int = 0) -> Tensors:
    """Returns the tensors of QWEN3_MOE, with an expert's own tensors or those of all fused."""
    config, draw = QWEN3_MOE, normal(seed)
    hidden, inner, experts = 16, config["moe_intermediate_size"], config["num_experts"]
    tensors = {
        "model.embed_tokens.weight": draw((40, hidden)),
        "model.norm.weight": draw((hidden,)),
        "lm_head.weight": draw((40, hidden)),
    }
    for i in range(4):
        layer = f"model.layers.{i}"
        block = block_tensors({**config, "model_type": "qwen3"}, layer, hidden, draw)
        if i != 3:
            block = {name: value for name, value in block.items() if ".mlp." not in name}
            block[f"{layer}.mlp.gate.weight"] = draw((experts, hidden))
            for e in range(experts):
                for name in ("gate", "up"):
                    block[f"{layer}.mlp.experts.{e}.{name}_proj.weight"] = draw((inner, hidden))
                block[f"{layer}.mlp.experts.{e}.down_proj.weight"] = draw((hidden, inner))
        tensors |= block
    return _fuse(tensors, experts) if fused else tensors


def _fuse(tensors: Tensors, experts: int) -> Tensors:
    """Returns the same model in the layout of transformers 5 in memory."""
    fused = {name: value for name, value in tensors.items() if ".experts." not in name}
    for i in range(3):
        prefix = f"model.layers.{i}.mlp.experts"
        parts = {
            part: np.stack([tensors[f"{prefix}.{e}.{part}_proj.weight"] for e in range(experts)])
            for part in ("gate", "up", "down")
        }
        fused[f"{prefix}.gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        fused[f"{prefix}.down_proj"] = parts["down"]
    return fused


def gpt_oss_tensors(mxfp4: bool, vocab: int = 40) -> Tensors:
    """Returns the tensors of GPT_OSS on the Hub, its experts packed or plain."""
    draw, rng = normal(0), np.random.default_rng(1)
    hidden, inner, experts = 64, 32, 3
    tensors = {
        "model.embed_tokens.weight": draw((vocab, hidden)),
        "model.norm.weight": draw((hidden,)),
        "lm_head.weight": draw((vocab, hidden)),
    }
    for i in range(2):
        layer = f"model.layers.{i}"
        config = {**GPT_OSS, "intermediate_size": 1}
        block = block_tensors(config, layer, hidden, draw)
        tensors |= {name: value for name, value in block.items() if ".mlp." not in name}
        tensors[f"{layer}.self_attn.sinks"] = draw((4,))
        tensors[f"{layer}.mlp.router.weight"] = draw((experts, hidden))
        tensors[f"{layer}.mlp.router.bias"] = draw((experts,))
        for part, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            name = f"{layer}.mlp.experts.{part}_proj"
            tensors[f"{name}_bias"] = draw((experts, rows))
            if mxfp4:
                shape = (experts, rows, columns // 32)
                tensors[f"{name}_blocks"] = rng.integers(0, 256, (*shape, 16), np.uint8)
                tensors[f"{name}_scales"] = rng.integers(100, 140, shape, np.uint8)
            else:
                tensors[name] = draw((experts, columns, rows))
    return tensors


def original_tensors(hub: Tensors) -> Tensors:
    """Returns the tensors of a packed GPT-OSS under OpenAI's names."""
    names = {
        "embed_tokens.weight": "embedding.weight",
        "lm_head.weight": "unembedding.weight",
        "input_layernorm.weight": "attn.norm.scale",
        "post_attention_layernorm.weight": "mlp.norm.scale",
        "self_attn.sinks": "attn.sinks",
        "self_attn.o_proj": "attn.out",
        "mlp.router": "mlp.gate",
        "mlp.experts.gate_up_proj_bias": "mlp.mlp1_bias",
        "mlp.experts.gate_up_proj_": "mlp.mlp1_weight.",
        "mlp.experts.down_proj_bias": "mlp.mlp2_bias",
        "mlp.experts.down_proj_": "mlp.mlp2_weight.",
        "norm.weight": "norm.scale",
    }
    original: Tensors = {}
    for name, value in hub.items():
        if re.search(r"\.[kv]_proj\.", name):
            continue
        new = re.sub(r"^model\.", "", re.sub(r"^model\.layers\.(\d+)", r"block.\1", name))
        if "q_proj" in name:
            parts = [hub[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            original[new.replace("self_attn.q_proj", "attn.qkv")] = np.concatenate(parts)
            continue
        old = next(old for old in names if old in new)
        original[new.replace(old, names[old])] = value
    return original


def expected_sparse_target(tensors: Tensors, layers: int) -> Tensors:
    """Returns the native arrays of a target with experts in any of Hugging Face's layouts."""
    expected = {
        "embedding": tensors["model.embed_tokens.weight"],
        "final_norm.weight": tensors["model.norm.weight"],
    }
    if "lm_head.weight" in tensors:
        expected["lm_head"] = tensors["lm_head.weight"]
    for i in range(layers):
        source, native = f"model.layers.{i}", f"layers.{i}"
        expected |= expected_block(tensors, source, native)
        if f"{source}.self_attn.sinks" in tensors:
            expected[f"{native}.attention.sinks"] = tensors[f"{source}.self_attn.sinks"]
        mlp = {
            name.removeprefix(f"{source}.mlp."): value
            for name, value in tensors.items()
            if name.startswith(f"{source}.mlp.")
        }
        experts = _gpt_oss_experts(mlp) if "router.weight" in mlp else _qwen3_experts(mlp)
        expected |= {f"{native}.mlp.{name}": value for name, value in experts.items()}
    return expected


def _qwen3_experts(mlp: Tensors) -> Tensors:
    if "gate.weight" not in mlp:
        return {}
    if "experts.gate_up_proj" in mlp:
        gate_up, down = mlp["experts.gate_up_proj"], mlp["experts.down_proj"]
    else:
        gate, up, down = (
            np.stack(
                [mlp[f"experts.{e}.{part}_proj.weight"] for e in range(len(mlp["gate.weight"]))]
            )
            for part in ("gate", "up", "down")
        )
        gate_up = np.concatenate([gate, up], axis=1)
    return {"router": mlp["gate.weight"], "gate_up": gate_up, "down": down}


def _gpt_oss_experts(mlp: Tensors) -> Tensors:
    def gate_first(value: np.ndarray) -> np.ndarray:  # even rows are gate's, odd ones up's
        return np.concatenate([value[:, 0::2], value[:, 1::2]], axis=1)

    experts = {
        "router": mlp["router.weight"],
        "router_bias": mlp["router.bias"],
        "gate_up_bias": gate_first(mlp["experts.gate_up_proj_bias"]),
        "down_bias": mlp["experts.down_proj_bias"],
    }
    if "experts.gate_up_proj" in mlp:
        experts["gate_up"] = gate_first(mlp["experts.gate_up_proj"].transpose(0, 2, 1))
        experts["down"] = mlp["experts.down_proj"].transpose(0, 2, 1)
        return experts
    for kind in ("blocks", "scales"):
        experts[f"gate_up.{kind}"] = gate_first(mlp[f"experts.gate_up_proj_{kind}"])
        experts[f"down.{kind}"] = mlp[f"experts.down_proj_{kind}"]
    return experts


def write_fp8(folder: Path, config: Config, tensors: Tensors) -> Path:
    """Writes a folder whose tensors may be FP8, which the safetensors library does not save."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    codes = {dtype: code for code, dtype in _DTYPES.items()}
    header: dict[str, Any] = {}
    start = 0
    for name, value in tensors.items():
        place = [start, start + value.nbytes]
        header[name] = {
            "dtype": codes[value.dtype],
            "shape": value.shape,
            "data_offsets": place,
        }
        start = place[1]
    text = json.dumps(header).encode()
    data = b"".join(value.tobytes() for value in tensors.values())
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder


def read_tensors(folder: Path) -> Tensors:
    """Returns all tensors of a folder, FP8 ones too."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, end = (8 + length + offset for offset in entry["data_offsets"])
            value = np.frombuffer(raw[first:end], _DTYPES[entry["dtype"]])
            tensors[name] = value.reshape(entry["shape"])
    return tensors


def dequantised(tensors: Tensors, block: tuple[int, int], dtype: Any) -> Tensors:
    """Returns the tensors with FP8 weights, times their scales, in `dtype`."""
    plain = {name: value for name, value in tensors.items() if not name.endswith("_scale_inv")}
    for name, value in plain.items():
        if value.dtype == F8:
            scales = tensors[f"{name}_scale_inv"].astype(np.float32)
            spread = np.kron(scales, np.ones(block, np.float32))
            rows, columns = value.shape
            plain[name] = (value.astype(np.float32) * spread[:rows, :columns]).astype(dtype)
    return plain


def parse(folder: Path, config: Config) -> TargetConfig:
    """Returns the native config of a config.json, without any weights."""
    return target_config(open_source(write(folder, config, {"unused": np.zeros(1, np.float32)})))


def converted(
    folder: Path, config: Config, tensors: Tensors, dtype: str = "keep"
) -> tuple[TargetConfig, Tensors]:
    """Writes and converts a target; returns the native config and arrays."""
    convert_target(write_fp8(folder / "hf", config, tensors), folder / "out", dtype)
    return read_native(folder / "out", TargetConfig)


def refused(folder: Path, config: Config, tensors: Tensors, named: str) -> None:
    """Checks that a target is refused by a message, and that nothing is written."""
    write_fp8(folder / "hf", config, tensors)
    with pytest.raises(ConvertError, match=named):
        convert_target(folder / "hf", folder / "out")
    assert not (folder / "out").exists()
