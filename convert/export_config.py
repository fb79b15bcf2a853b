"""Native configs as other software spells them: the inverse of `decoder`, `drafters`, `targets`.

Targets and heads in the vLLM layout get the keys that the Hub's checkpoints have, those of
transformers 4.x, which 5.x reads too. Heads in the speculators layout get the keys that the package
writes itself, those of transformers 5.x.
"""

from typing import Any, Literal

from peagle_jax.config import DecoderConfig, DrafterConfig, MoEConfig, RopeConfig, TargetConfig
from peagle_jax.convert.errors import ConvertError
from peagle_jax.convert.rope import yarn_attention_factor

Json = dict[str, Any]
DrafterFormat = Literal["vllm", "speculators"]

SPECULATORS_VERSION = "0.9.0"
_TARGETS = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
# What a GPT-OSS checkpoint with packed experts says about its other weights.
_MXFP4: Json = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
_DEFAULT_SWIGLU_ALPHA = 1.702


def target_json(config: TargetConfig, dtype: str) -> Json:
    """Returns the config.json of a target.

    Args:
      config: the architecture.
      dtype: of the floating tensors.

    Raises:
      ConvertError: the family is unknown, or its windows cannot be said in its config.
    """
    family = config.family
    if family not in _TARGETS:
        raise ConvertError(f"family {family!r} has no Hugging Face config: {', '.join(_TARGETS)}")
    values = {
        "architectures": [_TARGETS[family]],
        "model_type": family,
        **_decoder_keys(config, family),
        **_rope_4(config.rope),
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": _ids(config.eos_token_ids),
        "torch_dtype": dtype,
    }
    if config.moe is not None:
        values |= _moe_keys(config.moe, family)
    if family == "gpt_oss":
        values["initial_context_length"] = config.rope.original_max_position_embeddings
    return values


def generation_json(config: TargetConfig) -> Json:
    """Returns the generation_config.json of a target: tokens that begin and end a text."""
    return {"bos_token_id": config.bos_token_id, "eos_token_id": _ids(config.eos_token_ids)}


