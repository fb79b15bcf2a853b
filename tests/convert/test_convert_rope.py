"""Rotary embeddings in every spelling, with the defaults of transformers."""

import math
from pathlib import Path
from typing import Any

import pytest
from convert_sources import LLAMA, Config, without
from expert_sources import parse

from peagle_jax.config import RopeConfig
from peagle_jax.convert import ConvertError

ORIGINAL = "original_max_position_embeddings"


def rope(folder: Path, **keys: Any) -> RopeConfig:
    return parse(folder, without(LLAMA, "rope_theta", "rope_scaling") | keys).rope


LOG4 = 0.1 * math.log(4) + 1


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        # transformers' defaults: the context is the whole one, the ramp is cut to whole indices.
        ({}, RopeConfig(100.0, "yarn", 4.0, original_max_position_embeddings=64)),
        ({ORIGINAL: 16}, RopeConfig(100.0, "yarn", 4.0, original_max_position_embeddings=16)),
        (
            {"beta_fast": 8, "beta_slow": 2, "truncate": False, ORIGINAL: 16},
            RopeConfig(
                100.0,
                "yarn",
                4.0,
                original_max_position_embeddings=16,
                beta_fast=8.0,
                beta_slow=2.0,
                truncate=False,
            ),
        ),
    ],
)
@pytest.mark.parametrize("new", [False, True])
def test_yarn(extra: Config, expected: RopeConfig, new: bool, tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, **extra}
    if new:
        found = rope(tmp_path, rope_parameters=scaling | {"rope_theta": 100.0})
    else:
        found = rope(tmp_path, rope_theta=100.0, rope_scaling=scaling)
    assert found.attention_factor == pytest.approx(LOG4)
    fields = {**expected.to_json(), "attention_factor": found.attention_factor}
    assert found == RopeConfig.from_json(fields)


@pytest.mark.parametrize(
    ("extra", "factor"),
    [
        ({"attention_factor": 0.5}, 0.5),
        ({"attention_factor": 0.5, "mscale": 2.0, "mscale_all_dim": 1.0}, 0.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        (
            {"mscale": 2.0, "mscale_all_dim": 0.5},
            (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1),
        ),
        ({"mscale": 2.0}, LOG4),  # transformers goes by both or by neither
        ({"mscale": 2.0, "mscale_all_dim": 0}, LOG4),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_attention_factor_of_yarn(extra: Config, factor: float, tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, **extra}
    found = rope(tmp_path, rope_theta=100.0, rope_scaling=scaling)
    assert found.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_original_context_may_stand_at_the_top(kind: str, tmp_path: Path) -> None:
    scaling = {"rope_type": kind, "factor": 4.0}
    if kind == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    keys = {"rope_theta": 100.0, "rope_scaling": scaling, ORIGINAL: 16}
    assert rope(tmp_path, **keys).original_max_position_embeddings == 16


@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_linear(name: str, tmp_path: Path) -> None:
    found = rope(tmp_path, rope_theta=100.0, rope_scaling={name: "linear", "factor": 4.0})
    assert found == RopeConfig(100.0, "linear", 4.0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional", "mrope", "su"])
def test_unsupported_kinds_list_the_supported(kind: str, tmp_path: Path) -> None:
    named = f"rope_type is '{kind}', supported is default, linear, llama3 or yarn"
    with pytest.raises(ConvertError, match=named):
        rope(tmp_path, rope_theta=100.0, rope_scaling={"rope_type": kind, "factor": 4.0})
