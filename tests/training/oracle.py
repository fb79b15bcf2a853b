"""The published speculators package's batches, and the heads and targets that go with them."""

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from conftest import GOLDEN
from flax import nnx

import peagle_jax
from peagle_jax.convert import to_native
from peagle_jax.models import Drafter, Frozen
from peagle_jax.models.layers import RMSNorm
from peagle_jax.training import Elements, PackedRow, TargetHead

ORACLE = GOLDEN / "oracle"
NAMES = ("llama_reduced", "qwen3_sliding_fcnorm_fullvocab")
DEPTHS = 5


@functools.cache
def load(path: Path) -> dict[str, np.ndarray]:
    return dict(np.load(path))


def head_of(name: str, folder: Path) -> Drafter:
    to_native(ORACLE / name / "draft", folder / "native")
    return peagle_jax.load_drafter(folder / "native").weights.merge()


def row_of(golden: dict[str, np.ndarray]) -> PackedRow:
    return PackedRow(
        jnp.asarray(golden["in.input_ids"], jnp.int32),
        jnp.asarray(golden["in.hidden_states"]),
        jnp.asarray(golden["in.verifier_last_hidden_states"]),
        jnp.asarray(golden["in.loss_mask"], bool),
        jnp.asarray(golden["in.document_ids"], jnp.int32),
    )


def elements_of(golden: dict[str, np.ndarray]) -> Elements:
    anchors = golden["cod.anchor_pos"]
    return Elements(
        jnp.asarray(anchors, jnp.int32),
        jnp.asarray(golden["cod.depth"], jnp.int32),
        jnp.asarray(golden["in.document_ids"][anchors] >= 0),
    )


def teacher_of(name: str, head: Drafter) -> TargetHead:
    golden = load(ORACLE / name / "target_head.npz")
    norm = RMSNorm(len(golden["norm"]), 1e-6, jnp.float32)
    norm.weight = nnx.Param(jnp.asarray(golden["norm"]))
    ids = head.to_target_ids(jnp.arange(head.config.draft_vocab_size))
    return TargetHead(Frozen.of(norm), jnp.asarray(golden["lm_head"])[ids])


def gradient_names(head: Drafter) -> dict[str, list[str]]:
    """The parameters of speculators that each of ours holds, one below the other."""
    names = {
        "mask_hidden": ["mask_hidden"],
        "embedding": ["embed_tokens.weight"],
        "fc": ["fc.weight"],
        "final_norm.weight": ["norm.weight"],
    }
    if head.config.fc_norm:
        names |= {f"fc_norm.{i}.weight": [f"fc_norm.{i}.weight"] for i in range(3)}
    for i in range(head.config.num_layers):
        own, theirs = f"layers.{i}", f"layers.{i}"
        projections = [f"{theirs}.self_attn.{p}_proj.weight" for p in "qkv"]
        names |= {
            f"{own}.attention.qkv": projections,
            f"{own}.attention.out": [f"{theirs}.self_attn.o_proj.weight"],
            f"{own}.mlp.gate_up": [f"{theirs}.mlp.{p}_proj.weight" for p in ("gate", "up")],
            f"{own}.mlp.down": [f"{theirs}.mlp.down_proj.weight"],
            f"{own}.attention_norm.weight": [f"{theirs}.input_layernorm.weight"],
            f"{own}.mlp_norm.weight": [f"{theirs}.post_attention_layernorm.weight"],
        }
        if head.config.qk_norm:
            for p in "qk":
                names[f"{own}.attention.{p}_norm.weight"] = [f"{theirs}.self_attn.{p}_norm.weight"]
        if i == 0:
            names[f"{own}.hidden_norm.weight"] = [f"{theirs}.hidden_norm.weight"]
    return names
