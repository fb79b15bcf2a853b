"""What target and drafter configs have in common: sizes, flags, windows.

Keys are those of transformers' Llama, Qwen3, Qwen3-MoE and GPT-OSS configs, in the spelling of
4.x (`rope_theta`, `rope_scaling`, `torch_dtype`) and of 5.x (`rope_parameters`, `dtype`).
"""

from typing import Any

from peagle_jax.convert.errors import ConvertError
from peagle_jax.convert.experts import read_experts
from peagle_jax.convert.keys import Keys
from peagle_jax.convert.rope import read_rope

# Families whose blocks have a dense MLP, and those with mixtures of experts.
DENSE_TYPES = ("llama", "qwen3")
SPARSE_TYPES = ("qwen3_moe", "gpt_oss")

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


def read_model_type(keys: Keys, allowed: tuple[str, ...] = DENSE_TYPES) -> str:
    """Takes `model_type`.

    Raises:
      ConvertError: it is no family in `allowed`.
    """
    model_type = keys.take("model_type")
    if model_type not in allowed:
        raise keys.error("model_type", model_type, " or ".join(allowed))
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
      keys: a config of that family.
      model_type: one of `DENSE_TYPES` and `SPARSE_TYPES`.

    Returns:
      the fields of `DecoderConfig` but `attention_output_bias`.

    Raises:
      ConvertError: a key is missing or holds a value that is not supported.
      ConfigError: a value makes no such decoder.
    """
    llama, gpt_oss = model_type == "llama", model_type == "gpt_oss"
    hidden, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    layers = keys.integer("num_hidden_layers")
    inner = keys.integer("intermediate_size")
    max_position = keys.integer("max_position_embeddings")
    keys.only("hidden_act", "silu")
    keys.only("is_encoder_decoder", False)
    keys.only("add_cross_attention", False)
    keys.only("cross_attention_hidden_size")
    keys.only("pruned_heads", {})
    keys.only("quantization_config")
    keys.only("rope_interleaved", False)
    keys.ignore(IGNORED)
    mlp_bias = keys.flag("mlp_bias", False)
    if mlp_bias and not llama:
        raise keys.error("mlp_bias", mlp_bias, f"false ({model_type} has none)")
    if gpt_oss and keys.peek("rope_scaling") is None and keys.peek("rope_parameters") is None:
        raise ConvertError(
            f"{keys.where}: rope_scaling is missing; GPT-OSS has yarn, whose values are no default "
            "here, because wrong ones still load: add those that the model was trained with"
        )
    return {
        "vocab_size": keys.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_layers": layers,
        "num_heads": heads,
        # transformers would fill in numbers of its own for the others: no guess either way.
        "num_kv_heads": keys.integer("num_key_value_heads", heads if llama else None),
        "head_dim": keys.integer("head_dim", _head_dim(keys, hidden, heads) if llama else None),
        "rms_norm_eps": keys.number("rms_norm_eps"),
        "rope": read_rope(keys, max_position),
        "max_position_embeddings": max_position,
        "attention_bias": keys.flag("attention_bias", gpt_oss),
        "mlp_bias": mlp_bias,
        "qk_norm": model_type in ("qwen3", "qwen3_moe"),
        "sliding_windows": read_windows(keys, model_type, layers),
        "attention_sinks": gpt_oss,
        "norm_weight_in_float32": gpt_oss,
        "moe": read_experts(keys, model_type, layers, inner),
    }


def _head_dim(keys: Keys, hidden: int, heads: int) -> int | None:
    """Returns the head size that follows from the hidden size, None if it does not divide."""
    if heads < 1:
        raise keys.error("num_attention_heads", heads, "a positive integer")
    return hidden // heads if hidden % heads == 0 else None


def read_windows(keys: Keys, model_type: str, layers: int) -> tuple[int | None, ...]:
    """Takes the sliding window keys and returns each layer's window.

    A window of W is W keys with the row's own, in transformers as here. Qwen3 slides only where
    `use_sliding_window` is true: Qwen3-MoE then in every layer, the dense one by `layer_types`, or
    without them from layer `max_window_layers` on. GPT-OSS slides by `layer_types`, or without
    them in the even layers. A Llama config slides by `layer_types` (drafters of speculators do).

    Raises:
      ConvertError: the keys are incomplete or contradict each other.
    """
    window = keys.integer_or_none("sliding_window")
    slides = keys.flag("use_sliding_window", model_type in ("llama", "gpt_oss"))
    first = keys.integer_or_none("max_window_layers")
    types = keys.take("layer_types")
    if types is None and model_type == "llama" and window is not None:
        raise keys.error("sliding_window", window, "null, or a window with layer_types")
    if types is None and model_type == "qwen3" and slides and first is None:
        raise ConvertError(
            f"{keys.where}: use_sliding_window is true, but neither layer_types nor "
            "max_window_layers says in which layers"
        )
    sliding = {
        "llama": lambda i: False,
        "qwen3": lambda i: slides and i >= (first or 0),
        "qwen3_moe": lambda i: slides,
        "gpt_oss": lambda i: i % 2 == 0,
    }[model_type]
    known = ("full_attention", "sliding_attention")
    implied = [known[sliding(i)] for i in range(layers)]
    if types is None:
        types = implied
    elif model_type == "qwen3_moe" and types != implied:
        raise keys.error("layer_types", types, f"{implied[0]} throughout, as use_sliding_window")
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
