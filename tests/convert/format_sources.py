"""The head that PEAGLE describes as other programs write it.

The configs are what each program's own code writes; `peagle_jax.convert.head_formats` names the
files.
"""

from convert_sources import PEAGLE, Config, Tensors

_SHARED_KEYS = ("architectures", "draft_vocab_size", "ptd_token_id", "num_depths")
_BARE: Config = {
    key: value
    for key, value in PEAGLE.items()
    if key not in (*_SHARED_KEYS, "eagle_aux_hidden_state_layer_ids")
}
# One block, no embedding, no mask; SafeAILab's training config has no rope_theta either.
SAFEAILAB: Config = {
    key: value
    for key, value in _BARE.items()
    if key not in ("rope_theta", "rope_scaling", "head_dim", "attention_bias", "mlp_bias")
} | {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "transformers_version": "4.28.1",
    "use_cache": True,
    "draft_vocab_size": 10,
}
SPECFORGE: Config = {key: value for key, value in _BARE.items() if key != "mlp_bias"} | {
    "architectures": ["PEagleDraftModel"],
    "attention_dropout": 0.0,
    "eos_token_id": 2,
    "max_window_layers": 36,
    "sliding_window": None,
    "use_sliding_window": False,
    "norm_before_residual": False,
    "draft_vocab_size": 10,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
}
# AutoModel: transformers' own config of a Qwen3 target, with the drafter's keys.
AUTOMODEL: Config = {
    "architectures": ["LlamaEagle3DraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_implementation": "eager",
    "bos_token_id": None,
    "down_sample_ratio": 0.7,
    "down_sample_ratio_min": 0.2,
    "draft_vocab_size": 10,
    "dtype": "float32",
    "eos_token_id": 2,
    "fc_norm": False,
    "head_dim": 4,
    "hidden_act": "silu",
    "hidden_size": 16,
    "initializer_range": 0.02,
    "intermediate_size": 12,
    "layer_types": ["full_attention", "full_attention"],
    "mask_token_id": 39,
    "max_position_embeddings": 64,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "norm_output": False,
    "num_attention_heads": 4,
    "num_depths": 5,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "parallel_drafting": True,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    "sliding_window": None,
    "target_hidden_size": 16,
    "tie_word_embeddings": False,
    "transformers_version": "5.24.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 40,
}
# verl-SpeCo: likewise; its config class is Llama's, and the target's eight layers stay in
# `layer_types`.
VERL: Config = {
    key: value for key, value in AUTOMODEL.items() if key not in ("attn_implementation",)
} | {
    "architectures": ["LlamaForCausalLMPeagle"],
    "layer_types": ["full_attention"] * 8,
    "mlp_bias": False,
    "model_type": "llama_peagle",
    "num_aux_hidden_states": 3,
    "num_draft_layers": 2,
    "pretraining_tp": 1,
}


def wrapped(tensors: Tensors) -> Tensors:
    """Returns a head's tensors under AutoModel's names."""
    bare = ("lm_head.weight", "mask_hidden", "d2t", "t2d")
    return {n if n in bare else f"model.{n}": value for n, value in tensors.items()}
