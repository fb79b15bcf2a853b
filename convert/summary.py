"""What is in a checkpoint, native or foreign, told without reading its weights."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from peagle_jax import checkpoint
from peagle_jax.config import DecoderConfig, DrafterConfig, MoEConfig, RopeConfig, TargetConfig
from peagle_jax.convert.drafters import Given, drafter_plan, is_drafter
from peagle_jax.convert.head_formats import head_format
from peagle_jax.convert.head_tensors import head_tensors
from peagle_jax.convert.source import Tensor, open_source
from peagle_jax.convert.targets import target_plan
from peagle_jax.convert.weights import check_tensors, stored_dtype

Facts = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint.

    Attributes:
      name: there.
      dtype: name of the dtype on disk.
      shape: axes.
      nbytes: size on disk.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a folder holds.

    Attributes:
      facts: by label, in the order to show them; values are JSON's.
      tensors: in the order of their names.
    """

    facts: Facts
    tensors: tuple[Stored, ...]


def summarise(folder: Path, given: Given) -> Summary:
    """Describes a checkpoint.

    Args:
      folder: a native checkpoint or a Hugging Face folder.
      given: what is known about a drafter beyond its config, if it is not native.

    Raises:
      ConvertError, ConfigError, CheckpointError: the checkpoint is missing, damaged or of an
        architecture that this release does not support.
    """
    if checkpoint.is_native(folder):
        config, dtype = checkpoint.read_any_config(folder)
        layout, arrays = "native", checkpoint.abstract_parameters(config, dtype)
        tensors = [_of_array(name, array) for name, array in arrays.items()]
    else:
        source = open_source(folder)
        head = is_drafter(source)
        plan = drafter_plan(source, given) if head else target_plan(source)
        check_tensors(source, plan)
        config, arrays = plan.config, checkpoint.abstract_parameters(plan.config)
        dtype = jnp.dtype(stored_dtype(source, plan, "keep"))
        layout = head_format(source.config, head_tensors(source)) if head else "Hugging Face"
        tensors = [_of_tensor(t) for t in source.tensors.values()]
    facts = {
        "path": str(folder),
        "format": layout,
        "kind": "target" if isinstance(config, TargetConfig) else "drafter",
        "family": config.family if isinstance(config, TargetConfig) else _head_kind(config),
        **_decoder_facts(config),
        **(_target_facts(config) if isinstance(config, TargetConfig) else _head_facts(config)),
        "dtype": str(dtype),
        "parameters": sum(checkpoint.weight_count(name, a) for name, a in arrays.items()),
        "bytes": sum(t.nbytes for t in tensors),
        "tensors": len(tensors),
    }
    return Summary(facts, tuple(sorted(tensors, key=lambda t: t.name)))


def _of_array(name: str, array: jax.ShapeDtypeStruct) -> Stored:
    return Stored(name, str(array.dtype), array.shape, array.size * array.dtype.itemsize)


def _of_tensor(tensor: Tensor) -> Stored:
    return Stored(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes)


def _target_facts(config: TargetConfig) -> Facts:
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": list(config.eos_token_ids),
        "lm_head": "tied to the embedding" if config.tie_word_embeddings else "own",
    }


def _head_kind(config: DrafterConfig) -> str:
    return "EAGLE-3" if config.mask_token_id is None else "P-EAGLE"


def _head_facts(config: DrafterConfig) -> Facts:
    rows, vocab = config.draft_vocab_size, config.vocab_size
    norms = [
        name
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        if getattr(config, name)
    ]
    return {
        "trained_depths": config.num_depths,
        "mask_token_id": config.mask_token_id,
        "aux_boundaries": list(config.aux_boundaries),
        "aux_numbering": config.aux_source_convention,
        "target_hidden_size": config.target_hidden_size,
        "draft_vocabulary": rows,
        "vocabulary_coverage": f"{100 * rows / vocab:.1f} % of {vocab:,} target tokens",
        "embedding": "own" if config.own_embedding else "the target's",
        "lm_head": "own" if config.own_lm_head else "the target's",
        "norm_options": norms,
    }


def _decoder_facts(config: DecoderConfig) -> Facts:
    return {
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "qk_norm": config.qk_norm,
        "biases": [
            name
            for name in ("attention_bias", "attention_output_bias", "mlp_bias")
            if getattr(config, name)
        ],
        "vocabulary": config.vocab_size,
        "context": config.max_position_embeddings,
        "rope": _rope(config.rope),
        "windows": _windows(config.sliding_windows),
        **({} if config.moe is None else {"experts": _experts(config.moe)}),
    }


def _rope(rope: RopeConfig) -> str:
    said = f"{rope.kind}, theta {rope.theta:g}"
    if rope.kind != "default":
        said += f", factor {rope.factor:g}"
    if rope.kind in ("llama3", "yarn"):
        said += f", original context {rope.original_max_position_embeddings:,}"
    return said


def _windows(windows: tuple[int | None, ...]) -> str:
    sizes = [w for w in windows if w is not None]
    if not sizes:
        return "none"
    shown = " and ".join(f"{size:,}" for size in sorted(set(sizes)))
    return f"{shown} tokens in {len(sizes)} of {len(windows)} layers"


def _experts(moe: MoEConfig) -> str:
    return (
        f"{moe.num_experts}, {moe.num_experts_per_token} a token, of size "
        f"{moe.intermediate_size:,}, {moe.weights}, in {sum(moe.layers)} of {len(moe.layers)} "
        "layers"
    )
