"""The drafter against the published speculators package, and against a NumPy forward."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEMO_DRAFTER, GOLDEN

import peagle_jax
from peagle_jax.convert import to_native
from peagle_jax.decoding import AutoregressiveDraft
from peagle_jax.decoding.draft import Committed, PromptRows
from peagle_jax.load import LoadedDrafter, LoadedTarget
from peagle_jax.models import Drafter, Frozen, KVCache, Target, cached, masked

ORACLE = GOLDEN / "oracle"
HEADS = ("norm_before_fc", "qwen3_fc_norm", "two_aux", "wide")


def load(source: Path, folder: Path) -> LoadedDrafter:
    to_native(source, folder / "native")
    return peagle_jax.load_drafter(folder / "native")


def layer_masks(drafter: Drafter, golden: dict[str, np.ndarray]) -> list[jnp.ndarray]:
    """The oracle's masks, the sliding one where a layer has a window; padding sees itself."""
    masks = []
    for window in drafter.config.sliding_windows:
        mask = golden["flat.mask" if window is None else "flat.mask_sliding"]
        masks.append(jnp.asarray(mask | np.eye(len(mask), dtype=bool))[None])
    return masks


@jax.jit
def forward(
    drafter: Frozen[Drafter],
    tokens: jax.Array,
    features: jax.Array,
    positions: jax.Array,
    masks: list[jax.Array],
    target: Frozen[Target] | None,
) -> jax.Array:
    """Draft logits `[B, T, D_V]` of rows without a cache, under one mask per layer."""
    head = drafter.merge()
    model = None if target is None else target.merge()  # a head with tables of its own needs none
    x, _ = head(tokens, head.project(features), positions, masked(masks), model)
    return head.logits(x, model)


@pytest.mark.parametrize("batch", ["pack", "draft_step"])
@pytest.mark.parametrize("name", ["llama_reduced", "qwen3_sliding_fcnorm_fullvocab"])
def test_flat_forward_equals_speculators(name: str, batch: str, tmp_path: Path) -> None:
    """A packed batch of two documents, and one chain of mask slots, under the given masks."""
    loaded = load(ORACLE / name / "draft", tmp_path)
    drafter = loaded.weights.merge()
    golden = dict(np.load(ORACLE / name / f"{batch}.npz"))
    hidden = drafter.project(jnp.asarray(golden["flat.fc_in"]))
    np.testing.assert_allclose(hidden, golden["flat.fc_out"], atol=1e-4)
    logits = forward(
        loaded.weights,
        golden["flat.ids"][None],
        golden["flat.fc_in"][None],
        golden["flat.positions"][None],
        layer_masks(drafter, golden),
        None,
    )[0]
    # Rows that pad the batch see nothing and mean nothing.
    real = golden["flat.mask"].any(axis=1)
    assert real.sum() > 15
    np.testing.assert_allclose(logits[real], golden["logits"][real], atol=1e-4)


@pytest.mark.parametrize("name", ["llama_reduced", "qwen3_sliding_fcnorm_fullvocab"])
def test_inference_chain_equals_speculators(name: str, tmp_path: Path) -> None:
    """The same chain as serving runs it: rows into the KV cache, windows from the config."""
    drafter = load(ORACLE / name / "draft", tmp_path).weights.merge()
    golden = dict(np.load(ORACLE / name / "draft_step.npz"))
    positions = jnp.asarray(golden["flat.positions"])[None]  # 13 real rows, then 4 mask slots
    cache = KVCache.zeros(drafter.config, 1, 64, jnp.float32, block=64)
    x, _ = drafter(
        jnp.asarray(golden["flat.ids"])[None],
        drafter.project(jnp.asarray(golden["flat.fc_in"]))[None],
        positions,
        cached(cache, positions),
        no_target(),
    )
    logits = drafter.logits(x, no_target())[0]
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-4)
    drafts = drafter.to_target_ids(jnp.argmax(logits, axis=-1))
    steps = len(golden["draft.target_ids"])
    np.testing.assert_array_equal(drafts[-steps:], golden["draft.target_ids"])


