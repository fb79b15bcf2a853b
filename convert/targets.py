"""Targets: Hugging Face Llama, Qwen3, Qwen3-MoE and GPT-OSS checkpoints, and OpenAI's GPT-OSS.

Config keys as in transformers' configuration classes; tensor names as its models save them. No
key has a default that could be wrong without a sign.
"""

import dataclasses
import re

from peagle_jax.config import ConfigError, TargetConfig
from peagle_jax.convert.decoder import (
    DENSE_TYPES,
    SPARSE_TYPES,
    read_architectures,
    read_decoder,
    read_model_type,
)
from peagle_jax.convert.errors import ConvertError
from peagle_jax.convert.keys import Keys
from peagle_jax.convert.layouts import EMBEDDING, HEAD, Layout, target_slots
from peagle_jax.convert.openai import is_original, original_config
from peagle_jax.convert.plan import Plan
from peagle_jax.convert.quantization import Quantization, read_quantization
from peagle_jax.convert.source import Source

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "qwen3_moe": ("Qwen3MoeForCausalLM",),
    "gpt_oss": ("GptOssForCausalLM",),
}
# A table that transformers before 4.32 stored and that follows from the config.
_ROTARY = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_FUSED = re.compile(r"model\.layers\.\d+\.mlp\.experts\.[a-z]")
_SINGLE = re.compile(r"model\.layers\.\d+\.mlp\.experts\.\d")


def target_config(source: Source) -> TargetConfig:
    """Reads the architecture from config.json and generation_config.json.

    Raises:
      ConvertError: a key is missing, unknown, or holds a value that is not supported.
    """
    return _read_config(source)[0]


def _read_config(source: Source) -> tuple[TargetConfig, Quantization]:
    """Returns the architecture, and how the source's weights are quantised."""
    keys = Keys(source.config, str(source.config_path))
    try:
        if is_original(source.config):
            return original_config(keys), Quantization(mxfp4=True)
        return _read_hugging_face(source, keys)
    except ConfigError as error:
        raise ConvertError(f"{source.config_path}: {error}") from error


def _read_hugging_face(source: Source, keys: Keys) -> tuple[TargetConfig, Quantization]:
    model_type = read_model_type(keys, DENSE_TYPES + SPARSE_TYPES)
    read_architectures(keys, _ARCHITECTURES[model_type])
    generation = Keys(source.generation_config, str(source.generation_config_path))
    stops = [k.integers("eos_token_id") or () for k in (keys, generation)]
    bos = keys.integer_or_none("bos_token_id")
    tied = keys.flag("tie_word_embeddings", False)
    quantization = read_quantization(keys, model_type)
    context = keys.integer_or_none("initial_context_length") if model_type == "gpt_oss" else None
    decoder = read_decoder(keys, model_type)
    keys.done()
    if quantization.mxfp4:
        decoder["moe"] = dataclasses.replace(decoder["moe"], weights="mxfp4")
    config = TargetConfig(
        **decoder,
        attention_output_bias=decoder["attention_bias"],
        family=model_type,
        tie_word_embeddings=tied,
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys((*stops[0], *stops[1]))),
    )
    original = config.rope.original_max_position_embeddings
    if context is not None and config.rope.kind == "yarn" and context != original:
        raise ConvertError(
            f"{source.config_path}: initial_context_length is {context}, but "
            f"original_max_position_embeddings of the rope is {original}"
        )
    if model_type == "llama" and any(config.sliding_windows):
        raise ConvertError(
            f"{source.config_path}: layer_types has sliding_attention, which Llama does not have"
        )
    return config, quantization


def target_plan(source: Source) -> Plan:
    """Decides where each tensor of a target goes.

    Raises:
      ConvertError: as for `target_config`, or experts are stored in two layouts.
    """
    config, quantization = _read_config(source)
    slots = target_slots(config, _layout(source, config))
    tied = config.tie_word_embeddings and HEAD in source.tensors
    return Plan(
        config,
        slots,
        equal=((HEAD, EMBEDDING),) if tied else (),
        used=frozenset(name for name in source.tensors if _ROTARY.fullmatch(name)),
        block=quantization.block,
    )


def _layout(source: Source, config: TargetConfig) -> Layout:
    """Returns the layout of the source's tensors."""
    if is_original(source.config):
        return "original"
    if config.family != "qwen3_moe":
        return "hub"
    fused = next((name for name in source.tensors if _FUSED.match(name)), None)
    single = next((name for name in source.tensors if _SINGLE.match(name)), None)
    if fused and single:
        raise ConvertError(
            f"{source.folder}: experts are stored in two layouts, {single} and {fused}: save the "
            "model again in one of them"
        )
    return "fused" if fused else "hub"
