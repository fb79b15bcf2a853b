"""EAGLE-3's unroll against the published speculators package, and against drafting itself."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DRAFTER, GOLDEN, TARGET, random_drafter, random_target
from flax import nnx
from oracle import ORACLE, gradient_names, load, row_of, teacher_of

import peagle_jax
from peagle_jax.convert import to_native
from peagle_jax.decoding.draft import AutoregressiveDraft, Committed, PromptRows
from peagle_jax.models import Drafter, Frozen, Target
from peagle_jax.models.layers import RMSNorm
from peagle_jax.training import LOSSES, Metrics, PackedRow, Parts, TargetHead, split, unroll
from peagle_jax.training import mask as mask_module
from peagle_jax.training.trainable import MASK_ROW

SOURCES = {"llama": "llama_reduced", "qwen3": "qwen3_sliding_fcnorm_fullvocab"}
STEPS = 3
EAGLE3 = dataclasses.replace(DRAFTER, num_layers=1, sliding_windows=(None,), mask_token_id=None)


@functools.partial(jax.jit, static_argnames=("steps", "chunk"))
def step(
    parts: Parts, row: PackedRow, teacher: TargetHead, decay: float, steps: int, chunk: int
) -> tuple[Metrics, dict[str, jax.Array], jax.Array]:
    """Metrics, gradients and the residual streams `[K * S, H]`."""
    metrics, slopes = unroll.gradients(
        parts.build,
        parts.trainable,
        row,
        teacher,
        loss=LOSSES["kl_div"],
        num_steps=steps,
        step_decay=decay,
        chunk=chunk,
    )
    elements = unroll.chains(row.document_ids, steps)
    x = unroll.streams(parts.build(parts.trainable), row, elements)
    return metrics, slopes, jnp.concatenate(x)


def head_of(name: str, folder: Path) -> Drafter:
    to_native(GOLDEN / "oracle_eagle3" / name, folder / "native")
    return peagle_jax.load_drafter(folder / "native").weights.merge()


@pytest.mark.parametrize("name", SOURCES)
def test_losses_and_every_gradient_equal_speculators(name: str, tmp_path: Path) -> None:
    """Of elements, of steps and in all, at steps that weigh 0.8 of the one before, and alike."""
    golden = load(GOLDEN / "oracle_eagle3" / name / "golden.npz")
    head, row = head_of(name, tmp_path), row_of(load(ORACLE / SOURCES[name] / "pack.npz"))
    teacher, decay = teacher_of(SOURCES[name], head), float(golden["ttt_step_loss_decay"])
    length = row.tokens.shape[0]
    # The last chunk is not full.
    metrics, slopes, x = step(split(head, lm_head=True), row, teacher, decay, STEPS, chunk=30)

    elements = unroll.chains(row.document_ids, STEPS)
    assert jnp.isfinite(x).all()  # in rows of padding too
    answers = teacher.logits(row.states[elements.rows])
    losses = LOSSES["kl_div"](head.logits(x, no_target()), answers).reshape(STEPS, length)
    valid = np.asarray(elements.valid).reshape(STEPS, length)
    assert valid.sum(axis=1).tolist() == [38, 36, 34]
    np.testing.assert_allclose(losses[valid], golden["elem"][valid], rtol=1e-4, atol=1e-5)

    np.testing.assert_allclose(metrics.mean_loss, golden["loss"], rtol=1e-4)
    np.testing.assert_array_equal(metrics.total, golden["full_acc_total"])
    np.testing.assert_array_equal(metrics.survivors, golden["full_acc_sum"])
    assert (golden["full_acc_sum"] > 0).all()
    assert 1.3 < metrics.acceptance_length < 3
    charged = valid & np.stack([np.pad(row.loss_mask, (0, j))[j:] for j in range(STEPS)])
    for j in range(STEPS):
        own = decay**j * losses[j][charged[j]].mean()
        np.testing.assert_allclose(own, golden["step_loss"][j], rtol=1e-4)

    ours = gradient_names(head) | {"lm_head": ["lm_head.weight"]}
    del ours["embedding"], ours["mask_hidden"]  # the first is frozen, as in the package
    assert set(slopes) == set(ours)
    theirs = [name for names in ours.values() for name in names]
    assert {f"grad.{name}" for name in theirs} == {key for key in golden if key[:5] == "grad."}
    for name, names in ours.items():
        expected = np.concatenate([golden[f"grad.{n}"] for n in names])
        expected = expected.reshape(slopes[name].shape)
        scale = np.abs(expected).max()
        assert scale > 0
        np.testing.assert_allclose(slopes[name], expected, rtol=1e-4, atol=1e-4 * scale)


def test_chains_end_with_their_document(tmp_path: Path) -> None:
    """What speculators charges beyond: rows at a document's end, for the next one's answers."""
    golden = load(GOLDEN / "oracle_eagle3" / "llama" / "golden.npz")
    head, row = head_of("llama", tmp_path), row_of(load(ORACLE / SOURCES["llama"] / "pack.npz"))
    row = dataclasses.replace(row, loss_mask=row.document_ids >= 0)
    teacher = teacher_of(SOURCES["llama"], head)
    metrics, _, _ = step(split(head, lm_head=True), row, teacher, 0.5, STEPS, chunk=30)
    ids, total = np.asarray(row.document_ids), 0.0
    for j, losses in enumerate(golden["elem"]):
        inside = np.array([i >= 0 and i in ids[a + j : a + j + 1] for a, i in enumerate(ids)])
        assert metrics.total[j] == inside.sum() == 38 - 2 * j
        total += 0.5**j * losses[inside].mean()
    np.testing.assert_allclose(metrics.mean_loss, total, rtol=1e-4)


def test_chains_by_hand() -> None:
    elements = unroll.chains(jnp.array([0, 0, 0, 1, 1, -1]), 3)
    valid = np.asarray(elements.valid).reshape(3, 6)
    np.testing.assert_array_equal(valid[0], [1, 1, 1, 1, 1, 0])
    np.testing.assert_array_equal(valid[1], [1, 1, 0, 1, 0, 0])
    np.testing.assert_array_equal(valid[2], [1, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(elements.anchors[:6], range(6))  # the row itself, with padding
    np.testing.assert_array_equal(elements.anchors[elements.valid][5:], [0, 1, 3, 0])
    np.testing.assert_array_equal(elements.depths, np.repeat(range(3), 6))
    assert (elements.rows < 6).all()


def no_target() -> Target:
    """A head with its own embedding and lm_head never looks at the target."""
    return None  # type: ignore[return-value]


HEADS = {
    "full": EAGLE3,
    "sliding": dataclasses.replace(
        DRAFTER,
        mask_token_id=None,
        sliding_windows=(5, None),
        qk_norm=True,
        norm_output=True,
        norm_before_residual=True,
    ),
}


def drafted(
    proposer: AutoregressiveDraft, tokens: jax.Array, features: jax.Array, counts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Drafts `[B, K]` after the first `counts` rows, and the logits `[B, K, D_V]` they come from.

    Args:
      proposer: of K drafts.
      tokens: `[B, T]` int32, row p holds that at p + 1.
      features: `[B, T + K, F]`.
      counts: `[B]`.
    """
    seen: list[jax.Array] = []
    logits = Drafter.logits
    batch, longest = tokens.shape
    state = proposer.start(no_target(), proposer.new_cache(batch, 32, jnp.float32))
    positions = jnp.broadcast_to(jnp.arange(longest), (batch, longest))
    prompt = PromptRows(tokens, features[:, :longest], positions, counts - 1)
    state = proposer.read(no_target(), prompt, state, empty=True)
    ahead = (counts - 1)[:, None] + jnp.arange(proposer.num_drafts + 1)
    committed = Committed(
        jnp.pad(tokens, ((0, 0), (1, 32))),
        counts + 1,
        jnp.zeros_like(counts),
        jnp.take_along_axis(features, ahead[..., None], axis=1),
        jnp.int32(0),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Drafter, "logits", lambda self, *args: seen.append(logits(self, *args)) or seen[-1]
        )
        drafts, _, _ = proposer.propose(no_target(), state, committed, None)
    return drafts, jnp.concatenate(seen, axis=1)


