"""Published targets and devices by name, and the usual head of a target.

So sizes can be told without a checkpoint.

The targets' values are those of config.json and generation_config.json on the Hugging Face hub; end
tokens of Llama are those of the instruct models.
"""

import dataclasses
import json
import math
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

from peagle_jax import checkpoint
from peagle_jax.config import DrafterConfig, ExpertWeights, MoEConfig, RopeConfig, TargetConfig

# Memory of one GPU in bytes: the gigabytes of NVIDIA's data sheet, taken as 10^9 bytes. Drivers
# report up to 7 % more (81,559 MiB for an H100 of "80 GB"); the CUDA context and the libraries'
# workspaces need some of that.
DEVICES = {
    "a100-40gb": 40 * 10**9,
    "a100-80gb": 80 * 10**9,
    "b200": 180 * 10**9,  # DGX B200: 1,440 GB for eight
    "b300": 270 * 10**9,  # HGX B300; 288 GB are on the package
    "h100": 80 * 10**9,  # SXM and PCIe
    "h200": 141 * 10**9,
    "l4": 24 * 10**9,
    "l40s": 48 * 10**9,
    "rtx-4090": 24 * 10**9,
}

_UNITS = {"": 1, "MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}
_LEAST_MEMORY = 10**8  # bytes; less is a number in another unit


class PresetError(ValueError):
    """A target or a device is unknown, or a size is none."""


def _llama(factor: float = 8.0, **sizes: Any) -> TargetConfig:
    """Llama 3.1 to 3.3; `factor` is the RoPE scaling's."""
    return TargetConfig(
        family="llama",
        vocab_size=128256,
        num_kv_heads=8,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500_000.0, kind="llama3", factor=factor),
        max_position_embeddings=131072,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=(None,) * sizes["num_layers"],
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
        **{"head_dim": 128, "tie_word_embeddings": False, **sizes},
    )


def _qwen3(**sizes: Any) -> TargetConfig:
    """Qwen3, dense or with experts."""
    common = {
        "family": "qwen3",
        "num_kv_heads": 8,
        "rope": RopeConfig(theta=1_000_000.0),
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "bos_token_id": 151643,
    }
    return TargetConfig(
        vocab_size=151936,
        head_dim=128,
        rms_norm_eps=1e-6,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        qk_norm=True,
        sliding_windows=(None,) * sizes["num_layers"],
        eos_token_ids=(151645, 151643),
        **{**common, **sizes},
    )


def _qwen3_moe(num_experts: int, expert_size: int, num_layers: int, **sizes: Any) -> TargetConfig:
    """Qwen3-MoE. Every layer is sparse, so `intermediate_size` is a value without a weight."""
    return _qwen3(
        family="qwen3_moe",
        num_layers=num_layers,
        moe=MoEConfig(
            num_experts=num_experts,
            num_experts_per_token=8,
            intermediate_size=expert_size,
            layers=(True,) * num_layers,
            router="softmax_top_k",
            norm_topk_prob=True,
            router_bias=False,
            expert_bias=False,
        ),
        **sizes,
    )


def _qwen3_coder(**sizes: Any) -> TargetConfig:
    """Qwen3-Coder: Qwen3-MoE for a longer context."""
    rope = RopeConfig(theta=10_000_000.0)
    return _qwen3_moe(rope=rope, max_position_embeddings=262144, bos_token_id=None, **sizes)


