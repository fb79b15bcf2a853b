"""The way back: nothing is lost on it, and published packages read what comes out."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN
from convert_sources import (
    PEAGLE,
    assert_identical,
    drafter_tensors,
    read_native,
    read_source,
    write,
)
from export_sources import DRAFTERS, TARGETS, save_native

import peagle_jax
from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.convert import to_native
from peagle_jax.convert.to_hf import Format, to_hf
from peagle_jax.models import masked

EXPORTS = GOLDEN / "exports"
DTYPES = ["float32", "bfloat16"]


def assert_same_native(one: Path, other: Path, config_type: type[Any]) -> None:
    """Checks two native checkpoints for the same config and bits."""
    before, after = (read_native(folder, config_type) for folder in (one, other))
    if config_type is DrafterConfig:  # a text for display, that the layouts have no key for
        shown = {"aux_source_convention": ""}
        before, after = ((dataclasses.replace(c, **shown), a) for c, a in (before, after))
    assert before[0] == after[0]
    assert_identical(after[1], before[1])


# Round trips


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TARGETS)
def test_targets_come_back_bit_for_bit(name: str, dtype: str, tmp_path: Path) -> None:
    native = save_native(tmp_path / "native", TARGETS[name], dtype)
    done = to_hf(native, tmp_path / "hf", "hf", max_shard_bytes=20_000)
    assert done.files > 1 and done.warnings == ()
    to_native(tmp_path / "hf", tmp_path / "again")
    assert_same_native(native, tmp_path / "again", TargetConfig)


HEADS = [
    *((name, layout, "float32") for name in DRAFTERS for layout in ("vllm", "speculators")),
    *(("fc_norm", layout, "bfloat16") for layout in ("vllm", "speculators")),
    ("shared", "vllm", "bfloat16"),
]


@pytest.mark.parametrize(("name", "layout", "dtype"), HEADS)
def test_heads_come_back_bit_for_bit(name: str, layout: Format, dtype: str, tmp_path: Path) -> None:
    native = save_native(tmp_path / "native", DRAFTERS[name], dtype)
    to_hf(native, tmp_path / "hf", layout, target="org/target")
    to_native(tmp_path / "hf", tmp_path / "again", aux_convention="boundary")
    assert_same_native(native, tmp_path / "again", DrafterConfig)


FOREIGN_TARGETS = [
    *("llama_gqa", "llama_biases", "llama_tied", "llama_rope_scaled", "llama_rope_linear"),
    *("qwen3", "qwen3_yarn_window", "qwen3_moe", "gpt_oss", "gpt_oss_mxfp4"),
]


@pytest.mark.parametrize("name", FOREIGN_TARGETS)
def test_published_layouts_of_targets_come_out_as_they_went_in(name: str, tmp_path: Path) -> None:
    source = GOLDEN / "targets" / name
    to_native(source, tmp_path / "native")
    to_hf(tmp_path / "native", tmp_path / "hf", "hf")
    assert_identical(read_source(tmp_path / "hf"), read_source(source))
    to_native(tmp_path / "hf", tmp_path / "again")
    assert_same_native(tmp_path / "native", tmp_path / "again", TargetConfig)


def test_fused_experts_come_out_in_the_layout_of_the_hub(tmp_path: Path) -> None:
    to_native(GOLDEN / "targets" / "qwen3_moe_fused", tmp_path / "native")
    to_hf(tmp_path / "native", tmp_path / "hf", "hf")
    fused, single = (
        read_source(GOLDEN / "targets" / "qwen3_moe_fused"),
        read_source(tmp_path / "hf"),
    )
    layer = "model.layers.1.mlp.experts"
    both = fused[f"{layer}.gate_up_proj"]  # [E, 2I, H], gate first
    for e in range(len(both)):
        gate, up = np.split(both[e], 2)
        np.testing.assert_array_equal(single[f"{layer}.{e}.gate_proj.weight"], gate)
        np.testing.assert_array_equal(single[f"{layer}.{e}.up_proj.weight"], up)


@pytest.mark.parametrize("name", ["norm_before_fc", "qwen3_fc_norm", "two_aux", "wide"])
def test_heads_of_speculators_come_out_as_they_went_in(name: str, tmp_path: Path) -> None:
    source = GOLDEN / "drafters" / name
    to_native(source, tmp_path / "native")
    to_hf(tmp_path / "native", tmp_path / "hf", "speculators")
    assert_identical(read_source(tmp_path / "hf"), read_source(source))
    # Every key that decides something comes back as the package had written it.
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, tmp_path / "hf"))
    for key in (
        *("speculators_model_type", "architectures", "draft_vocab_size", "mask_token_id"),
        *("eagle_aux_hidden_state_layer_ids", "norm_before_residual", "norm_before_fc"),
        *("fc_norm", "norm_output", "target_hidden_size", "dtype", "embed_requires_grad"),
    ):
        assert after[key] == before[key], key
    methods = [c["speculators_config"]["proposal_methods"] for c in (before, after)]
    assert methods[0] == methods[1]
    decoder, was = after["transformer_layer_config"], before["transformer_layer_config"]
    assert {key: was.get(key) for key in decoder if key != "max_window_layers"} == {
        key: value for key, value in decoder.items() if key != "max_window_layers"
    }


@pytest.mark.parametrize("full", [False, True])
def test_heads_of_aws_come_out_as_they_went_in(full: bool, tmp_path: Path) -> None:
    """Their full vocabularies have maps too, the identity."""
    config = PEAGLE | ({"draft_vocab_size": 40} if full else {})
    tensors = drafter_tensors(config)
    if full:
        tensors |= {"d2t": np.zeros(40, np.int64), "t2d": np.ones(40, np.bool_)}
    write(tmp_path / "source", config, tensors)
    to_native(tmp_path / "source", tmp_path / "native")
    to_hf(tmp_path / "native", tmp_path / "hf", "vllm")
    assert_identical(read_source(tmp_path / "hf"), tensors)
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    for key, value in config.items():
        if key != "bos_token_id":  # only the target's text needs it
            assert written[key] == value, key


# What the published packages make of it


@pytest.mark.parametrize("name", ["peagle", "eagle3"])
def test_exports_give_the_logits_of_the_published_package(name: str, tmp_path: Path) -> None:
    """tests/golden/make_exports.py loaded the folder in speculators 0.9.0 and ran it there."""
    golden = dict(np.load(EXPORTS / name / "golden.npz"))
    to_native(EXPORTS / name, tmp_path / "native")
    drafter = peagle_jax.load_drafter(tmp_path / "native").weights.merge()
    masks = [jnp.asarray(golden["mask"])[None]] * drafter.config.num_layers
    ids, features, positions = (jnp.asarray(golden[k]) for k in ("ids", "fc_in", "positions"))
    no_target: Any = None  # it has tables of its own
    x, _ = drafter(
        ids[None], drafter.project(features)[None], positions[None], masked(masks), no_target
    )
    logits = drafter.logits(x, no_target)[0]
    assert golden["logits"].std() > 1
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-4)


@pytest.mark.parametrize("name", ["peagle", "eagle3"])
def test_exports_are_still_what_the_package_was_given(name: str, tmp_path: Path) -> None:
    to_native(EXPORTS / name, tmp_path / "native")
    target = json.loads((EXPORTS / name / "config.json").read_text())["speculators_config"]
    verifier = target["verifier"]["name_or_path"]
    to_hf(tmp_path / "native", tmp_path / "hf", "speculators", target=verifier)
    for file in ("config.json", "model.safetensors"):
        written, expected = ((f / file).read_bytes() for f in (tmp_path / "hf", EXPORTS / name))
        assert written == expected, file
