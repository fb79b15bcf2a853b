"""A drafter's config, checked against its tensors.

What a format leaves out, the tensors or the user must say; nothing is filled in that could be
wrong without a sign.
"""

import dataclasses
from typing import Any

from peagle_jax.config import DrafterConfig
from peagle_jax.convert.aux_ids import AuxConvention, read_boundaries
from peagle_jax.convert.decoder import (
    IGNORED,
    read_architectures,
    read_decoder,
    read_model_type,
)
from peagle_jax.convert.errors import ConvertError, listed
from peagle_jax.convert.head_formats import (
    ARCHITECTURES,
    AUX_KEY,
    Format,
    copied_target_layers,
    flat_config,
    head_format,
)
from peagle_jax.convert.head_tensors import HeadTensors
from peagle_jax.convert.keys import Keys
from peagle_jax.convert.source import Source

# How it was trained, how somebody else serves it, ids that only the target's text needs.
_IGNORED = (
    *("embed_requires_grad", "down_sample_ratio", "down_sample_ratio_min", "num_lookahead_tokens"),
    *("speculators_version", "has_no_defaults_at_init", "bos_token_id", "eos_token_id"),
    *("tie_word_embeddings", "model_max_length", "auto_map"),
)
_MASK_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")


@dataclasses.dataclass(frozen=True)
class Given:
    """What the user adds to what a head's files say.

    Attributes:
      target_layers: decoder blocks of the target; needed where the config does not say at which
        boundaries the head reads it, and else checks them.
      aux_convention: what the layer ids of the config count.
      mask_token_id: the mask token, where the config names none.
    """

    target_layers: int | None = None
    aux_convention: AuxConvention | None = None
    mask_token_id: int | None = None


def read_head_config(source: Source, tensors: HeadTensors, given: Given) -> DrafterConfig:
    """Reads the config of any format and checks it against the tensors.

    Args:
      source: the drafter's folder.
      tensors: its names and shapes.
      given: what the user adds.

    Raises:
      ConvertError: a key is missing, unknown or holds a value that is not supported, or config,
        tensors and user contradict each other.
      ConfigError: the values make no drafter.
    """
    where = str(source.config_path)
    written_by = head_format(source.config, tensors)
    keys = Keys(flat_config(source.config, written_by, tensors, where), where)
    kind = keys.take("speculators_model_type")
    if kind is None:
        decoder_keys, trained = keys, keys.integer_or_none("num_depths")
    elif kind in ("peagle", "eagle3"):
        decoder_keys = keys.nested("transformer_layer_config")
        trained = _trained_depths(keys.nested("speculators_config"), kind)
        decoder_keys.ignore(("architectures", *_IGNORED))
    else:
        raise keys.error("speculators_model_type", kind, "peagle or eagle3")
    read_architectures(keys, ARCHITECTURES)
    model_type = read_model_type(decoder_keys)
    decoder = read_decoder(decoder_keys, model_type)
    count = "num_draft_layers" if written_by == "verl-SpeCo" else "num_hidden_layers"
    decoder |= _checked_blocks(decoder, tensors, where, count)
    flags = _norm_flags(keys, tensors, written_by, default_before_residual=kind == "eagle3")
    keys.only("use_aux_hidden_state", True)
    mask = _mask_token(keys, tensors, given.mask_token_id, decoder["vocab_size"])
    keys.only("parallel_drafting", mask is not None)
    layers = _target_layers(source, tensors, written_by, given)
    boundaries, convention = read_boundaries(keys, written_by, layers, given.aux_convention)
    target_hidden = keys.integer("target_hidden_size", decoder["hidden_size"])
    _check_feature(keys, tensors, target_hidden, boundaries)
    draft_vocab = keys.integer("draft_vocab_size", decoder["vocab_size"])
    tied = keys.flag("tie_word_embeddings", False)
    _check_head(where, tensors, draft_vocab, decoder["vocab_size"], tied)
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
        own_embedding=tensors.embedding in tensors,
        own_lm_head=tensors.head in tensors,
    )


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


def _norm_flags(
    keys: Keys, tensors: HeadTensors, written_by: Format, default_before_residual: bool
) -> dict[str, Any]:
    """Reads the norm flags; a norm's tensor must be there exactly if its flag is set."""
    if written_by in ("SafeAILab", "AutoModel", "verl-SpeCo"):
        keys.only("norm_before_residual", False)  # their code does not read it
    flags = {
        "norm_before_residual": keys.flag("norm_before_residual", default_before_residual),
        "norm_before_fc": keys.flag("norm_before_fc", False),
        "fc_norm": keys.flag("fc_norm", False),
        "norm_output": keys.flag("norm_output", False),
    }
    for flag, tensor in (("norm_before_fc", "input_norm."), ("fc_norm", "fc_norm.")):
        found = sorted(name for name in tensors.shapes if name.startswith(tensors.root + tensor))
        if found and not flags[flag]:
            raise ConvertError(
                f"{keys.where}: {flag} is false or absent, but the checkpoint has {listed(found)}"
            )
        if flags[flag] and not found:
            raise ConvertError(
                f"{keys.where}: {flag} is true, but the checkpoint has no {tensor}*weight"
            )
    return flags


