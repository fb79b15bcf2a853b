"""Mixtures of experts in the configs of Qwen3-MoE and GPT-OSS."""

from peagle_jax.config import MoEConfig
from peagle_jax.convert.errors import ConvertError
from peagle_jax.convert.keys import Keys

# Of training, and of what transformers returns beside the logits.
_IGNORED = ("router_aux_loss_coef", "output_router_logits")


def read_experts(
    keys: Keys, model_type: str, layers: int, intermediate_size: int
) -> MoEConfig | None:
    """Takes the keys of the mixture of experts, None for a family or a model without one.

    Args:
      keys: the config.
      model_type: its family.
      layers: decoder blocks.
      intermediate_size: the config's; of one expert in GPT-OSS, of a dense layer in the others.

    Returns:
      the mixture with plain weights.

    Raises:
      ConvertError: a key is missing or holds a value that is not supported.
      ConfigError: the values make no mixture.
    """
    if model_type == "gpt_oss":
        return _read_gpt_oss(keys, layers, intermediate_size)
    return _read_qwen3(keys, layers) if model_type == "qwen3_moe" else None


def _read_qwen3(keys: Keys, layers: int) -> MoEConfig | None:
    keys.ignore(_IGNORED)
    keys.only("use_qk_norm", True)
    keys.only("qkv_bias", False)
    keys.only("shared_expert_intermediate_size", 0)
    experts = _same_integer(keys, "num_experts", "num_local_experts")
    chosen = keys.integer("num_experts_per_tok")
    inner = keys.integer("moe_intermediate_size")
    norm_topk_prob = keys.flag("norm_topk_prob")
    step = keys.integer("decoder_sparse_step", 1)
    if step < 1:
        raise keys.error("decoder_sparse_step", step, "a positive integer")
    dense = keys.integers("mlp_only_layers") or ()
    if not all(0 <= i < layers for i in dense):
        raise keys.error("mlp_only_layers", list(dense), f"a list of layers 0..{layers - 1}")
    sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    if not any(sparse):
        return None
    return MoEConfig(
        num_experts=experts,
        num_experts_per_token=chosen,
        intermediate_size=inner,
        layers=sparse,
        router="softmax_top_k",
        norm_topk_prob=norm_topk_prob,
        router_bias=False,
        expert_bias=False,
    )


def _read_gpt_oss(keys: Keys, layers: int, intermediate_size: int) -> MoEConfig:
    keys.ignore(_IGNORED)
    return gpt_oss_experts(
        experts=_same_integer(keys, "num_local_experts", "num_experts"),
        chosen=_same_integer(keys, "num_experts_per_tok", "experts_per_token"),
        intermediate_size=intermediate_size,
        layers=layers,
        limit=keys.number("swiglu_limit"),
        # Published configs do not have it: transformers before 5 knew one value.
        alpha=keys.number("swiglu_alpha", 1.702),
    )


def gpt_oss_experts(
    *, experts: int, chosen: int, intermediate_size: int, layers: int, limit: float, alpha: float
) -> MoEConfig:
    """Returns the mixture of a GPT-OSS, with plain weights.

    Raises:
      ConfigError: the values make no mixture.
    """
    return MoEConfig(
        num_experts=experts,
        num_experts_per_token=chosen,
        intermediate_size=intermediate_size,
        layers=(True,) * layers,
        router="top_k_softmax",
        norm_topk_prob=False,
        router_bias=True,
        expert_bias=True,
        swiglu_limit=limit,
        swiglu_alpha=alpha,
    )


def _same_integer(keys: Keys, name: str, alias: str) -> int:
    """Takes an integer that two keys may hold, at least one of them, and the same one."""
    value, other = keys.integer_or_none(name), keys.integer_or_none(alias)
    if None not in (value, other) and value != other:
        raise ConvertError(f"{keys.where}: {name} is {value}, but {alias} is {other}")
    found = other if value is None else value
    if found is None:
        raise ConvertError(f"{keys.where}: {name} is missing")
    return found
