"""Architecture of a target and of a drafter, as frozen dataclasses that go to JSON and back.

A config is checked when it is made, so a model never meets a value it does not know.
"""

import dataclasses
import json
import types
import typing
from typing import Any, Literal, Self

RopeKind = Literal["default", "linear", "llama3", "yarn"]
Router = Literal["softmax_top_k", "top_k_softmax"]
ExpertWeights = Literal["plain", "mxfp4"]


class ConfigError(ValueError):
    """A configuration holds a value that this library does not support."""


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a value is of a type that the configs' fields are declared with."""
    if typing.get_origin(hint) is tuple:
        item = typing.get_args(hint)[0]
        return isinstance(value, tuple) and all(_is_a(v, item) for v in value)
    if isinstance(hint, types.UnionType):
        return any(_is_a(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _described(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return f"one of {', '.join(typing.get_args(hint))}"
    return getattr(hint, "__name__", str(hint)) if isinstance(hint, type) else str(hint)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclasses.dataclass(frozen=True)
class _Config:
    """JSON both ways; unknown and missing keys and values of another type are errors."""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value, hint = getattr(self, field.name), hints[field.name]
            _require(
                _is_a(value, hint),
                f"{type(self).__name__}: {field.name} must be {_described(hint)}, got {value!r}",
            )

    def to_json(self) -> dict[str, Any]:
        """Returns a dictionary of plain JSON values that `from_json` reads back."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Builds the config from what `to_json` returned.

        Raises:
          ConfigError: a key is unknown or missing, or a value is not supported.
        """
        fields = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - fields)
        _require(not unknown, f"{cls.__name__}: unknown keys {unknown}")
        missing = sorted(fields - set(values))
        _require(not missing, f"{cls.__name__}: missing keys {missing}")
        hints = typing.get_type_hints(cls)
        return cls(**{key: _read(value, hints[key]) for key, value in values.items()})


def _read(value: Any, hint: Any) -> Any:
    """Turns a JSON value into what a field of this type holds."""
    if isinstance(value, list):
        return tuple(value)
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    nested = [o for o in options if isinstance(o, type) and issubclass(o, _Config)]
    return nested[0].from_json(value) if nested and isinstance(value, dict) else value


@dataclasses.dataclass(frozen=True)
class RopeConfig(_Config):
    """Rotary position embedding, rotate-half layout over the whole head.

    Attributes:
      theta: base of the geometric series of wavelengths.
      kind: "default"; "linear" (every wavelength times `factor`); "llama3" (long wavelengths
        times `factor`, a ramp over the wavelengths between); "yarn" (the same with a ramp over
        the pairs' indices, arXiv 2309.00071).
      factor: how much longer the context is than the original one (all but default).
      low_freq_factor: wavelengths above original / low_freq_factor are stretched (llama3).
      high_freq_factor: wavelengths below original / high_freq_factor are kept (llama3).
      original_max_position_embeddings: tokens, context of the unscaled model (llama3, yarn).
      beta_fast: pairs that turn more often in the original context are kept (yarn).
      beta_slow: pairs that turn less often are stretched (yarn).
      truncate: the ramp begins and ends at whole indices (yarn).
      attention_factor: what cosines and sines are multiplied by (yarn).
    """

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.theta > 0, f"rope theta must be positive, got {self.theta}")
        _require(self.factor >= 1, f"rope factor must be at least 1, got {self.factor}")
        _require(
            self.kind != "llama3" or self.high_freq_factor > self.low_freq_factor > 0,
            f"llama3 rope needs 0 < low_freq_factor ({self.low_freq_factor}) < high_freq_factor "
            f"({self.high_freq_factor})",
        )
        _require(
            self.kind != "yarn" or self.theta > 1,
            f"yarn rope needs a theta above 1, got {self.theta}",
        )
        _require(
            self.kind != "yarn" or self.beta_fast > self.beta_slow > 0,
            f"yarn rope needs 0 < beta_slow ({self.beta_slow}) < beta_fast ({self.beta_fast})",
        )
        _require(
            self.original_max_position_embeddings > 0 and self.attention_factor > 0,
            f"rope original_max_position_embeddings ({self.original_max_position_embeddings}) and "
            f"attention_factor ({self.attention_factor}) must be positive",
        )


@dataclasses.dataclass(frozen=True)
class MoEConfig(_Config):
    """Layers whose MLP is a mixture of experts.

    Attributes:
      num_experts: E.
      num_experts_per_token: k, experts that a row is routed to.
      intermediate_size: width of one expert's gated MLP.
      layers: per decoder layer, whether its MLP is a mixture; the others have a dense one.
      router: "softmax_top_k" takes the top k of the softmax over all experts (Qwen3),
        "top_k_softmax" the softmax over the top k logits (GPT-OSS).
      norm_topk_prob: the k weights are divided by their sum (softmax_top_k).
      router_bias: a bias on the router's logits.
      expert_bias: biases on the experts' products.
      swiglu_limit: bound of gate and up values in the clamped SwiGLU of GPT-OSS,
        `gate * sigmoid(alpha * gate) * (up + 1)`; None for `silu(gate) * up`.
      swiglu_alpha: alpha of the clamped SwiGLU.
      weights: "plain", or "mxfp4": experts stay packed, 4 bits a weight and one scale for 32.
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    layers: tuple[bool, ...]
    router: Router
    norm_topk_prob: bool
    router_bias: bool
    expert_bias: bool
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    weights: ExpertWeights = "plain"

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("num_experts", "num_experts_per_token", "intermediate_size"):
            value = getattr(self, field)
            _require(value > 0, f"MoEConfig: {field} must be a positive integer, got {value!r}")
        _require(
            self.num_experts_per_token <= self.num_experts,
            f"MoEConfig: num_experts_per_token {self.num_experts_per_token} is more than "
            f"num_experts {self.num_experts}",
        )
        _require(any(self.layers), "MoEConfig: no layer is a mixture of experts")
        _require(
            self.router == "softmax_top_k" or not self.norm_topk_prob,
            "MoEConfig: norm_topk_prob goes with the router softmax_top_k",
        )
        _require(
            self.swiglu_limit is None or self.swiglu_limit > 0,
            f"MoEConfig: swiglu_limit must be positive, got {self.swiglu_limit}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(_Config):
    """What the decoder blocks of a target and of a drafter have in common.

    Attributes:
      vocab_size: V, rows of the embedding table.
      hidden_size: H, width of the residual stream.
      intermediate_size: I, width of a dense layer's gated MLP.
      num_layers: decoder blocks.
      num_heads: N, query heads.
      num_kv_heads: N_kv, key/value heads; query head n reads KV head n // (N / N_kv).
      head_dim: D, independent of H / N.
      rms_norm_eps: epsilon of every RMSNorm.
      rope: rotary embedding.
      max_position_embeddings: tokens, the context that the model was made for.
      attention_bias: biases on the q, k and v products.
      attention_output_bias: a bias on the attention's output product.
      mlp_bias: biases on the three MLP products.
      qk_norm: RMSNorm over D on queries and keys before RoPE (Qwen3).
      sliding_windows: per layer, how many latest positions a row sees (itself included), or
        None for all of them.
      attention_sinks: one learned logit per query head in every softmax's denominator (GPT-OSS).
      norm_weight_in_float32: RMSNorm multiplies by its weight in float32 (GPT-OSS), not after
        the cast back (Llama, Qwen3).
      moe: the mixture of experts; None where every layer has a dense MLP.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    attention_sinks: bool = False
    norm_weight_in_float32: bool = False
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, field)
            _require(value > 0, f"{name}: {field} must be a positive integer, got {value!r}")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"{name}: num_heads {self.num_heads} is no multiple of num_kv_heads "
            f"{self.num_kv_heads}",
        )
        _require(self.head_dim % 2 == 0, f"{name}: head_dim {self.head_dim} must be even")
        _require(
            self.rms_norm_eps > 0, f"{name}: rms_norm_eps must be positive, got {self.rms_norm_eps}"
        )
        _require(
            len(self.sliding_windows) == self.num_layers,
            f"{name}: {len(self.sliding_windows)} sliding windows for {self.num_layers} layers",
        )
        _require(
            all(w is None or w > 0 for w in self.sliding_windows),
            f"{name}: sliding windows must be positive or null, got {self.sliding_windows}",
        )
        if self.moe is not None:
            _require(
                len(self.moe.layers) == self.num_layers,
                f"{name}: moe names {len(self.moe.layers)} of {self.num_layers} layers",
            )
            _require(
                self.moe.weights == "plain"
                or self.hidden_size % 32 == self.moe.intermediate_size % 32 == 0,
                f"{name}: mxfp4 experts need hidden_size ({self.hidden_size}) and "
                f"intermediate_size ({self.moe.intermediate_size}) in multiples of 32",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig(DecoderConfig):
    """A decoder-only target of the Llama, Qwen3, Qwen3-MoE and GPT-OSS families.

    Attributes:
      family: the Hugging Face `model_type` it was converted from, for display.
      tie_word_embeddings: logits use the embedding table; there is no lm_head.
      bos_token_id: id of the token that starts a text, if the model has one.
      eos_token_ids: every id that ends generation (config.json and generation_config.json).
    """

    family: str
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            all(0 <= e < self.vocab_size for e in self.eos_token_ids),
            f"TargetConfig: eos_token_ids {self.eos_token_ids} outside the vocabulary of "
            f"{self.vocab_size}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig(DecoderConfig):
    """A P-EAGLE head (or an EAGLE-3 head, which has no mask token) for one target.

    Attributes:
      target_hidden_size: hidden size of the target whose features it reads.
      draft_vocab_size: rows of its lm_head; `d2t` maps them to target ids.
      aux_boundaries: boundaries of the target whose residual streams make the feature, in
        order. Boundary 0 is the embedding's output, boundary i the stream entering layer i,
        boundary L the stream after the last layer, before the final norm.
      aux_source_convention: how the source checkpoint numbered them, for display.
      mask_token_id: token fed to mask slots; None for an EAGLE-3 head.
      num_depths: drafts per pass that it was trained for; None where the source does not say.
      norm_before_residual: the first block's residual starts from the normalised feature.
      norm_before_fc: one RMSNorm over the whole feature before `fc`.
      fc_norm: one RMSNorm per boundary's part of the feature before `fc`.
      norm_output: EAGLE-3.1: the state fed back to autoregressive drafting is normalised.
      own_embedding: it carries its own embedding table, else it reads the target's.
      own_lm_head: it carries its own lm_head, else it uses the target's (full vocabulary).
    """

    target_hidden_size: int
    draft_vocab_size: int
    aux_boundaries: tuple[int, ...]
    aux_source_convention: str
    mask_token_id: int | None
    num_depths: int | None
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    own_embedding: bool
    own_lm_head: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            0 < self.draft_vocab_size <= self.vocab_size,
            f"DrafterConfig: draft_vocab_size {self.draft_vocab_size} must be in "
            f"1..vocab_size ({self.vocab_size})",
        )
        _require(len(self.aux_boundaries) > 0, "DrafterConfig: aux_boundaries is empty")
        _require(
            self.mask_token_id is None or 0 <= self.mask_token_id < self.vocab_size,
            f"DrafterConfig: mask_token_id {self.mask_token_id} outside the embedding table of "
            f"{self.vocab_size} rows",
        )
        _require(
            self.num_depths is None or self.num_depths >= 1,
            f"DrafterConfig: num_depths must be at least 1, got {self.num_depths}",
        )
        _require(
            not (self.norm_before_fc and self.fc_norm),
            "DrafterConfig: norm_before_fc and fc_norm exclude each other",
        )
        _require(
            self.own_lm_head or self.draft_vocab_size == self.vocab_size,
            f"DrafterConfig: no lm_head of its own, but a reduced draft vocabulary "
            f"({self.draft_vocab_size} of {self.vocab_size})",
        )
        shares = not (self.own_embedding and self.own_lm_head)
        _require(
            not shares or self.hidden_size == self.target_hidden_size,
            f"DrafterConfig: hidden_size {self.hidden_size} differs from target_hidden_size "
            f"{self.target_hidden_size}, so it needs an embedding and an lm_head of its own",
        )

    @property
    def feature_size(self) -> int:
        """F, width of the concatenated aux hidden states of one target row."""
        return len(self.aux_boundaries) * self.target_hidden_size
