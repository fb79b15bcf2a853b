"""Drafters: P-EAGLE and EAGLE-3 heads in the AWS/vLLM and the speculators layout.

The AWS/vLLM layout has one flat config and calls the first block `midlayer` or `layers.0`; the
speculators layout nests the decoder's config in `transformer_layer_config`. The tensors are the
same. Sources: vLLM's `llama_eagle3.py`, the speculators package, and saved heads.
"""

import dataclasses
import re
from typing import Any

from peagle_jax.config import ConfigError, DrafterConfig
from peagle_jax.convert.decoder import (
    IGNORED,
    read_architectures,
    read_decoder,
    read_model_type,
)
from peagle_jax.convert.errors import ConvertError, listed
from peagle_jax.convert.keys import Keys
from peagle_jax.convert.plan import Plan, Slot, block_slots
from peagle_jax.convert.source import Source
from peagle_jax.convert.vocabulary import draft_to_target

_ARCHITECTURES = (
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"),
    *("PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM", "PEagleSpeculator"),
    *("Eagle3Speculator", "Eagle3DraftModel", "LlamaEagle3DraftModel", "Qwen3ForCausalLMEagle3"),
)
# How it was trained, how somebody else serves it, ids that only the target's text needs.
_IGNORED = (
    *("embed_requires_grad", "down_sample_ratio", "down_sample_ratio_min", "num_lookahead_tokens"),
    *("speculators_version", "has_no_defaults_at_init", "bos_token_id", "eos_token_id"),
    *("tie_word_embeddings", "model_max_length", "auto_map"),
)
_MASK_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")
_AUX_KEY = "eagle_aux_hidden_state_layer_ids"
_HEAD = "lm_head.weight"
_LAYER = re.compile(r"(?:midlayer|layers\.(\d+))\.")


def is_drafter(source: Source) -> bool:
    """Whether the folder holds a drafter and not a target."""
    names = ("fc.weight", "mask_hidden", "model.fc.weight")
    return "speculators_model_type" in source.config or any(n in source.tensors for n in names)


@dataclasses.dataclass(frozen=True)
class _Names:
    """How the source spells the names that vary, and the shapes that the config follows."""

    root: str  # "model." where the exporter kept the wrapper's name
    first: str  # first block
    shapes: dict[str, tuple[int, ...]]

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def shape(self, name: str, axes: int) -> tuple[int, ...]:
        """Returns the shape of a tensor that every such head has.

        Raises:
          ConvertError: it is missing or has another number of axes.
        """
        if name not in self.shapes:
            raise ConvertError(f"{name} is missing: this is no P-EAGLE or EAGLE-3 head")
        if len(self.shapes[name]) != axes:
            raise ConvertError(f"{name} is {self.shapes[name]}, expected {axes} axes")
        return self.shapes[name]

    @property
    def fc(self) -> str:
        """The projection of the features."""
        return f"{self.root}fc.weight"

    @property
    def embedding(self) -> str:
        """The drafter's own embedding table."""
        return f"{self.root}embed_tokens.weight"

    @property
    def layers(self) -> int:
        """Number of blocks that the tensors make."""
        found = (_LAYER.match(name.removeprefix(self.root)) for name in self.shapes)
        return 1 + max((int(m[1] or 0) for m in found if m), default=-1)


def _names(source: Source) -> _Names:
    root = "model." if "model.fc.weight" in source.tensors else ""
    midlayer = any(name.startswith(f"{root}midlayer.") for name in source.tensors)
    first = root + ("midlayer" if midlayer else "layers.0")
    return _Names(root, first, {name: t.shape for name, t in source.tensors.items()})


def drafter_plan(source: Source, target_layers: int | None) -> Plan:
    """Decides where each tensor of a drafter goes.

    Args:
      source: the drafter's folder.
      target_layers: decoder blocks of its target; needed where the config does not say at which
        boundaries the head reads it, and else checks them.

    Raises:
      ConvertError: the config is not supported, or it and the tensors do not fit together.
    """
    names = _names(source)
    try:
        config = _config(source, names, target_layers)
    except ConfigError as error:
        raise ConvertError(f"{source.config_path}: {error}") from error
    offsets = draft_to_target(source, config)
    given = {"d2t": offsets} if config.draft_vocab_size < config.vocab_size else {}
    used = frozenset(name for name in ("d2t", "t2d") if name in source.tensors)
    return Plan(config, dict(_slots(names, config)), given=given, used=used)


