"""Drafters: P-EAGLE and EAGLE-3 heads in every public format (`head_formats` lists them).

The tensors are the same in all of them; the first block is called `midlayer` or `layers.0`, and
AutoModel keeps its wrapper's name `model.` before most names.
"""

from peagle_jax.config import ConfigError, DrafterConfig
from peagle_jax.convert.errors import ConvertError
from peagle_jax.convert.head_config import Given, read_head_config
from peagle_jax.convert.head_formats import head_format
from peagle_jax.convert.head_tensors import head_tensors, is_drafter
from peagle_jax.convert.plan import Plan, Slot, block_slots
from peagle_jax.convert.source import Source
from peagle_jax.convert.vocabulary import draft_to_target

__all__ = ["Given", "drafter_config", "drafter_plan", "drafter_slots", "is_drafter"]


def drafter_config(source: Source, given: Given) -> DrafterConfig:
    """Reads a drafter's architecture from its config and its tensors' names and shapes.

    Args:
      source: the drafter's folder.
      given: what the user adds to its config.

    Raises:
      ConvertError: the config is not supported, or it and the tensors do not fit together.
    """
    try:
        return read_head_config(source, head_tensors(source), given)
    except ConfigError as error:
        raise ConvertError(f"{source.config_path}: {error}") from error


def drafter_plan(source: Source, given: Given) -> Plan:
    """Decides where each tensor of a drafter goes; as `drafter_config`."""
    config = drafter_config(source, given)
    tensors = head_tensors(source)
    verl = head_format(source.config, tensors) == "verl-SpeCo"
    offsets = draft_to_target(source, config, unset_is_arange=verl)
    d2t = {"d2t": offsets} if config.draft_vocab_size < config.vocab_size else {}
    used = frozenset(name for name in ("d2t", "t2d") if name in source.tensors)
    slots = drafter_slots(config, tensors.root, tensors.first)
    return Plan(config, slots, given=d2t, used=used)


def drafter_slots(
    config: DrafterConfig, root: str = "", first: str = "layers.0"
) -> dict[str, Slot]:
    """Returns every tensor of a drafter but `d2t` and `t2d`, and where it goes.

    Args:
      config: the architecture.
      root: what most names begin with.
      first: name of the first block, after the root.
    """
    hidden, features = config.hidden_size, config.feature_size
    first = root + first
    slots = {
        f"{root}fc.weight": Slot("fc", (hidden, features)),
        f"{root}norm.weight": Slot("final_norm.weight", (hidden,)),
        f"{first}.hidden_norm.weight": Slot("layers.0.hidden_norm.weight", (hidden,)),
    }
    slots |= block_slots(first, "layers.0", config, 2 * hidden)
    for i in range(1, config.num_layers):
        slots |= block_slots(f"{root}layers.{i}", f"layers.{i}", config, hidden)
    if config.mask_token_id is not None:
        slots["mask_hidden"] = Slot("mask_hidden", (features,), any_shape=True)
    if config.own_embedding:
        slots[f"{root}embed_tokens.weight"] = Slot("embedding", (config.vocab_size, hidden))
    if config.own_lm_head:
        slots["lm_head.weight"] = Slot("lm_head", (config.draft_vocab_size, hidden))
    if config.norm_before_fc:
        slots[f"{root}input_norm.weight"] = Slot("input_norm.weight", (features,))
    if config.fc_norm:
        for i in range(len(config.aux_boundaries)):
            part = (config.target_hidden_size,)
            slots[f"{root}fc_norm.{i}.weight"] = Slot(f"fc_norm.{i}.weight", part)
    return slots