def vllm_json(config: DrafterConfig, dtype: str) -> Json:
    """Returns the config.json of a head in the layout of the AWS heads, which vLLM serves.

    Raises:
      ConvertError: its windows cannot be said in the config.
    """
    model_type = _drafter_type(config)
    return {
        "architectures": [_vllm_class(config)],
        "model_type": model_type,
        **_decoder_keys(config, model_type),
        **_rope_4(config.rope),
        **_head_keys(config),
        **({} if config.mask_token_id is None else {"ptd_token_id": config.mask_token_id}),
        **({} if config.num_depths is None else {"num_depths": config.num_depths}),
        # vLLM takes the key's presence for a size, so it may not be null.
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def speculators_json(config: DrafterConfig, dtype: str, verifier: Json) -> Json:
    """Returns the config.json of a head in the layout of the speculators package.

    Args:
      config: the architecture.
      dtype: of the floating tensors.
      verifier: what the package is told about the target: `name_or_path`, `architectures`.

    Raises:
      ConvertError: its windows cannot be said in the config.
    """
    parallel = config.mask_token_id is not None
    kind, model_type = ("peagle" if parallel else "eagle3"), _drafter_type(config)
    depths = {} if config.num_depths is None else {"speculative_tokens": config.num_depths}
    method = {"proposal_type": "greedy", "accept_tolerance": 0.0, "verifier_accept_k": 1, **depths}
    wide = config.hidden_size != config.target_hidden_size
    return {
        "architectures": ["PEagleDraftModel" if parallel else "Eagle3DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
        **_head_keys(config),
        **({"mask_token_id": config.mask_token_id} if parallel else {}),
        "embed_requires_grad": parallel,
        "target_hidden_size": config.target_hidden_size if wide else None,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "transformer_layer_config": {
            "model_type": model_type,
            **_decoder_keys(config, model_type),
            "rope_parameters": {
                "rope_theta": config.rope.theta,
                "rope_type": config.rope.kind,
                **_scaling(config.rope),
            },
            "tie_word_embeddings": False,
        },
    }


def _drafter_type(config: DrafterConfig) -> str:
    return "qwen3" if config.qk_norm else "llama"


def _vllm_class(config: DrafterConfig) -> str:
    """Returns vLLM's class of a head; the Llama one has no q/k norms."""
    if not config.qk_norm:
        return "LlamaForCausalLMEagle3"
    return "Eagle3Qwen3ForCausalLM" if config.mask_token_id is None else "PeagleQwen3ForCausalLM"


def _head_keys(config: DrafterConfig) -> Json:
    """Returns what both layouts of heads spell alike at the top of their configs."""
    return {
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_boundaries),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }


def _decoder_keys(config: DecoderConfig, model_type: str) -> Json:
    """Returns the keys of the decoder blocks, without the rotary embedding and the experts."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": config.attention_bias,
        **({"mlp_bias": config.mlp_bias} if model_type == "llama" else {}),
        **_window_keys(config, model_type),
    }


def _rope_4(rope: RopeConfig) -> Json:
    scaling = {"rope_type": rope.kind, **_scaling(rope)} if rope.kind != "default" else None
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _scaling(rope: RopeConfig) -> Json:
    """Returns the keys of a scaled rotary embedding but its kind."""
    if rope.kind == "default":
        return {}
    keys: Json = {"factor": rope.factor}
    if rope.kind != "linear":
        keys["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.kind == "llama3":
        keys["low_freq_factor"] = rope.low_freq_factor
        keys["high_freq_factor"] = rope.high_freq_factor
    if rope.kind == "yarn":
        keys["beta_fast"], keys["beta_slow"] = rope.beta_fast, rope.beta_slow
        keys["truncate"] = rope.truncate
        # Not every reader knows the key, and all compute the same default.
        if rope.attention_factor != yarn_attention_factor(rope.factor):
            keys["attention_factor"] = rope.attention_factor
    return keys


def _window_keys(config: DecoderConfig, model_type: str) -> Json:
    """Returns the keys that say which layers slide.

    Raises:
      ConvertError: the layers' windows are of several sizes, for which there are no keys.
    """
    windows = sorted({w for w in config.sliding_windows if w is not None})
    if len(windows) > 1:
        raise ConvertError(
            f"the layers have sliding windows of {windows} tokens, but a Hugging Face config holds "
            "one size for all layers that slide"
        )
    if not windows and model_type == "llama":
        return {}
    keys: Json = {"sliding_window": windows[0] if windows else None}
    if model_type in ("qwen3", "qwen3_moe"):
        slides = [w is not None for w in config.sliding_windows]
        keys["use_sliding_window"] = bool(windows)
        # What transformers without layer_types goes by: the layers from this one on slide.
        keys["max_window_layers"] = slides.index(True) if windows else config.num_layers
    if (windows and model_type != "qwen3_moe") or model_type == "gpt_oss":
        names = {False: "full_attention", True: "sliding_attention"}
        keys["layer_types"] = [names[w is not None] for w in config.sliding_windows]
    return keys


def _moe_keys(moe: MoEConfig, family: str) -> Json:
    if family == "gpt_oss":
        return {
            "num_local_experts": moe.num_experts,
            "num_experts_per_tok": moe.num_experts_per_token,
            "experts_per_token": moe.num_experts_per_token,
            "swiglu_limit": moe.swiglu_limit,
            # transformers 4.x has the number in its code.
            **(
                {"swiglu_alpha": moe.swiglu_alpha}
                if moe.swiglu_alpha != _DEFAULT_SWIGLU_ALPHA
                else {}
            ),
            **({"quantization_config": _MXFP4} if moe.weights == "mxfp4" else {}),
        }
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "moe_intermediate_size": moe.intermediate_size,
        "norm_topk_prob": moe.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, sparse in enumerate(moe.layers) if not sparse],
    }


def _ids(ids: tuple[int, ...]) -> int | list[int] | None:
    """Returns token ids as configs hold them: alone, as a list, or null."""
    return list(ids) if len(ids) > 1 else ids[0] if ids else None
