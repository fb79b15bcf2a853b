"""Configs: to JSON and back, and every value that is refused."""

import dataclasses
import json
import math
from typing import Any

import pytest
from conftest import DRAFTER, TARGET
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle_jax.config import ConfigError, DrafterConfig, MoEConfig, RopeConfig, TargetConfig

SCALED = RopeConfig(
    theta=500000.0,
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.5,
    high_freq_factor=3.0,
    original_max_position_embeddings=64,
)
MIXTURE = MoEConfig(
    num_experts=4,
    num_experts_per_token=2,
    intermediate_size=64,
    layers=(False, True, True),
    router="top_k_softmax",
    norm_topk_prob=False,
    router_bias=True,
    expert_bias=True,
    swiglu_limit=7.0,
    weights="mxfp4",
)
SIZES = st.integers(1, 2**40)
POSITIVE = st.floats(1e-12, 1e12)
FLAGS = st.booleans()


@st.composite
def ropes(draw: st.DrawFn) -> RopeConfig:
    low = draw(st.floats(0.1, 10.0))
    return RopeConfig(
        theta=draw(st.floats(1.5, 1e12)),
        kind=draw(st.sampled_from(["default", "linear", "llama3", "yarn"])),
        factor=draw(st.floats(1.0, 1e6)),
        low_freq_factor=low,
        high_freq_factor=low + draw(st.floats(0.5, 10.0)),
        original_max_position_embeddings=draw(SIZES),
        beta_fast=low + draw(st.floats(0.5, 10.0)),
        beta_slow=low,
        truncate=draw(FLAGS),
        attention_factor=draw(POSITIVE),
    )


@st.composite
def mixtures(draw: st.DrawFn, layers: int) -> MoEConfig:
    experts, router = draw(SIZES), draw(st.sampled_from(["softmax_top_k", "top_k_softmax"]))
    return MoEConfig(
        num_experts=experts,
        num_experts_per_token=draw(st.integers(1, experts)),
        intermediate_size=draw(SIZES),
        layers=(*draw(st.lists(FLAGS, min_size=layers - 1, max_size=layers - 1)), True),
        router=router,
        norm_topk_prob=router == "softmax_top_k" and draw(FLAGS),
        router_bias=draw(FLAGS),
        expert_bias=draw(FLAGS),
        swiglu_limit=draw(st.none() | POSITIVE),
        swiglu_alpha=draw(POSITIVE),
    )


