"""Targets: Hugging Face Llama and Qwen3 dense checkpoints.

Config keys as in transformers' `configuration_llama.py` and `configuration_qwen3.py`; tensor
names as its models save them. No key has a default that could be wrong without a sign.
"""

import re

from peagle_jax.config import ConfigError, TargetConfig
from peagle_jax.convert.decoder import read_architectures, read_decoder, read_model_type
from peagle_jax.convert.errors import ConvertError
from peagle_jax.convert.keys import Keys
from peagle_jax.convert.plan import Plan, Slot, block_slots
from peagle_jax.convert.source import Source

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_ARCHITECTURES = {"llama": ("LlamaForCausalLM",), "qwen3": ("Qwen3ForCausalLM",)}
# A table that transformers before 4.32 stored and that follows from the config.
_ROTARY = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def target_config(source: Source) -> TargetConfig:
    """Reads the architecture from config.json and generation_config.json.

    Raises:
      ConvertError: a key is missing, unknown, or holds a value that is not supported.
    """
    keys = Keys(source.config, str(source.config_path))
    model_type = read_model_type(keys)
    read_architectures(keys, _ARCHITECTURES[model_type])
    generation = Keys(source.generation_config, str(source.generation_config_path))
    stops = [k.integers("eos_token_id") or () for k in (keys, generation)]
    bos = keys.integer_or_none("bos_token_id")
    tied = keys.flag("tie_word_embeddings", False)
    try:
        decoder = read_decoder(keys, model_type)
        keys.done()
        config = TargetConfig(
            **decoder,
            attention_output_bias=decoder["attention_bias"],
            family=model_type,
            tie_word_embeddings=tied,
            bos_token_id=bos,
            eos_token_ids=tuple(dict.fromkeys((*stops[0], *stops[1]))),
        )
    except ConfigError as error:
        raise ConvertError(f"{source.config_path}: {error}") from error
    if model_type == "llama" and any(config.sliding_windows):
        raise ConvertError(
            f"{source.config_path}: layer_types has sliding_attention, which Llama does not have"
        )
    return config


def target_plan(source: Source) -> Plan:
    """Decides where each tensor of a target goes.

    Raises:
      ConvertError: as for `target_config`.
    """
    config = target_config(source)
    table = (config.vocab_size, config.hidden_size)
    slots = {
        EMBEDDING: Slot("embedding", table),
        "model.norm.weight": Slot("final_norm.weight", (config.hidden_size,)),
    }
    for i in range(config.num_layers):
        slots |= block_slots(f"model.layers.{i}", f"layers.{i}", config, config.hidden_size)
    equal: tuple[tuple[str, str], ...] = ()
    if not config.tie_word_embeddings:
        slots[HEAD] = Slot("lm_head", table)
    elif HEAD in source.tensors:
        equal = ((HEAD, EMBEDDING),)
    used = frozenset(name for name in source.tensors if _ROTARY.fullmatch(name))
    return Plan(config, slots, equal=equal, used=used)