def _gpt_oss(num_layers: int, num_experts: int) -> TargetConfig:
    """GPT-OSS, its experts in MXFP4 as published; every other layer slides."""
    return TargetConfig(
        family="gpt_oss",
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_layers=num_layers,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(
            theta=150_000.0,
            kind="yarn",
            factor=32.0,
            original_max_position_embeddings=4096,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            attention_factor=0.1 * math.log(32.0) + 1.0,
        ),
        max_position_embeddings=131072,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=(128, None) * (num_layers // 2),
        attention_sinks=True,
        norm_weight_in_float32=True,
        moe=MoEConfig(
            num_experts=num_experts,
            num_experts_per_token=4,
            intermediate_size=2880,
            layers=(True,) * num_layers,
            router="top_k_softmax",
            norm_topk_prob=False,
            router_bias=True,
            expert_bias=True,
            swiglu_limit=7.0,
            weights="mxfp4",
        ),
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_ids=(200002, 199999, 200012),
    )


_LLAMA_70B = _llama(hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64)

TARGETS = MappingProxyType(
    {
        "llama-3.2-1b": _llama(
            hidden_size=2048,
            intermediate_size=8192,
            num_layers=16,
            num_heads=32,
            head_dim=64,
            factor=32.0,
            tie_word_embeddings=True,
        ),
        "llama-3.2-3b": _llama(
            hidden_size=3072,
            intermediate_size=8192,
            num_layers=28,
            num_heads=24,
            factor=32.0,
            tie_word_embeddings=True,
        ),
        "llama-3.1-8b": _llama(
            hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32
        ),
        "llama-3.1-70b": _LLAMA_70B,
        "llama-3.3-70b": _LLAMA_70B,
        "qwen3-0.6b": _qwen3(
            hidden_size=1024,
            intermediate_size=3072,
            num_layers=28,
            num_heads=16,
            tie_word_embeddings=True,
        ),
        "qwen3-1.7b": _qwen3(
            hidden_size=2048,
            intermediate_size=6144,
            num_layers=28,
            num_heads=16,
            tie_word_embeddings=True,
        ),
        "qwen3-4b": _qwen3(
            hidden_size=2560,
            intermediate_size=9728,
            num_layers=36,
            num_heads=32,
            tie_word_embeddings=True,
        ),
        "qwen3-8b": _qwen3(hidden_size=4096, intermediate_size=12288, num_layers=36, num_heads=32),
        "qwen3-14b": _qwen3(hidden_size=5120, intermediate_size=17408, num_layers=40, num_heads=40),
        "qwen3-32b": _qwen3(hidden_size=5120, intermediate_size=25600, num_layers=64, num_heads=64),
        "qwen3-30b-a3b": _qwen3_moe(
            hidden_size=2048,
            intermediate_size=6144,
            num_layers=48,
            num_heads=32,
            num_kv_heads=4,
            num_experts=128,
            expert_size=768,
        ),
        "qwen3-coder-30b-a3b": _qwen3_coder(
            hidden_size=2048,
            intermediate_size=5472,
            num_layers=48,
            num_heads=32,
            num_kv_heads=4,
            num_experts=128,
            expert_size=768,
        ),
        "qwen3-coder-480b-a35b": _qwen3_coder(
            hidden_size=6144,
            intermediate_size=8192,
            num_layers=62,
            num_heads=96,
            num_experts=160,
            expert_size=2560,
        ),
        "gpt-oss-20b": _gpt_oss(num_layers=24, num_experts=32),
        "gpt-oss-120b": _gpt_oss(num_layers=36, num_experts=128),
    }
)


def find_target(name: str) -> TargetConfig:
    """Returns the architecture of a known target, or the one that a path holds.

    Args:
      name: one of `TARGETS` in any case, the folder of a native or a Hugging Face checkpoint, or
        its config.json. The weights need not be there beside a Hugging Face config.json. A name
        comes before a folder of that name.

    Raises:
      PresetError: nothing is found, or it cannot be read.
      CheckpointError, ConvertError, ConfigError: what is found is damaged or not supported.
    """
    if (known := TARGETS.get(name.lower())) is not None:
        return known
    path = Path(name).expanduser()
    if not name or not path.exists():
        raise PresetError(
            f"{name or 'the empty name'} is no folder and no known target; known are "
            f"{', '.join(sorted(TARGETS))}"
        )
    if path.is_file() and path.name != "config.json":
        raise PresetError(f"{path} is no config.json; name that or the folder of the checkpoint")
    folder = path if path.is_dir() else path.parent
    if checkpoint.is_native(folder):
        return checkpoint.read_config(folder, TargetConfig)[0]
    from peagle_jax.convert.source import Source
    from peagle_jax.convert.targets import target_config

    generation = folder / "generation_config.json"
    values = _read_json(generation) if generation.is_file() else {}
    return target_config(Source(folder, _read_json(folder / "config.json"), values, {}))


def with_expert_weights(target: TargetConfig, weights: ExpertWeights | None) -> TargetConfig:
    """Returns the target with its experts "plain" or "mxfp4"; None leaves them as they are.

    Raises:
      PresetError: the target has no experts.
      ConfigError: they cannot be packed.
    """
    if weights is None:
        return target
    if target.moe is None:
        raise PresetError(f"expert weights are {weights}, but the target has no experts")
    return dataclasses.replace(target, moe=dataclasses.replace(target.moe, weights=weights))


def find_device(name: str | None, memory: str | None = None) -> int:
    """Returns the memory of a device in bytes.

    Args:
      name: one of `DEVICES` in any case; None with a `memory`.
      memory: its size instead, a number of bytes or with a unit: "141e9", "141GB", "131.3 GiB".

    Raises:
      PresetError: neither is given, the device is not known, or the size is none.
    """
    if memory is not None:
        parts = re.fullmatch(r"\s*(\d+\.?\d*(?:e\+?\d+)?)\s*([a-z]*)\s*", memory.lower())
        unit = _UNITS.get(parts[2].upper()) if parts else None
        size = float(parts[1]) * unit if parts and unit else math.nan
        if not _LEAST_MEMORY <= size < math.inf:
            raise PresetError(
                f"device memory {memory!r} is no size of at least 100 MB; write it like 141e9, "
                "141GB or 131GiB"
            )
        return int(size)
    if name is None or name.lower() not in DEVICES:
        given = "no device is given" if name is None else f"{name!r} is no known device"
        raise PresetError(f"{given}; known are {', '.join(sorted(DEVICES))}, or give its memory")
    return DEVICES[name.lower()]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PresetError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise PresetError(f"{path} must hold a JSON object")
    return values


def usual_drafter(
    target: TargetConfig, num_layers: int, draft_vocab_size: int | None = None
) -> DrafterConfig:
    """Returns a P-EAGLE head of the published kind for a target.

    It has the target's hidden size and attention heads, full attention, three boundaries, and an
    embedding and an lm_head of its own. Its MLPs are dense: as wide as the target's, and 4H for
    a target with experts. That makes 1.70 B weights for GPT-OSS with four layers; the cards of
    `amazon/gpt-oss-120b-p-eagle` and `amazon/GPT-OSS-20B-P-EAGLE` say 1.7 B and 1.8 B.

    Args:
      target: architecture of the target.
      num_layers: decoder blocks.
      draft_vocab_size: rows of its lm_head; by default the whole vocabulary.
    """
    dense, last = target.moe is None, target.num_layers
    boundaries = (min(2, last), last // 2, max(0, last - 3))  # EAGLE-3's choice
    return DrafterConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size if dense else 4 * target.hidden_size,
        num_layers=num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope=target.rope,
        max_position_embeddings=target.max_position_embeddings,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=(None,) * num_layers,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=draft_vocab_size or target.vocab_size,
        aux_boundaries=boundaries,
        aux_source_convention="boundary",
        mask_token_id=0,
        num_depths=None,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        own_embedding=True,
        own_lm_head=True,
    )
