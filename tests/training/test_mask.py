"""Training attention by the kernels, simulated, against the blocks of XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.kernels import Implementation
from peagle_jax.models import KVCache
from peagle_jax.training.cod import CodConfig, sample
from peagle_jax.training.mask import Rows, among

LENGTH = 24
IMPLEMENTATIONS: tuple[Implementation, ...] = ("pallas", "xla")


def rows_and_weights(seed: int) -> tuple[Rows, list[jax.Array]]:
    """Two documents and padding, and random queries, keys, values and slopes of the output."""
    ids = jnp.asarray(np.repeat([0, 1, -1], [LENGTH - 11, 8, 3]), jnp.int32)
    rng = np.random.default_rng(seed)
    supervised = jnp.asarray(rng.random(LENGTH) < 0.9)
    rows = Rows.of(sample(jax.random.key(seed), supervised, ids, CodConfig(4)), ids)
    count = rows.anchors.shape[0]
    shapes = (1, count, 2, 16), *[(1, 1, count, 16)] * 2, (1, count, 2, 16)
    return rows, [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("segments", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kernels_give_the_values_and_gradients_of_xla(segments: bool) -> None:
    """Of all rows, and as the partitions take them: real rows, then the others over their keys."""
    rows, (q, k, v, slopes) = rows_and_weights(0)
    first, rest = (
        jax.tree.map(lambda x, s=s: x[s], rows) for s in (np.s_[:LENGTH], np.s_[LENGTH:])
    )

    def output(implementation: Implementation, *qkv: jax.Array) -> jax.Array:
        q, k, v = qkv
        if not segments:
            return among(rows, None, implementation)(0, q, k, v, 5, None)[0]
        cache = KVCache((k[:, :, :LENGTH],), (v[:, :, :LENGTH],))
        real, deep = (among(*x, implementation) for x in ((first, None), (rest, (first, cache))))
        out = [
            real(0, q[:, :LENGTH], cache.keys[0], cache.values[0], 5, None)[0],
            deep(0, q[:, LENGTH:], k[:, :, LENGTH:], v[:, :, LENGTH:], 5, None)[0],
        ]
        return jnp.concatenate(out, axis=1)

    def run(implementation: Implementation) -> tuple[jax.Array, ...]:
        def both(slopes: jax.Array, *qkv: jax.Array) -> tuple[jax.Array, ...]:
            out, pull = jax.vjp(lambda *qkv: output(implementation, *qkv), *qkv)
            return out, *pull(slopes)

        return jax.jit(both)(slopes, q, k, v)

    for one, other in zip(run("pallas"), run("xla"), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_sinks_are_left_to_xla() -> None:
    rows, (q, k, v, _) = rows_and_weights(1)
    sinks = jnp.asarray([0.5, -2.0])
    outs = (among(rows, None, how)(0, q, k, v, None, sinks)[0] for how in IMPLEMENTATIONS)
    np.testing.assert_array_equal(*outs)
