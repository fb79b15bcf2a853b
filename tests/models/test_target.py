"""The target against transformers: logits, boundaries, cached decoding, greedy tokens."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import GOLDEN, ROOT

import peagle_jax
from peagle_jax.convert import to_native
from peagle_jax.load import LoadedTarget
from peagle_jax.models import Frozen, KVCache, Target, cached, masked

TARGETS = (
    *("llama_gqa", "llama_tied", "llama_rope_scaled", "llama_rope_linear", "llama_biases"),
    *("qwen3", "qwen3_yarn_window", "qwen3_moe", "qwen3_moe_fused", "qwen3_moe_fp8"),
    *("gpt_oss", "gpt_oss_mxfp4"),
)


@pytest.fixture(scope="module", params=TARGETS)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoadedTarget, dict[str, np.ndarray]]:
    """A converted tiny model and what transformers says of it."""
    source = GOLDEN / "targets" / request.param
    native = tmp_path_factory.mktemp("native") / request.param
    to_native(source, native)
    return peagle_jax.load_target(native), dict(np.load(source / "golden.npz"))


@functools.partial(jax.jit, static_argnames="boundaries")
def forward(
    target: Frozen[Target], ids: jax.Array, boundaries: tuple[int, ...] = ()
) -> tuple[jax.Array, jax.Array | None]:
    """Logits and feature of whole sequences `[B, T]`, without a cache."""
    model, length = target.merge(), ids.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length), ids.shape)
    back = jnp.arange(length)[:, None] - jnp.arange(length)  # how far back a row would look
    masks = [
        ((back >= 0) & (back < (window or length)))[None] for window in model.config.sliding_windows
    ]
    x, feature, _ = model(ids, positions, masked(masks), boundaries)
    return model.logits(x), feature


def test_logits_equal_transformers(case: tuple[LoadedTarget, dict[str, np.ndarray]]) -> None:
    target, golden = case
    logits, _ = forward(target.weights, golden["ids"])
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-4)
    assert np.sqrt(np.mean((np.asarray(logits) - golden["logits"]) ** 2)) < 1e-5


def test_boundaries_equal_transformers(case: tuple[LoadedTarget, dict[str, np.ndarray]]) -> None:
    """Every boundary, from the embedding to the stream before the final norm, in any order."""
    target, golden = case
    boundaries = tuple(reversed(range(target.config.num_layers + 1)))
    _, feature = forward(target.weights, golden["ids"][:1], boundaries)
    for b, part in zip(boundaries, jnp.split(feature[0], len(boundaries), axis=-1), strict=True):
        expected = golden[f"boundary_{b}"]
        scale = max(1.0, float(np.sqrt(np.mean(expected**2))))  # the stream grows, rounding with it
        np.testing.assert_allclose(part, expected, atol=1e-4 * scale)


def test_cached_decoding_equals_one_forward(
    case: tuple[LoadedTarget, dict[str, np.ndarray]],
) -> None:
    """A prefill, then blocks of 1, 4 and 9 rows at different positions of two sequences."""
    target, golden = case
    ids = jnp.asarray(golden["ids"])

    @jax.jit
    def block(
        target: Frozen[Target], rows: jax.Array, positions: jax.Array, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        model = target.merge()
        x, _, cache = model(rows, positions, cached(cache, positions))
        return model.logits(x), cache

    cache = KVCache.zeros(target.config, 2, 128, jnp.float32, block=20)
    starts = np.array([0, 0])
    for count in (20, 1, 4, 9):
        positions = jnp.asarray(starts)[:, None] + jnp.arange(count)
        rows = jnp.take_along_axis(ids, positions, axis=1)
        logits, cache = block(target.weights, rows, positions, cache)
        expected = np.take_along_axis(golden["logits"], np.asarray(positions)[..., None], axis=1)
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        starts = starts + count - np.array([0, 7] if count == 20 else [0, 0])  # row 1 goes back


@pytest.mark.parametrize("exact", [False, True])
def test_greedy_tokens_equal_transformers(
    case: tuple[LoadedTarget, dict[str, np.ndarray]], exact: bool
) -> None:
    target, golden = case
    config = type(target.config).from_json({**target.config.to_json(), "eos_token_ids": []})
    target = LoadedTarget(config, target.weights, None, target.path)
    out = peagle_jax.generate(target, [golden["prompt"].tolist()], max_new_tokens=64, exact=exact)
    assert out[0].token_ids == golden["greedy"].tolist()
    assert out[0].finish_reason == "length"


def test_smollm2_logits_equal_transformers(demo_target: LoadedTarget) -> None:
    golden = np.load(GOLDEN / "smollm2.npz")
    ids = np.concatenate([golden["prompt_0"], golden["greedy_0"]])[None]
    logits = forward(demo_target.weights, ids)[0][0, golden["logits_positions"]]
    np.testing.assert_allclose(logits, golden["logits"], atol=1e-4)


def test_smollm2_greedy_tokens_equal_transformers(demo_target: LoadedTarget) -> None:
    """20 chat prompts of up to 128 tokens; the chat template gives the same prompt ids too."""
    golden = np.load(GOLDEN / "smollm2.npz")
    lines = (ROOT / "examples" / "chat_prompts.jsonl").read_text().splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    out = peagle_jax.generate(demo_target, chats, max_new_tokens=128, batch_size=4)
    assert len(out) == 20
    for index, completion in enumerate(out):
        assert completion.prompt_token_ids == golden[f"prompt_{index}"].tolist()
        assert completion.token_ids == golden[f"greedy_{index}"].tolist()


def test_native_checkpoint_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hugging Face folder is converted into the cache folder at the first load only."""
    monkeypatch.setenv("PEAGLE_JAX_CACHE", str(tmp_path))
    source = GOLDEN / "targets" / "llama_tied"
    first = peagle_jax.load_target(source)
    stamp = first.path.stat().st_mtime_ns
    assert peagle_jax.load_target(source).path.stat().st_mtime_ns == stamp
    assert first.path.is_relative_to(tmp_path)
    assert first.config.eos_token_ids == (2, 3, 5)
