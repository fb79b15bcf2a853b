"""The flat forward and its mask against the published speculators package."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import NAMES, ORACLE, elements_of, head_of, load, row_of, teacher_of

from peagle_jax.models.layers import Attend
from peagle_jax.training import flat_inputs
from peagle_jax.training import mask as mask_module
from peagle_jax.training.cod import CodConfig, Elements, sample
from peagle_jax.training.mask import Rows, among, context_table, sees, sees_by_table


@pytest.mark.parametrize("batch", ["pack", "draft_step"])
@pytest.mark.parametrize("name", NAMES)
def test_mask_equals_speculators(name: str, batch: str) -> None:
    golden = load(ORACLE / name / f"{batch}.npz")
    rows = Rows.of(elements_of(golden), jnp.asarray(golden["in.document_ids"]))
    windows = {"flat.mask": None, "flat.mask_sliding": 6}
    for key, window in windows.items():
        if key not in golden:
            continue
        mask, expected = np.asarray(sees(rows, rows, window)), golden[key]
        real = expected.any(axis=1)
        np.testing.assert_array_equal(mask[real], expected[real])
        assert real.sum() < len(real) or batch == "draft_step"
        np.testing.assert_array_equal(mask[~real], np.eye(len(mask), dtype=bool)[~real])


def random_rows(length: int, depths: int, seed: int) -> tuple[Elements, Rows]:
    """Three documents and padding, with rows of all depths and unused slots."""
    ids = jnp.asarray(np.repeat([0, 1, 2, -1], [length - 17, 9, 5, 3]), jnp.int32)
    supervised = jnp.asarray(np.random.default_rng(seed).random(length) < 0.8)
    elements = sample(jax.random.key(seed), supervised, ids, CodConfig(depths))
    assert not elements.valid[length:].all()
    return elements, Rows.of(elements, ids)


@pytest.mark.parametrize("window", [None, 4])
def test_mask_from_a_longer_rows_table_and_in_blocks(window: int | None) -> None:
    """Bit for bit what the rule says, whatever the row's length and the block."""
    longest = context_table(40, 6, window)
    for length in (23, 40):
        _, rows = random_rows(length, 4, length)
        direct = np.asarray(sees(rows, rows, window))
        np.testing.assert_array_equal(
            context_table(length, 6, window), longest[:, :length, :length]
        )
        np.testing.assert_array_equal(sees_by_table(longest, rows, rows, length), direct)
        some, others = (jax.tree.map(lambda x, s=s: x[s], rows) for s in (np.s_[5:41], np.s_[9:50]))
        np.testing.assert_array_equal(sees(some, others, window), direct[5:41, 9:50])
        assert direct.any(axis=1).all()


def test_the_rule_by_hand() -> None:
    """Rows 0..3, chains of anchors 1 and 2, a window of 2; then the second document apart."""
    anchors, depths = [0, 1, 2, 3, 1, 2, 1], [0, 0, 0, 0, 1, 1, 2]
    elements = Elements(jnp.array(anchors), jnp.array(depths), jnp.ones(7, bool))
    rows = Rows.of(elements, jnp.zeros(4, jnp.int32))
    lists = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 2, 5], [0, 1, 4, 6]]
    assert [list(np.flatnonzero(r)) for r in sees(rows, rows)] == lists
    # (1, 2) is at position 3: rows 2 and 3 are in its window, but only its anchor is its own.
    lists = [[0], [0, 1], [1, 2], [2, 3], [1, 4], [2, 5], [1, 4, 6]]
    assert [list(np.flatnonzero(r)) for r in sees(rows, rows, 2)] == lists
    rows = Rows.of(elements, jnp.array([0, 0, 1, 1]))
    lists = [[0], [0, 1], [2], [2, 3], [0, 1, 4], [2, 5], [0, 1, 4, 6]]
    assert [list(np.flatnonzero(r)) for r in sees(rows, rows)] == lists


@pytest.mark.parametrize("block_bytes", [1 << 26, 1 << 14])
@pytest.mark.parametrize("name", NAMES)
def test_forward_equals_speculators(
    name: str, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, projections, final states and logits; in one block of queries and in several."""
    monkeypatch.setattr(mask_module, "BLOCK_BYTES", block_bytes)
    golden, head = load(ORACLE / name / "pack.npz"), head_of(name, tmp_path)
    inputs = flat_inputs(head, row_of(golden), elements_of(golden))
    real = golden["flat.mask"].any(axis=1)  # rows of padding mean nothing
    assert real.sum() == 88
    np.testing.assert_array_equal(inputs.tokens, golden["flat.ids"])
    np.testing.assert_array_equal(inputs.positions, golden["flat.positions"])
    np.testing.assert_allclose(inputs.hidden[real], golden["flat.fc_out"][real], atol=1e-4)
    embedded = head.embedding[...][inputs.tokens]
    np.testing.assert_allclose(embedded[real], golden["flat.embeds"][real], atol=1e-6)
    x, _ = jax.jit(lambda: inputs.forward(head))()
    assert jnp.isfinite(x).all()
    final = head.final_norm(x)
    np.testing.assert_allclose(final[real], golden["final.norm_out"][real], atol=1e-4)
    logits = head.logits(x, None)  # type: ignore[arg-type]
    np.testing.assert_allclose(logits[real], golden["logits"][real], atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_target_head_equals_speculators(name: str, tmp_path: Path) -> None:
    golden, head = load(ORACLE / name / "pack.npz"), head_of(name, tmp_path)
    row, elements = row_of(golden), elements_of(golden)
    logits = teacher_of(name, head).logits(row.states[elements.rows])
    np.testing.assert_allclose(logits, golden["targets"], atol=1e-4)


@pytest.mark.slow
def test_blocks_and_context_give_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention at once, in blocks of queries, and of deep rows over given keys."""
    length = 29
    _, rows = random_rows(length, 4, 3)
    count = rows.anchors.shape[0]
    rng = np.random.default_rng(0)
    queries = jnp.asarray(rng.standard_normal((1, count, 4, 8)), jnp.float32)
    keys, values = (
        jnp.asarray(rng.standard_normal((1, 2, count, 8)), jnp.float32) for _ in range(2)
    )
    weights = jnp.asarray(rng.standard_normal((1, count, 4, 8)), jnp.float32)

    def run(attend: Attend, *qkv: jax.Array) -> jax.Array:
        return attend(0, *qkv, 5, None)[0]

    def whole(*qkv: jax.Array) -> jax.Array:
        return jnp.sum(weights * run(among(rows), *qkv))

    def halves(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        first, rest = (
            jax.tree.map(lambda x, s=s: x[s], rows) for s in (np.s_[:length], np.s_[length:])
        )
        cache = mask_module.KVCache((k[:, :, :length],), (v[:, :, :length],))
        out = [
            run(among(first), q[:, :length], cache.keys[0], cache.values[0]),
            run(among(rest, (first, cache)), q[:, length:], k[:, :, length:], v[:, :, length:]),
        ]
        return jnp.sum(weights * jnp.concatenate(out, axis=1))

    each = []
    for function, block in ((whole, 1 << 26), (whole, 1 << 13), (halves, 1 << 26), (halves, 5000)):
        monkeypatch.setattr(mask_module, "BLOCK_BYTES", block)
        each.append(jax.jit(jax.value_and_grad(function, (0, 1, 2)))(queries, keys, values))
    for other in each[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), each[0], other)