def decoder_fields(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads, layers = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    windows = st.lists(st.none() | SIZES, min_size=layers, max_size=layers)
    return {
        "vocab_size": draw(SIZES),
        "hidden_size": draw(SIZES),
        "intermediate_size": draw(SIZES),
        "num_layers": layers,
        "num_heads": kv_heads * draw(st.integers(1, 9)),
        "num_kv_heads": kv_heads,
        "head_dim": 2 * draw(SIZES),
        "rms_norm_eps": draw(POSITIVE),
        "rope": draw(ropes()),
        "max_position_embeddings": draw(SIZES),
        "attention_bias": draw(FLAGS),
        "attention_output_bias": draw(FLAGS),
        "mlp_bias": draw(FLAGS),
        "qk_norm": draw(FLAGS),
        "sliding_windows": tuple(draw(windows)),
        "attention_sinks": draw(FLAGS),
        "norm_weight_in_float32": draw(FLAGS),
        "moe": draw(st.none() | mixtures(layers)),
    }


@st.composite
def targets(draw: st.DrawFn) -> TargetConfig:
    fields = decoder_fields(draw)
    ids = st.integers(0, fields["vocab_size"] - 1)
    return TargetConfig(
        **fields,
        family=draw(st.text()),
        tie_word_embeddings=draw(FLAGS),
        bos_token_id=draw(st.none() | ids),
        eos_token_ids=tuple(draw(st.lists(ids, max_size=3))),
    )


@st.composite
def drafters(draw: st.DrawFn) -> DrafterConfig:
    fields = decoder_fields(draw)
    vocab = fields["vocab_size"]
    shared = draw(FLAGS)
    norm = draw(st.sampled_from(["none", "whole", "parts"]))
    return DrafterConfig(
        **fields,
        target_hidden_size=fields["hidden_size"] if shared else draw(SIZES),
        draft_vocab_size=vocab if shared else draw(st.integers(1, vocab)),
        aux_boundaries=tuple(draw(st.lists(st.integers(0, 99), min_size=1, max_size=4))),
        aux_source_convention=draw(st.text()),
        mask_token_id=draw(st.none() | st.integers(0, vocab - 1)),
        num_depths=draw(st.none() | st.integers(1, 64)),
        norm_before_residual=draw(FLAGS),
        norm_before_fc=norm == "whole",
        fc_norm=norm == "parts",
        norm_output=draw(FLAGS),
        own_embedding=draw(FLAGS) if shared else True,
        own_lm_head=draw(FLAGS) if shared else True,
    )


@settings(deadline=None)
@given(targets() | drafters())
def test_json_and_back(config: TargetConfig | DrafterConfig) -> None:
    values = config.to_json()
    text = json.dumps(values, allow_nan=False)
    again = type(config).from_json(json.loads(text))
    assert again == config
    assert json.dumps(again.to_json()) == text
    assert hash(again) == hash(config)  # what was a list in JSON is a tuple again


def test_json_is_plain() -> None:
    config = dataclasses.replace(TARGET, rope=SCALED, eos_token_ids=(2, 7))
    values = config.to_json()
    assert values["rope"] == dataclasses.asdict(SCALED)
    assert values["eos_token_ids"] == [2, 7]
    assert values["sliding_windows"] == [None, None, None]
    assert set(values) == {f.name for f in dataclasses.fields(TargetConfig)}


def test_defaults_are_for_python_alone() -> None:
    """What is written lists every field; one that is missing would be filled in silently."""
    with pytest.raises(ConfigError, match=r"RopeConfig: missing keys \['attention_factor', "):
        RopeConfig.from_json({"theta": 500.0})


@pytest.mark.parametrize("config", [TARGET, DRAFTER])
def test_a_missing_key_is_named(config: TargetConfig | DrafterConfig) -> None:
    for key in config.to_json():
        values = config.to_json()
        del values[key]
        with pytest.raises(ConfigError) as error:
            type(config).from_json(values)
        assert str(error.value) == f"{type(config).__name__}: missing keys ['{key}']"


@pytest.mark.parametrize("config", [TARGET, DRAFTER])
def test_unknown_keys_are_named(config: TargetConfig | DrafterConfig) -> None:
    name = type(config).__name__
    with pytest.raises(ConfigError, match=rf"{name}: unknown keys \['logit_scale', 'new'\]"):
        type(config).from_json({**config.to_json(), "new": 1, "logit_scale": None})
    rope = {**config.to_json()["rope"], "beta": 32}
    with pytest.raises(ConfigError, match=r"RopeConfig: unknown keys \['beta'\]"):
        type(config).from_json({**config.to_json(), "rope": rope})
    del rope["beta"], rope["theta"]
    with pytest.raises(ConfigError, match=r"RopeConfig: missing keys \['theta'\]"):
        type(config).from_json({**config.to_json(), "rope": rope})


def test_a_target_is_no_drafter() -> None:
    with pytest.raises(ConfigError, match="DrafterConfig: unknown keys"):
        DrafterConfig.from_json(TARGET.to_json())
    with pytest.raises(ConfigError, match="TargetConfig: unknown keys"):
        TargetConfig.from_json(DRAFTER.to_json())


COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [0, -4, 2.0, "8", None])
@pytest.mark.parametrize("config", [TARGET, DRAFTER])
def test_counts_are_positive_integers(
    config: TargetConfig | DrafterConfig, field: str, value: Any
) -> None:
    with pytest.raises(ConfigError) as error:
        type(config).from_json({**config.to_json(), field: value})
    name = type(config).__name__
    kind = "a positive integer" if isinstance(value, int) else "int"
    assert str(error.value) == f"{name}: {field} must be {kind}, got {value!r}"


SHARING = {"own_embedding": False, "draft_vocab_size": 96}


