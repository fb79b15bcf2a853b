"""What target and drafter configs have in common: sizes, rotary embedding, windows.

Keys are those of transformers' Llama and Qwen3 configs, in the spelling of 4.x (`rope_theta`,
`rope_scaling`, `torch_dtype`) and of 5.x (`rope_parameters`, `dtype`).
"""

from typing import Any

from peagle_jax.config import RopeConfig
from peagle_jax.convert.errors import ConvertError
from peagle_jax.convert.keys import Keys

MODEL_TYPES = ("llama", "qwen3")

# Whatever they hold, the logits stay the same: bookkeeping, training, dtype on disk (the tensors
# say it themselves), settings of sampling and of output that only old configs list.
IGNORED = (
    *("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype"),
    *("transformers.js_config", "is_llama_config", "unsloth_version", "unsloth_fixed"),
    *(
        "use_cache",
        "initializer_range",
        "attention_dropout",
        "pretraining_tp",
        "gradient_checkpointing",
    ),
    *("_attn_implementation", "_attn_implementation_autoset", "attn_implementation"),
    *("pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id", "tokenizer_class", "prefix"),
    *("return_dict", "output_attentions", "output_hidden_states", "output_scores"),
    *("return_dict_in_generate", "torchscript", "use_bfloat16", "tf_legacy_loss"),
    *("chunk_size_feed_forward", "is_decoder", "finetuning_task", "id2label", "label2id"),
    *("problem_type", "task_specific_params", "tie_encoder_decoder", "decoder_start_token_id"),
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
    *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
    *("diversity_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("bad_words_ids", "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id"),
    *("remove_invalid_values", "exponential_decay_length_penalty"),
    *("suppress_tokens", "begin_suppress_tokens"),
)


def read_model_type(keys: Keys) -> str:
    """Takes `model_type`.

    Raises:
      ConvertError: it is no family that this release converts.
    """
    model_type = keys.take("model_type")
    if model_type not in MODEL_TYPES:
        raise keys.error("model_type", model_type, " or ".join(MODEL_TYPES))
    return str(model_type)


def read_architectures(keys: Keys, allowed: tuple[str, ...]) -> None:
    """Takes `architectures`, which may be absent.

    Raises:
      ConvertError: it names a class that is not in `allowed`.
    """
    value = keys.take("architectures")
    if value is None:
        return
    if not isinstance(value, list) or not all(name in allowed for name in value):
        raise keys.error("architectures", value, " or ".join(allowed))


def read_decoder(keys: Keys, model_type: str) -> dict[str, Any]:
    """Takes the keys of the decoder blocks, and those without influence.

    Args:
      keys: a Llama or Qwen3 config.
      model_type: "llama" or "qwen3".

    Returns:
      the fields of `DecoderConfig` but `attention_output_bias`.

    Raises:
      ConvertError: a key is missing or holds a value that is not supported.
    """
    qwen3 = model_type == "qwen3"
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    layers = keys.integer("num_hidden_layers")
    keys.only("hidden_act", "silu")
    keys.only("is_encoder_decoder", False)
    keys.only("add_cross_attention", False)
    keys.only("cross_attention_hidden_size")
    keys.only("pruned_heads", {})
    keys.only("quantization_config")
    keys.only("rope_interleaved", False)
    keys.ignore(IGNORED)
    mlp_bias = keys.flag("mlp_bias", False)
    if qwen3 and mlp_bias:
        raise keys.error("mlp_bias", mlp_bias, "false (Qwen3 has none)")
    return {
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        # transformers' Qwen3Config would fill in 32 heads of size 128: no guess either way.
        "num_kv_heads": keys.integer("num_key_value_heads", None if qwen3 else heads),
        "head_dim": keys.integer("head_dim", None if qwen3 else _head_dim(keys, hidden, heads)),
        "rms_norm_eps": keys.number("rms_norm_eps"),
        "rope": read_rope(keys),
        "max_position_embeddings": keys.integer("max_position_embeddings"),
        "attention_bias": keys.flag("attention_bias", False),
        "mlp_bias": mlp_bias,
        "qk_norm": qwen3,
        "sliding_windows": read_windows(keys, model_type, layers),
    }


def _head_dim(keys: Keys, hidden: int, heads: int) -> int | None:
    """Returns the head size that follows from the hidden size, None if it does not divide."""
    if heads < 1:
        raise keys.error("num_attention_heads", heads, "a positive integer")
    return hidden // heads if hidden % heads == 0 else None


def read_rope(keys: Keys) -> RopeConfig:
    """Takes `rope_theta` and `rope_scaling` (4.x) or `rope_parameters` (5.x).

    Raises:
      ConvertError: the base is missing, the kind is not supported, or the spellings disagree.
      ConfigError: the values make no rotary embedding.
    """
    thetas = {keys.number("rope_theta")} if (top := keys.peek("rope_theta")) is not None else set()
    found = []
    for name in ("rope_scaling", "rope_parameters"):
        if keys.peek(name) is None:
            keys.ignore([name])
            continue
        nested = keys.nested(name)
        if nested.peek("rope_theta") is not None:
            thetas.add(nested.number("rope_theta"))
        nested.ignore(["rope_theta"])
        found.append(_read_scaling(nested))
    if not thetas:
        raise ConvertError(
            f"{keys.where}: rope_theta is missing (at the top, or in rope_parameters); there is no "
            "default, because a wrong base still loads: add the one that the model was trained with"
        )
    if len(thetas) > 1 or any(scaling != found[0] for scaling in found):
        raise ConvertError(
            f"{keys.where}: rope_theta {top}, rope_scaling and rope_parameters disagree"
        )
    return RopeConfig(theta=thetas.pop(), **(found[0] if found else {}))


def _read_scaling(keys: Keys) -> dict[str, Any]:
    """Returns the fields of `RopeConfig` but `theta` from a scaling object."""
    kinds = {kind for name in ("rope_type", "type") if (kind := keys.take(name)) is not None}
    if not kinds <= {"default", "llama3"} or len(kinds) > 1:
        raise keys.error("rope_type", " and ".join(sorted(map(str, kinds))), "default or llama3")
    keys.only("partial_rotary_factor", 1.0, 1)
    scaling: dict[str, Any] = {}
    if kinds == {"llama3"}:
        scaling = {
            "kind": "llama3",
            "factor": keys.number("factor"),
            "low_freq_factor": keys.number("low_freq_factor"),
            "high_freq_factor": keys.number("high_freq_factor"),
            "original_max_position_embeddings": keys.integer("original_max_position_embeddings"),
        }
    keys.done()
    return scaling


def read_windows(keys: Keys, model_type: str, layers: int) -> tuple[int | None, ...]:
    """Takes the sliding window keys and returns each layer's window.

    A window of W is W keys with the row's own, in transformers as here. Qwen3 slides only where
    `use_sliding_window` is true, by `layer_types`, or without them from layer
    `max_window_layers` on. A Llama config slides by `layer_types` (drafters of speculators do).

    Raises:
      ConvertError: the keys are incomplete or contradict each other.
    """
    qwen3 = model_type == "qwen3"
    window = keys.integer_or_none("sliding_window")
    slides = keys.flag("use_sliding_window", not qwen3)
    first = keys.integer_or_none("max_window_layers")
    types = keys.take("layer_types")
    if types is None and qwen3 and slides:
        if first is None:
            raise ConvertError(
                f"{keys.where}: use_sliding_window is true, but neither layer_types nor "
                "max_window_layers says in which layers"
            )
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if types is None:
        if window is not None and not qwen3:
            raise keys.error("sliding_window", window, "null, or a window with layer_types")
        types = ["full_attention"] * layers
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or not all(kind in known for kind in types):
        raise keys.error("layer_types", types, f"a list of {' and '.join(known)}")
    if len(types) != layers:
        raise keys.error("layer_types", types, f"one entry for each of the {layers} layers")
    if "sliding_attention" in types and (window is None or not slides):
        raise ConvertError(
            f"{keys.where}: layer_types has sliding_attention, but sliding_window is {window} and "
            f"use_sliding_window is {slides}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)