def _mask_token(keys: Keys, tensors: HeadTensors, given: int | None, vocab: int) -> int | None:
    """Reads the mask token, which is there exactly if `mask_hidden` is (P-EAGLE)."""
    nested = keys.nested("dflash_config")
    named = {key: keys.integer_or_none(key) for key in _MASK_KEYS}
    named["dflash_config.mask_token_id"] = nested.integer_or_none("mask_token_id")
    nested.done()
    found = {key: value for key, value in named.items() if value is not None}
    if given is not None:
        found["--mask-token-id"] = given
    said = listed(f"{key} = {value}" for key, value in found.items())
    if len(set(found.values())) > 1:
        raise ConvertError(f"{keys.where}: the mask token differs: {said}")
    if found and not tensors.parallel:
        raise ConvertError(
            f"{keys.where}: {said}, but the checkpoint has no mask_hidden: a P-EAGLE head needs "
            "both, an EAGLE-3 head has neither"
        )
    if not found and tensors.parallel:
        raise ConvertError(
            f"{keys.where}: the checkpoint has mask_hidden, but none of {', '.join(named)} says "
            "which token goes with it: give the id that the head was trained with "
            "(peagle-convert to-native --mask-token-id)"
        )
    token = next(iter(found.values()), None)
    if token is not None and not 0 <= token < vocab:
        raise ConvertError(f"{keys.where}: {said} is outside the embedding table of {vocab} rows")
    return token


def _target_layers(
    source: Source, tensors: HeadTensors, written_by: Format, given: Given
) -> int | None:
    copied = copied_target_layers(source.config, written_by, tensors)
    if given.target_layers is not None and copied not in (None, given.target_layers):
        raise ConvertError(
            f"{source.config_path}: num_hidden_layers is the target's in this format, {copied}, "
            f"but --target-layers is {given.target_layers}"
        )
    return given.target_layers or copied


def _check_feature(
    keys: Keys, tensors: HeadTensors, target_hidden: int, boundaries: tuple[int, ...]
) -> None:
    """Checks that `fc` reads as many features as the boundaries make."""
    states = keys.integer_or_none("num_aux_hidden_states")
    if states is not None and states != len(boundaries):
        raise keys.error("num_aux_hidden_states", states, f"{len(boundaries)}, as {AUX_KEY}")
    features = tensors.shape(tensors.fc, 2)[1]
    if features != len(boundaries) * target_hidden:
        raise ConvertError(
            f"{keys.where}: {tensors.fc} reads {features} features, but {len(boundaries)} "
            f"boundaries {boundaries} of target_hidden_size {target_hidden} make "
            f"{len(boundaries) * target_hidden}"
        )


def _check_head(where: str, tensors: HeadTensors, size: int, vocab: int, tied: bool) -> None:
    """Checks that it is clear what makes the logits.

    `tie_word_embeddings` is often copied from the target: an `lm_head` of its own wins over it.
    """
    head = tensors.head
    if head in tensors:
        rows = tensors.shape(head, 2)[0]
        if rows != size:
            raise ConvertError(f"{where}: draft_vocab_size is {size}, but {head} has {rows} rows")
    elif size != vocab:
        raise ConvertError(f"{where}: draft_vocab_size is {size} of {vocab}, but {head} is missing")
    elif tied and tensors.embedding in tensors:
        raise ConvertError(
            f"{where}: {head} is missing and tie_word_embeddings is true: it is not said whether "
            "the drafter's own embedding or the target's head makes the logits"
        )


def _checked_blocks(
    decoder: dict[str, Any], tensors: HeadTensors, where: str, count: str
) -> dict[str, Any]:
    """Checks the blocks' fields against the tensors and returns those that only these decide."""
    hidden, layers = decoder["hidden_size"], decoder["num_layers"]
    rows = tensors.shape(tensors.fc, 2)[0]
    if rows != hidden:
        raise ConvertError(f"{where}: hidden_size is {hidden}, but {tensors.fc} has {rows} rows")
    if layers != tensors.layers:
        raise ConvertError(
            f"{where}: {count} is {layers}, but the tensors make {tensors.layers} layers"
        )
    norm = tensors.in_first("self_attn.q_norm.weight")
    if (norm in tensors) != decoder["qk_norm"]:
        model_type, has = ("qwen3", "has no") if decoder["qk_norm"] else ("llama", "has")
        raise ConvertError(f"{where}: model_type is {model_type}, but the checkpoint {has} {norm}")
    bias = tensors.in_first("self_attn.o_proj.bias") in tensors
    return {"attention_output_bias": decoder["attention_bias"] and bias}