def _plain(changes: dict[str, Any]) -> dict[str, Any]:
    nested = {k: v.to_json() if isinstance(v, MoEConfig) else v for k, v in changes.items()}
    return json.loads(json.dumps(nested))


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (SCALED, {"theta": 0.0}, ("theta", "0.0")),
        (SCALED, {"theta": math.nan}, ("theta", "nan")),
        (SCALED, {"kind": "dynamic"}, ("kind", "'dynamic'", "default, linear, llama3, yarn")),
        (SCALED, {"kind": "yarn", "beta_slow": 32.0}, ("beta_slow (32.0)", "beta_fast (32.0)")),
        (SCALED, {"kind": "yarn", "theta": 1.0}, ("theta", "1.0")),
        (SCALED, {"attention_factor": 0.0}, ("attention_factor (0.0)",)),
        (SCALED, {"factor": 0.5}, ("factor", "0.5")),
        (SCALED, {"low_freq_factor": 3.0}, ("low_freq_factor", "high_freq_factor")),
        (SCALED, {"low_freq_factor": 0.0}, ("low_freq_factor", "high_freq_factor")),
        (TARGET, {"num_kv_heads": 3}, ("num_heads 4", "num_kv_heads 3")),
        (TARGET, {"head_dim": 7}, ("head_dim 7",)),
        (TARGET, {"rms_norm_eps": 0.0}, ("rms_norm_eps",)),
        (TARGET, {"rms_norm_eps": math.nan}, ("rms_norm_eps",)),
        (TARGET, {"sliding_windows": (5,)}, ("1 sliding windows", "3 layers")),
        (TARGET, {"sliding_windows": (None, 0, 5)}, ("sliding windows", "(None, 0, 5)")),
        (TARGET, {"moe": dataclasses.replace(MIXTURE, layers=(True,))}, ("1 of 3 layers",)),
        (TARGET, {"moe": MIXTURE, "hidden_size": 48}, ("mxfp4", "hidden_size (48)")),
        (MIXTURE, {"num_experts": 0}, ("num_experts", "0")),
        (MIXTURE, {"num_experts_per_token": 5}, ("num_experts_per_token 5", "num_experts 4")),
        (MIXTURE, {"layers": (False, False)}, ("no layer",)),
        (MIXTURE, {"router": "sigmoid"}, ("router", "'sigmoid'", "softmax_top_k, top_k_softmax")),
        (MIXTURE, {"norm_topk_prob": True}, ("norm_topk_prob", "softmax_top_k")),
        (MIXTURE, {"swiglu_limit": 0.0}, ("swiglu_limit", "0.0")),
        (MIXTURE, {"weights": "int4"}, ("weights", "'int4'", "plain, mxfp4")),
        (TARGET, {"eos_token_ids": (2, 96)}, ("eos_token_ids (2, 96)", "96")),
        (TARGET, {"eos_token_ids": (-1,)}, ("eos_token_ids (-1,)",)),
        (DRAFTER, {"draft_vocab_size": 0}, ("draft_vocab_size 0", "1..vocab_size (96)")),
        (DRAFTER, {"draft_vocab_size": 97}, ("draft_vocab_size 97", "1..vocab_size (96)")),
        (DRAFTER, {"aux_boundaries": ()}, ("aux_boundaries", "empty")),
        (DRAFTER, {"mask_token_id": 96}, ("mask_token_id 96", "96 rows")),
        (DRAFTER, {"mask_token_id": -1}, ("mask_token_id -1", "96 rows")),
        (DRAFTER, {"num_depths": 0}, ("num_depths", "0")),
        (DRAFTER, {"norm_before_fc": True}, ("norm_before_fc", "fc_norm")),
        (DRAFTER, {"own_lm_head": False}, ("lm_head", "64 of 96")),
        (
            DRAFTER,
            {**SHARING, "hidden_size": 48},
            ("hidden_size 48", "target_hidden_size 32", "embedding"),
        ),
    ],
)
def test_a_refused_value_is_named(config: Any, changes: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(config, **changes)
    assert all(part in str(error.value) for part in named), str(error.value)
    values = {**config.to_json(), **_plain(changes)}
    with pytest.raises(ConfigError):
        type(config).from_json(values)


def test_values_at_the_edge_are_allowed() -> None:
    dataclasses.replace(TARGET, eos_token_ids=(0, 95), sliding_windows=(1, None, 1))
    dataclasses.replace(DRAFTER, draft_vocab_size=96, mask_token_id=0, num_depths=1)
    dataclasses.replace(DRAFTER, **SHARING, own_lm_head=False)
    dataclasses.replace(DRAFTER, hidden_size=48)  # with both tables of its own
    RopeConfig(theta=1.0, low_freq_factor=9.0)  # unused by the default kind


def test_what_a_drafter_derives() -> None:
    assert DRAFTER.feature_size == 3 * 32


@pytest.mark.parametrize(
    ("config", "changes", "value"),
    [
        (TARGET, {"rms_norm_eps": -0.25}, "-0.25"),
        (SCALED, {"low_freq_factor": 3.25}, "3.25"),
    ],
)
def test_a_refused_value_is_shown(config: Any, changes: dict[str, Any], value: str) -> None:
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(config, **changes)
    assert value in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("rope", None), ("rms_norm_eps", "small"), ("eos_token_ids", 2), ("sliding_windows", None)],
)
def test_a_value_of_another_type_is_a_config_error(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        TargetConfig.from_json({**TARGET.to_json(), field: value})