@pytest.mark.parametrize("name", HEADS)
def test_steps_are_those_of_drafting(name: str) -> None:
    """Two sequences are drafted for, then packed with their drafts: the same K logits.

    The rows of the drafts have features in training, which drafting does not know yet.
    """
    loaded, steps, counts, batch = random_drafter(HEADS[name]), 4, (11, 8), 2
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 96, (batch, max(counts))), jnp.int32)
    features = rng.standard_normal((batch, max(counts) + steps, loaded.config.feature_size))
    features = jnp.asarray(features, jnp.float32)
    proposer = AutoregressiveDraft(loaded.weights, steps, loaded.config.aux_boundaries)
    drafts, expected = jax.jit(drafted)(proposer, tokens, features, jnp.array(counts))

    total = [count + steps for count in counts]
    texts = [jnp.concatenate([tokens[b, :n], drafts[b]]) for b, n in enumerate(counts)]
    row = PackedRow(
        jnp.concatenate(texts),
        jnp.concatenate([features[b, :n] for b, n in enumerate(total)]),
        jnp.zeros((sum(total), 32)),
        jnp.ones(sum(total), bool),
        jnp.repeat(jnp.arange(batch), jnp.array(total)),
    )

    @jax.jit
    def unrolled(row: PackedRow) -> jax.Array:  # [S, K, D_V]
        head = loaded.weights.merge()
        x = unroll.streams(head, row, unroll.chains(row.document_ids, steps))
        return head.logits(jnp.stack(x, axis=1), no_target())

    anchors = jnp.array([counts[0] - 1, total[0] + counts[1] - 1])
    np.testing.assert_allclose(unrolled(row)[anchors], expected, atol=1e-4)
    assert jnp.std(expected[:, 1:] - expected[:, :-1]) > 0.2  # no two steps alike