def _slots(names: _Names, config: DrafterConfig) -> dict[str, Slot]:
    root, hidden, features = names.root, config.hidden_size, config.feature_size
    slots = {
        names.fc: Slot("fc", (hidden, features)),
        f"{root}norm.weight": Slot("final_norm.weight", (hidden,)),
        f"{names.first}.hidden_norm.weight": Slot("layers.0.hidden_norm.weight", (hidden,)),
    }
    slots |= block_slots(names.first, "layers.0", config, 2 * hidden)
    for i in range(1, config.num_layers):
        slots |= block_slots(f"{root}layers.{i}", f"layers.{i}", config, hidden)
    if config.mask_token_id is not None:
        slots["mask_hidden"] = Slot("mask_hidden", (features,), any_shape=True)
    if config.own_embedding:
        slots[names.embedding] = Slot("embedding", (config.vocab_size, hidden))
    if config.own_lm_head:
        slots[_HEAD] = Slot("lm_head", (config.draft_vocab_size, hidden))
    if config.norm_before_fc:
        slots[f"{root}input_norm.weight"] = Slot("input_norm.weight", (features,))
    if config.fc_norm:
        for i in range(len(config.aux_boundaries)):
            part = (config.target_hidden_size,)
            slots[f"{root}fc_norm.{i}.weight"] = Slot(f"fc_norm.{i}.weight", part)
    return slots


def _config(source: Source, names: _Names, target_layers: int | None) -> DrafterConfig:
    """Reads the config of either layout and checks it against the tensors."""
    where = str(source.config_path)
    keys = Keys(_without_eagle_config(source.config, where), where)
    kind = keys.take("speculators_model_type")
    if kind is None:
        decoder_keys, trained = keys, keys.integer_or_none("num_depths")
    elif kind in ("peagle", "eagle3"):
        decoder_keys = keys.nested("transformer_layer_config")
        trained = _trained_depths(keys.nested("speculators_config"), kind)
        decoder_keys.ignore(("architectures", *_IGNORED))
    else:
        raise keys.error("speculators_model_type", kind, "peagle or eagle3")
    read_architectures(keys, _ARCHITECTURES)
    model_type = read_model_type(decoder_keys)
    decoder = _checked_blocks(read_decoder(decoder_keys, model_type), names, where)
    flags = _norm_flags(keys, names, default_before_residual=kind == "eagle3")
    keys.only("use_aux_hidden_state", True)
    mask = _mask_token(keys, names)
    keys.only("parallel_drafting", mask is not None)
    boundaries, convention = _boundaries(keys, target_layers)
    target_hidden = keys.integer("target_hidden_size", decoder["hidden_size"])
    _check_feature(keys, names, target_hidden, boundaries)
    draft_vocab = keys.integer("draft_vocab_size", decoder["vocab_size"])
    tied = keys.flag("tie_word_embeddings", False)
    _check_head(where, names, draft_vocab, decoder["vocab_size"], tied)
    keys.only("logit_scale", 1.0, 1)
    keys.ignore((*_IGNORED, *IGNORED))
    keys.done()
    decoder_keys.done()
    return DrafterConfig(
        **decoder,
        **flags,
        target_hidden_size=target_hidden,
        draft_vocab_size=draft_vocab,
        aux_boundaries=boundaries,
        aux_source_convention=convention,
        mask_token_id=mask,
        num_depths=None if mask is None else trained,
        own_embedding=names.embedding in names,
        own_lm_head=_HEAD in names,
    )


def _without_eagle_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the config with the keys of its `eagle_config`, if any, moved to the top."""
    top = dict(config)
    eagle = Keys(top.pop("eagle_config", None) or {}, f"{where}: eagle_config")
    for key in (_AUX_KEY, "use_aux_hidden_state", "norm_before_fc"):
        value = eagle.take(key)
        if value is not None and top.get(key, value) not in (value, None):
            raise ConvertError(f"{where}: {key} is {top[key]} and, in eagle_config, {value}")
        if value is not None:
            top[key] = value
    eagle.done()
    return top


def _trained_depths(keys: Keys, kind: str) -> int | None:
    """Reads `speculators_config`, whose first proposal method says how many tokens it drafts."""
    keys.only("algorithm", kind)
    keys.ignore(("default_proposal_method", "verifier"))
    methods = keys.take("proposal_methods")
    keys.done()
    if methods is None:
        return None
    if not isinstance(methods, list) or not methods:
        raise keys.error("proposal_methods", methods, "a list of one method or more")
    first = Keys(methods[0], f"{keys.where}: proposal_methods[0]")
    return first.integer_or_none("speculative_tokens")


def _norm_flags(keys: Keys, names: _Names, default_before_residual: bool) -> dict[str, Any]:
    """Reads the norm flags; a norm's tensor must be there exactly if its flag is set."""
    flags = {
        "norm_before_residual": keys.flag("norm_before_residual", default_before_residual),
        "norm_before_fc": keys.flag("norm_before_fc", False),
        "fc_norm": keys.flag("fc_norm", False),
        "norm_output": keys.flag("norm_output", False),
    }
    for flag, tensor in (("norm_before_fc", "input_norm."), ("fc_norm", "fc_norm.")):
        found = sorted(name for name in names.shapes if name.startswith(names.root + tensor))
        if found and not flags[flag]:
            raise ConvertError(
                f"{keys.where}: {flag} is false or absent, but the checkpoint has {listed(found)}"
            )
        if flags[flag] and not found:
            raise ConvertError(
                f"{keys.where}: {flag} is true, but the checkpoint has no {tensor}*weight"
            )
    return flags