@pytest.mark.parametrize("name", HEADS)
def test_options_equal_speculators(name: str, tmp_path: Path) -> None:
    """Norms, biases, number of boundaries, sizes and RoPE that the oracle does not cover."""
    loaded = load(GOLDEN / "drafters" / name, tmp_path)
    drafter, golden = (
        loaded.weights.merge(),
        dict(np.load(GOLDEN / "drafters" / name / "golden.npz")),
    )
    masks = [jnp.asarray(golden["mask"])[None]] * drafter.config.num_layers
    rows = (golden[key][None] for key in ("ids", "fc_in", "positions"))
    logits = forward(loaded.weights, *rows, masks, None)[0]
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-4)
    drafts = drafter.to_target_ids(jnp.argmax(logits[golden["read_rows"]], axis=-1))
    np.testing.assert_array_equal(drafts, golden["draft_target_ids"])


def test_demo_head_equals_a_numpy_forward(demo_target: LoadedTarget) -> None:
    """The demo's head (bfloat16 weights, shared embedding) drafts the golden tokens."""
    target = demo_target.weights
    loaded = peagle_jax.load_drafter(DEMO_DRAFTER)
    drafter, golden = loaded.weights.merge(), dict(np.load(GOLDEN / "smollm2_drafts.npz"))
    anchors = [key.rsplit(".", 1)[0] for key in golden if key.endswith(".anchor")]
    assert len(anchors) == 6
    for name in anchors:
        text, anchor = name.split(".")[0], int(golden[f"{name}.anchor"])
        ids = golden[f"{text}.ids"][1 : anchor + 2]
        tokens = jnp.concatenate([ids, jnp.full((7,), drafter.config.mask_token_id)])
        features = jnp.asarray(golden[f"{text}.features"][: anchor + 1])
        features = jnp.concatenate([features, jnp.tile(drafter.mask_hidden[...], (7, 1))])
        positions = jnp.arange(anchor + 8)[None]
        causal = jnp.tril(jnp.ones((1, anchor + 8, anchor + 8), bool))
        rows = (tokens[None], features[None], positions)
        logits = forward(loaded.weights, *rows, [causal] * 2, target)[0, anchor:]
        drafts = drafter.to_target_ids(jnp.argmax(logits, axis=-1))
        np.testing.assert_array_equal(drafts, golden[f"{name}.drafts"])
        np.testing.assert_allclose(logits.max(axis=-1), golden[f"{name}.top_logits"], atol=1e-4)


def no_target() -> Target:
    """A head with its own embedding and lm_head never looks at the target."""
    return None  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["eagle3_llama", "eagle3_qwen3"])
def test_autoregressive_drafting_equals_speculators(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a prompt, then K drafts from the last one, through the proposer and its cache."""
    folder = GOLDEN / "drafters" / name
    loaded, golden = load(folder, tmp_path), dict(np.load(folder / "golden.npz"))
    rows, steps = len(golden["tokens"]), len(golden["draft_target_ids"])
    seen: list[jax.Array] = []
    logits = Drafter.logits
    monkeypatch.setattr(
        Drafter, "logits", lambda self, *args: seen.append(logits(self, *args)) or seen[-1]
    )
    proposer = AutoregressiveDraft(loaded.weights, steps, loaded.config.aux_boundaries)
    # Row p pairs the token at p + 1 with the feature of p; the first token is in no row.
    tokens = jnp.zeros((1, 64), jnp.int32).at[0, 1 : rows + 1].set(golden["tokens"])
    features = jnp.asarray(golden["features"])[None]
    positions = jnp.asarray(golden["positions"])[None]
    state = proposer.start(no_target(), proposer.new_cache(1, 64, jnp.float32))
    counts = jnp.array([rows - 1])
    prompt = PromptRows(tokens[:, 1:rows], features[:, :-1], positions[:, :-1], counts)
    state = proposer.read(no_target(), prompt, state, empty=True)
    committed = Committed(
        tokens,
        jnp.array([rows + 1]),
        jnp.array([0]),
        jnp.pad(features[:, -1:], ((0, 0), (0, steps), (0, 0))),
        jnp.int32(0),
    )
    drafts, law, _ = proposer.propose(no_target(), state, committed, None)
    assert law is None
    np.testing.assert_array_equal(drafts[0], golden["draft_target_ids"])
    steps_seen = jnp.concatenate(seen, axis=1)[0]
    np.testing.assert_allclose(steps_seen, golden["step_logits"], atol=1e-4)