def toy() -> tuple[Drafter, PackedRow, TargetHead]:
    """A head that shares both tables, with its target's, and a row of two documents."""
    config = dataclasses.replace(
        EAGLE3, draft_vocab_size=96, own_embedding=False, own_lm_head=False
    )
    rng, length = np.random.default_rng(1), 40
    row = PackedRow(
        jnp.asarray(rng.integers(0, 96, length), jnp.int32),
        jnp.asarray(rng.standard_normal((length, config.feature_size)), jnp.float32),
        jnp.asarray(rng.standard_normal((length, 32)), jnp.float32),
        jnp.asarray(rng.random(length) < 0.8),
        jnp.asarray(np.repeat([0, 1, -1], [20, 15, 5]), jnp.int32),
    )
    norm = Frozen.of(RMSNorm(32, 1e-5, jnp.float32))
    head = random_drafter(config).weights.merge()
    return head, row, TargetHead(norm, jax.random.normal(jax.random.key(1), (96, 32)))


def test_what_is_shared_is_the_targets_and_does_not_train() -> None:
    head, _, _ = toy()
    target = random_target().weights.merge()
    parts = split(head, target=target)
    assert parts.frozen["embedding"] is target.embedding.get_value()  # not copied
    assert parts.frozen["lm_head"] is target.lm_head.get_value()
    assert not set(parts.trainable) & {"embedding", "lm_head", MASK_ROW}
    own = random_drafter(dataclasses.replace(EAGLE3, draft_vocab_size=96)).weights.merge()
    nnx.update(own, nnx.state(head))
    own.embedding.set_value(target.embedding[...])
    own.lm_head.set_value(target.head)
    built = parts.build(parts.trainable)
    assert built.config == own.config
    each = [dict(nnx.to_flat_state(nnx.state(module))) for module in (built, own)]
    assert set(each[0]) == set(each[1])
    for path, variable in each[0].items():
        np.testing.assert_array_equal(variable.get_value(), each[1][path].get_value())
    mask = dataclasses.replace(head.config, mask_token_id=95)
    parallel = split(random_drafter(mask).weights.merge(), target=target)
    assert set(parallel.trainable) == set(parts.trainable) | {"mask_hidden"}


def test_a_tied_target_lends_one_table() -> None:
    head, _, _ = toy()
    config = dataclasses.replace(TARGET, tie_word_embeddings=True)
    parts = split(head, target=random_target(config).weights.merge())
    assert parts.frozen["embedding"] is parts.frozen["lm_head"]


@pytest.mark.parametrize("table", ["embedding", "lm_head"])
def test_a_shared_table_cannot_train(table: str) -> None:
    config = dataclasses.replace(EAGLE3, draft_vocab_size=96, **{f"own_{table}": False})
    head, target = random_drafter(config).weights.merge(), random_target().weights.merge()
    with pytest.raises(ValueError, match="must be of its own"):
        split(head, target=target, **{table: True})
    with pytest.raises(ValueError, match="needs its target"):
        split(head)
    assert table not in split(head, target=target).trainable


@pytest.mark.parametrize("embedding", [None, False, True])
def test_the_embedding_trains_where_it_is_told_to(embedding: bool | None) -> None:
    trainable = split(random_drafter(EAGLE3).weights.merge(), embedding=embedding).trainable
    assert ("embedding" in trainable) == bool(embedding)
    assert MASK_ROW not in trainable and "lm_head" not in trainable


@pytest.mark.slow
def test_bfloat16() -> None:
    """Parameters and features in bfloat16: gradients too, and near those of float32."""
    head, row, teacher = toy()
    parts = split(head, target=random_target().weights.merge())
    exact, slopes, _ = step(parts, row, teacher, 0.8, 2, chunk=64)
    assert all(jnp.abs(slope).max() > 0 for slope in slopes.values())

    def short(tree: Parts | jax.Array) -> Parts | jax.Array:
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)

    short_row = dataclasses.replace(row, features=short(row.features))
    metrics, short_slopes, _ = step(short(parts), short_row, teacher, 0.8, 2, chunk=64)
    assert metrics.loss.dtype == jnp.float32
    np.testing.assert_allclose(metrics.mean_loss, exact.mean_loss, rtol=2e-2)
    for name, slope in short_slopes.items():
        assert slope.dtype == jnp.bfloat16
        apart = jnp.linalg.norm(slope.astype(jnp.float32) - slopes[name])
        assert apart < 0.1 * jnp.linalg.norm(slopes[name])


@pytest.mark.slow
def test_no_whole_scores_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiled gradient needs beside its arguments, in blocks of queries and at once."""
    head, row, teacher = toy()
    parts = split(head, target=random_target().weights.merge())
    row = jax.tree.map(lambda x: jnp.concatenate([x] * 25), row)
    row = dataclasses.replace(row, document_ids=jnp.zeros(1000, jnp.int32))
    scores = 4 * EAGLE3.num_heads * 1000 * 1000 * STEPS  # bytes of the last step's

    def temporaries(block_bytes: int) -> int:
        monkeypatch.setattr(mask_module, "BLOCK_BYTES", block_bytes)
        jax.clear_caches()  # of what was traced with other blocks
        lowered = step.lower(parts, row, teacher, 0.8, STEPS, chunk=50)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporaries(1 << 17) < scores
    assert temporaries(1 << 30) > 2 * scores
