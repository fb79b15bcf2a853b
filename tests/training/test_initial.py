"""The head that a run starts from."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import FAMILIES, TARGET, random_target

from peagle_jax.config import DrafterConfig
from peagle_jax.models import Drafter, Target
from peagle_jax.presets import usual_drafter
from peagle_jax.training.cod import Elements
from peagle_jax.training.features import read_row
from peagle_jax.training.flat import PackedRow, real_inputs
from peagle_jax.training.initial import new_head
from peagle_jax.training.packing import TokenRow


def config_of(layers: int = 2, draft: int | None = None, **changes: object) -> DrafterConfig:
    usual = dataclasses.replace(usual_drafter(TARGET, layers, draft), mask_token_id=95)
    return dataclasses.replace(usual, **changes)


def make(config: DrafterConfig, target: Target, copies: bool = False, seed: int = 0) -> Drafter:
    d2t = None
    if config.draft_vocab_size < config.vocab_size:
        d2t = np.arange(config.draft_vocab_size)  # draft id i is token 2 i
    return new_head(config, target, d2t, seed=seed, layers_from_target=copies)


def test_tables_are_the_targets() -> None:
    target = random_target().weights.merge()
    head = make(config_of(draft=40), target)
    np.testing.assert_array_equal(head.embedding[...], target.embedding[...])
    np.testing.assert_array_equal(head.lm_head[...], target.lm_head[...][: 2 * 40 : 2])
    np.testing.assert_array_equal(head.to_target_ids(jnp.arange(40)), np.arange(0, 80, 2))
    np.testing.assert_array_equal(head.final_norm.weight[...], target.final_norm.weight[...])
    whole = make(config_of(), target)
    np.testing.assert_array_equal(whole.lm_head[...], target.lm_head[...])
    tied = random_target(FAMILIES["qwen3"]).weights.merge()
    np.testing.assert_array_equal(make(config_of(), tied).lm_head[...], tied.embedding[...])


def test_the_seed_counts() -> None:
    target = random_target().weights.merge()
    fc = [make(config_of(), target, seed=seed).fc[...] for seed in (1, 1, 2)]
    np.testing.assert_array_equal(fc[0], fc[1])
    assert (fc[0] != fc[2]).any()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_layers_from_the_target_go_on_as_it_does(family: str) -> None:
    """Fed the stream that enters the target's last two layers, the head gives its logits."""
    target = random_target(FAMILIES[family])
    boundaries = (2, 3, TARGET.num_layers - 2)
    rope, qk_norm = target.config.rope, target.config.qk_norm
    config = config_of(aux_boundaries=boundaries, rope=rope, qk_norm=qk_norm)
    head = make(config, target.weights.merge(), copies=True)
    tokens = np.random.default_rng(0).integers(0, TARGET.vocab_size, 12).astype(np.int32)
    ids, places = np.zeros(12, np.int32), np.arange(12, dtype=np.int32)
    features, states = read_row(target.weights, TokenRow(tokens, ids == 0, ids, places), boundaries)
    elements = Elements(jnp.asarray(places), jnp.zeros(12, jnp.int32), jnp.ones(12, bool))
    row = PackedRow(jnp.roll(tokens, -1), features, states, jnp.ones(12, bool), jnp.asarray(ids))
    x, _ = real_inputs(head, row, elements).forward(head)
    expected = target.weights.merge().logits(states)
    logits = head.logits(x, target.weights.merge())
    np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("llama", {"num_layers": 4, "sliding_windows": (None,) * 4}, "has 3 layers, the head 4"),
        ("llama", {"num_kv_heads": 1}, r"attention\.qkv is \(64, 64\), the head's \(48, 64\)"),
        ("llama", {"intermediate_size": 40}, r"mlp\.\w+ is .*start from drawn layers"),
        ("gpt_oss", {}, "the target's layers have .* and the head's have not"),
    ],
)
def test_unfitting_layers(family: str, changes: dict[str, object], said: str) -> None:
    target = random_target(FAMILIES[family]).weights.merge()
    with pytest.raises(ValueError, match=said):
        make(config_of(**changes), target, copies=True)