def _mask_token(keys: Keys, names: _Names) -> int | None:
    """Reads the mask token, which is there exactly if `mask_hidden` is (P-EAGLE)."""
    nested = keys.nested("dflash_config")
    given = {key: keys.integer_or_none(key) for key in _MASK_KEYS}
    given["dflash_config.mask_token_id"] = nested.integer_or_none("mask_token_id")
    nested.done()
    found = {key: value for key, value in given.items() if value is not None}
    if len(set(found.values())) > 1:
        raise ConvertError(f"{keys.where}: the mask token differs: {found}")
    if found and "mask_hidden" not in names:
        raise ConvertError(
            f"{keys.where}: {listed(f'{k} = {v}' for k, v in found.items())}, but the checkpoint "
            "has no mask_hidden: a P-EAGLE head needs both, an EAGLE-3 head has neither"
        )
    if not found and "mask_hidden" in names:
        raise ConvertError(
            f"{keys.where}: the checkpoint has mask_hidden, but none of {', '.join(given)} says "
            "which token goes with it: add the id that the head was trained with as mask_token_id"
        )
    return next(iter(found.values()), None)


def _boundaries(keys: Keys, target_layers: int | None) -> tuple[tuple[int, ...], str]:
    """Reads the boundaries of the target that the head reads, and how the source counts them.

    The ids are boundaries as they are: "the input of layer id" in vLLM and speculators.
    """
    layers = target_layers
    ids = keys.integers(_AUX_KEY)
    if ids is not None:
        in_range = all(i >= 0 and (layers is None or i <= layers) for i in ids)
        if not ids or len(set(ids)) < len(ids) or not in_range:
            raise keys.error(_AUX_KEY, list(ids), f"distinct boundaries 0..{layers or 'L'}")
        return ids, "given as boundaries (the input of layer id: vLLM, speculators)"
    if layers is None or layers < 6:
        raise ConvertError(
            f"{keys.where}: {_AUX_KEY} is missing, and its default 2, L // 2, L - 3 needs a target "
            f"of L >= 6 layers, got {layers}: give the target's number of layers (--target-layers)"
        )
    return (2, layers // 2, layers - 3), f"not given: default of a target of {layers} layers"


def _check_feature(
    keys: Keys, names: _Names, target_hidden: int, boundaries: tuple[int, ...]
) -> None:
    """Checks that `fc` reads as many features as the boundaries make."""
    states = keys.integer_or_none("num_aux_hidden_states")
    if states is not None and states != len(boundaries):
        raise keys.error("num_aux_hidden_states", states, f"{len(boundaries)}, as {_AUX_KEY}")
    features = names.shape(names.fc, 2)[1]
    if features != len(boundaries) * target_hidden:
        raise ConvertError(
            f"{keys.where}: {names.fc} reads {features} features, but {len(boundaries)} boundaries "
            f"{boundaries} of target_hidden_size {target_hidden} make "
            f"{len(boundaries) * target_hidden}"
        )


def _check_head(where: str, names: _Names, size: int, vocab: int, tied: bool) -> None:
    """Checks that it is clear what makes the logits.

    `tie_word_embeddings` is often copied from the target: an `lm_head` of its own wins over it.
    """
    if _HEAD in names:
        rows = names.shape(_HEAD, 2)[0]
        if rows != size:
            raise ConvertError(f"{where}: draft_vocab_size is {size}, but {_HEAD} has {rows} rows")
    elif size != vocab:
        raise ConvertError(
            f"{where}: draft_vocab_size is {size} of {vocab}, but {_HEAD} is missing"
        )
    elif tied and names.embedding in names:
        raise ConvertError(
            f"{where}: {_HEAD} is missing and tie_word_embeddings is true: it is not said whether "
            "the drafter's own embedding or the target's head makes the logits"
        )


def _checked_blocks(decoder: dict[str, Any], names: _Names, where: str) -> dict[str, Any]:
    """Checks the blocks' fields against the tensors and adds the one that only those decide."""
    hidden, layers = decoder["hidden_size"], decoder["num_layers"]
    rows = names.shape(names.fc, 2)[0]
    if rows != hidden:
        raise ConvertError(f"{where}: hidden_size is {hidden}, but {names.fc} has {rows} rows")
    if layers != names.layers:
        raise ConvertError(
            f"{where}: num_hidden_layers is {layers}, but the tensors make {names.layers} layers"
        )
    norm = f"{names.first}.self_attn.q_norm.weight"
    if (norm in names) != decoder["qk_norm"]:
        model_type, has = ("qwen3", "has no") if decoder["qk_norm"] else ("llama", "has")
        raise ConvertError(f"{where}: model_type is {model_type}, but the checkpoint {has} {norm}")
    bias = f"{names.first}.self_attn.o_proj.bias" in names
    return decoder | {"attention_output_bias": decoder["attention_bias"] and bias}
