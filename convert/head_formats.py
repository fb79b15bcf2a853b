"""Which program wrote a drafter's checkpoint, and what its config therefore means.

    speculators   the decoder's config nested in `transformer_layer_config`
    vLLM          one flat Llama or Qwen3 config: AWS's heads, ModelOpt's, SpecForge's EAGLE-3
    SafeAILab     EAGLE-3 as its authors train it: `LlamaForCausalLM`, first block `midlayer`
    SpecForge     P-EAGLE: `PEagleDraftModel`; the mask token is in no file
    AutoModel     NeMo: `LlamaEagle3DraftModel`, a copy of the target's config with its own keys
    verl-SpeCo    `llama_peagle`, likewise a copy of the target's config

Every format but speculators is rewritten as the flat one here. Facts are those of the writers'
own code: SafeAILab/EAGLE `eagle/model/cnets.py` and `eagle/traineagle3`, sgl-project/SpecForge
`modeling/draft/peagle.py` and `algorithms/model_providers.py`, NVIDIA-NeMo/Automodel
`speculative/eagle/draft_llama.py` and `recipes/llm/train_eagle3.py`, verl-project/verl-SpeCo
`models/peagle` and `backends/peagle_trainer_backend.py`.
"""

from typing import Any, Literal

from peagle_jax.convert.decoder import read_model_type
from peagle_jax.convert.errors import ConvertError
from peagle_jax.convert.head_tensors import HeadTensors
from peagle_jax.convert.keys import Keys

Format = Literal["speculators", "vLLM", "SafeAILab", "SpecForge", "AutoModel", "verl-SpeCo"]
Config = dict[str, Any]

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
ARCHITECTURES = (
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"),
    *("PEagleDraftModel", "PeagleLlamaForCausalLM", "PeagleQwen3ForCausalLM", "PEagleSpeculator"),
    *("Eagle3Speculator", "Eagle3DraftModel", "LlamaEagle3DraftModel", "Qwen3ForCausalLMEagle3"),
    *("LlamaForCausalLMPeagle", "Eagle3Qwen3ForCausalLM"),
)
# AutoModel and verl-SpeCo start from the target's config, but their blocks are Llama's: dense,
# without windows and without q/k norms.
_COPIED_FROM_TARGET = (
    *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
    *("output_router_logits", "router_aux_loss_coef"),
)


def head_format(config: Config, tensors: HeadTensors) -> Format:
    """Returns the format of a drafter's folder; "vLLM" where no mark says another."""
    names = config.get("architectures")
    if config.get("speculators_model_type") is not None:
        return "speculators"
    if config.get("model_type") == "llama_peagle" or names == ["LlamaForCausalLMPeagle"]:
        return "verl-SpeCo"
    if names == ["LlamaEagle3DraftModel"]:
        return "AutoModel"
    if names == ["PEagleDraftModel"]:
        return "SpecForge"
    midlayer = tensors.first == "midlayer"
    if names == ["LlamaForCausalLM"] and midlayer and not tensors.parallel:
        return "SafeAILab"
    return "vLLM"


def flat_config(config: Config, written_by: Format, tensors: HeadTensors, where: str) -> Config:
    """Returns the config in the flat spelling, without what its writer's code does not read.

    Args:
      config: config.json.
      written_by: its format.
      tensors: the head's.
      where: file, for messages.

    Raises:
      ConvertError: a key of the format is missing or holds a value that is not supported.
    """
    flat = _without_eagle_config(config, where)
    if written_by == "SafeAILab":
        # Training always uses the base 10000, and inference does where the config has none, with
        # or without rope_scaling (`_init_rope` of both cnets.py).
        spelled = any(flat.get(key) is not None for key in ("rope_theta", "rope_parameters"))
        return flat if spelled else flat | {"rope_theta": 10000.0}
    if written_by not in ("AutoModel", "verl-SpeCo"):
        return flat
    keys = Keys(flat, where)
    if written_by == "verl-SpeCo":
        read_model_type(keys, ("llama_peagle",))
        # `num_hidden_layers` is not read there, and may be the target's.
        layers = keys.integer("num_draft_layers")
        del flat["num_draft_layers"]
    else:
        read_model_type(keys, ("llama", "qwen3", "qwen3_moe"))
        # EAGLE-3 heads keep the target's number and always have one block.
        layers = keys.integer("num_hidden_layers") if tensors.parallel else 1
    flat = {key: value for key, value in flat.items() if key not in _COPIED_FROM_TARGET}
    return flat | {"model_type": "llama", "num_hidden_layers": layers}


def copied_target_layers(config: Config, written_by: Format, tensors: HeadTensors) -> int | None:
    """Returns the target's number of blocks where the config still says it, else None."""
    layers = config.get("num_hidden_layers")
    copied = written_by == "AutoModel" and not tensors.parallel
    return layers if copied and isinstance(layers, int) and layers > 1 else None


def _without_eagle_config(config: Config, where: str) -> Config:
    """Returns the config with the keys of its `eagle_config`, if any, moved to the top."""
    top = dict(config)
    eagle = Keys(top.pop("eagle_config", None) or {}, f"{where}: eagle_config")
    for key in (AUX_KEY, "use_aux_hidden_state", "norm_before_fc"):
        value = eagle.take(key)
        if value is not None and top.get(key, value) not in (value, None):
            raise ConvertError(f"{where}: {key} is {top[key]} and, in eagle_config, {value}")
        if value is not None:
            top[key] = value
    # ModelOpt: anything else would be another architecture.
    eagle.only("use_input_layernorm_in_first_layer", True)
    eagle.only("use_last_layernorm", True)
    eagle.only("use_mtp_layernorm", False)
    eagle.only("next_layer_regular", True)
    eagle.only("parallel_draft_step", 1)
    eagle.ignore(["parallel_draft_heads_num_layers"])
    eagle.done()
    return top
