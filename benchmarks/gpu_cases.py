"""The kernels' cases of `gpu.py`: inputs, references, rivals, and what a run has to do at least."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_kernels import Arrays, Case, Function, Rival, Work

from peagle_jax.kernels import (
    cod_attention,
    masked_attention,
    mxfp4_product,
    prefill_attention,
    verify_attention,
)
from peagle_jax.kernels.attention import xla_attention
from peagle_jax.models.quantized import unpack_mxfp4
from peagle_jax.training.mask import Rows, sees


@dataclasses.dataclass(frozen=True)
class Mode:
    """The dtype of rows, keys and values, and whether kernels are interpreted."""

    dtype: jnp.dtype
    interpret: bool


@dataclasses.dataclass(frozen=True)
class Attention:
    """Rows of sequences over circles of slots (`peagle_jax.kernels.flash`).

    Attributes:
      name: of the case; it begins with the kernel's, "verify" or "prefill".
      firsts: positions of the sequences' first rows.
      rows, heads, kv_heads, head_dim, slots: T, N, N_kv, D, S.
      window: positions that a row sees, or None.
      bases: positions in slot 0; None for those of a ring, p % S.
      counts: rows of each sequence that are its prompt's, or None.
      sinks: whether the heads have them.
      timed: else the case is only checked, with NaN in all slots that no row sees.
    """

    name: str
    firsts: tuple[int, ...]
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    slots: int
    window: int | None = None
    bases: tuple[int, ...] | None = None
    counts: tuple[int, ...] | None = None
    sinks: bool = False
    timed: bool = False

    def case(self, mode: Mode) -> Case:
        """Returns it for `Bench`."""
        verifies = self.name.startswith("verify")

        def kernel(
            q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any
        ) -> jax.Array:  # rest: first, base, counts, sinks
            first, base, counts, sinks = rest
            if verifies:
                return verify_attention(
                    q, k, v, first, base, self.window, sinks, interpret=mode.interpret
                )
            out = prefill_attention(
                q, k, v, first, base, counts, self.window, sinks, interpret=mode.interpret
            )
            return self._wanted(out, counts)

        def xla(q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> jax.Array:
            first, base, counts, sinks = rest
            positions = first[:, None] + jnp.arange(self.rows)
            held = self._held(first, base)
            own = not verifies and self.rows == self.slots
            out = xla_attention(q, k, v, positions, held, self.window, sinks, own)
            return self._wanted(out, counts)

        # Its rows see the first keys by their number, not the last ones: of a prompt the same, of a
        # verification all keys, some more than it needs; but with a window in a cache it would read
        # and compute what the window hides.
        has_cudnn = not mode.interpret and (not verifies or self.window is None)
        return Case(
            self.name,
            lambda key: self._inputs(key, mode.dtype),
            kernel,
            xla,
            self._work(mode.dtype) if self.timed else None,
            Rival(self._by_cudnn, in_order_of_slots) if has_cudnn else None,
        )

    def _inputs(self, key: jax.Array, dtype: jnp.dtype) -> Arrays:
        batch, keys = len(self.firsts), jax.random.split(key, 4)
        cached = batch, self.kv_heads, self.slots, self.head_dim
        q = jax.random.normal(keys[0], (batch, self.rows, self.heads, self.head_dim), dtype)
        k, v = (jax.random.normal(key, cached, dtype) for key in keys[1:3])
        first = np.asarray(self.firsts, np.int32)
        newest = first + self.rows - 1
        base = newest // self.slots * self.slots if self.bases is None else np.asarray(self.bases)
        counts = None if self.counts is None else np.asarray(self.counts, np.int32)
        if not self.timed:
            held = self._held(first, base)
            end = first + (self.rows if counts is None else counts)
            seen = (held >= 0) & (held < end[:, None])
            if self.window:
                seen &= held > first[:, None] - self.window
            k, v = (jnp.where(seen[:, None, :, None], x, jnp.nan) for x in (k, v))
        sinks = jax.random.normal(keys[3], (self.heads,)) if self.sinks else None
        numbers = (None if x is None else jnp.asarray(x, jnp.int32) for x in (first, base, counts))
        return q, k, v, *numbers, sinks

    def _held(self, first: Any, base: Any) -> Any:
        """Returns the positions in the slots `[B, S]`, negative for none."""
        slots = jnp.arange(self.slots)
        newest = (first + self.rows - 1 - base)[:, None]  # its slot
        return base[:, None] + slots - (slots > newest) * self.slots

    def _wanted(self, out: jax.Array, counts: jax.Array | None) -> jax.Array:
        if counts is None:
            return out
        return jnp.where((jnp.arange(self.rows) < counts[:, None])[..., None, None], out, 0)

    def _by_cudnn(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        causal = self.rows == self.slots
        window = (self.window - 1, 0) if self.window else None
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=causal, local_window_size=window, implementation="cudnn"
        )

    def _work(self, dtype: jnp.dtype) -> Work:
        batch, own = len(self.firsts), self.rows == self.slots
        most = self.window or self.slots
        if own:
            read, pairs = self.slots, sum(min(t + 1, most) for t in range(self.rows))
        else:
            read, pairs = min(self.slots, most + self.rows - 1), self.rows * min(self.slots, most)
        size = 2 * batch * self.head_dim * (self.rows * self.heads + read * self.kv_heads)
        flops = 4 * batch * self.heads * self.head_dim * pairs
        return Work(size * dtype.itemsize, flops)


def in_order_of_slots(q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> Arrays:
    """Returns queries, and keys and values `[B, S, N_kv, D]`, as cuDNN wants them."""
    del rest
    return q, k.swapaxes(1, 2), v.swapaxes(1, 2)


@dataclasses.dataclass(frozen=True)
class Training:
    """Elements of a packed row, attended to by `cod_attention`.

    Attributes:
      name: of the case, after "cod".
      real: rows of the packed row.
      depths: of the elements; each keeps seven tenths of the chains of the one before.
      heads, kv_heads, head_dim: N, N_kv, D.
      documents, padding: in the packed row.
      window: of the layer, or None.
      backward: whether gradients are asked for too.
      timed: or only checked.
    """

    name: str
    real: int
    depths: int
    heads: int
    kv_heads: int
    head_dim: int
    documents: int = 1
    padding: int = 0
    window: int | None = None
    backward: bool = True
    timed: bool = False

    def case(self, mode: Mode) -> Case:
        """Returns it for `Bench`."""
        elements = self._elements()
        length = elements.shape[1]

        def inputs(key: jax.Array) -> Arrays:
            queries, cached = (length, self.heads, self.head_dim), (length, self.head_dim)
            keys = jax.random.split(key, 4)
            q, slope = (jax.random.normal(k, queries, mode.dtype) for k in keys[:2])
            k, v = (jax.random.normal(k, (self.kv_heads, *cached), mode.dtype) for k in keys[2:])
            return q, k, v, slope, jnp.asarray(elements)

        def kernel(q: jax.Array, k: jax.Array, v: jax.Array, rows: jax.Array) -> jax.Array:
            return cod_attention(q, k, v, rows, rows, self.window, interpret=mode.interpret)

        def xla(q: jax.Array, k: jax.Array, v: jax.Array, rows: jax.Array) -> jax.Array:
            of = Rows(*rows)
            mask = sees(of, of, self.window)
            return masked_attention(q[None], k[None], v[None], mask[None])[0]

        def with_slopes(function: Function) -> Function:
            def both(*inputs: jax.Array) -> tuple[jax.Array, ...]:
                *qkv, slope, rows = inputs
                if not self.backward:
                    return (function(*qkv, rows),)
                out, pull = jax.vjp(lambda *qkv: function(*qkv, rows), *qkv)
                return out, *pull(slope)

            return both

        def feed(found: tuple[jax.Array, ...]) -> jax.Array:
            out, *slopes = found
            if not slopes:
                return out
            of_queries, *others = slopes
            shares = [x.astype(jnp.float32).sum() * 0 for x in (out, *others)]  # have to be made
            return (of_queries.astype(jnp.float32) + sum(shares)).astype(of_queries.dtype)

        pairs = int((elements[0] + elements[1] + 1).sum())  # of one document
        size = 2 * length * (self.heads + self.kv_heads) * self.head_dim * mode.dtype.itemsize
        work = Work(size, 4 * self.heads * self.head_dim * pairs)
        if self.backward:
            work = Work(4 * size, 18 * self.heads * self.head_dim * pairs)
        name = f"cod {self.name}, {length} rows"
        both = with_slopes(kernel), with_slopes(xla)
        return Case(name, inputs, *both, work if self.timed else None, feed=feed)

    def _elements(self) -> np.ndarray:
        """Returns anchors, depths and documents, `[3, n]` int32."""
        rng = np.random.default_rng(0)
        ids = np.sort(rng.integers(0, self.documents, self.real))
        ids[self.real - self.padding :] = -1
        anchors = [np.arange(self.real)]
        for depth in range(1, self.depths):
            left = anchors[-1][: self.real - depth]
            anchors.append(np.sort(rng.choice(left, max(1, 7 * len(left) // 10), replace=False)))
        anchor = np.concatenate(anchors)
        depths = np.repeat(np.arange(self.depths), [len(some) for some in anchors])
        alone = -1 - np.arange(len(anchor))  # padding, each row a document of its own
        documents = np.where(ids[anchor] < 0, alone, ids[anchor])
        return np.stack([anchor, depths, documents]).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Experts:
    """Blocks of rows times packed experts, by `mxfp4_product`.

    Attributes:
      name: of the case, after "mxfp4".
      blocks: of each expert in use; these are the experts 0, 1 and so on.
      experts, features, width: E, out, in.
      size: rows of a block.
      used: blocks that are computed, None for all; in a case that is only checked the others hold
        NaN.
      scales: the lowest and one more than the highest exponent.
      dtype: of the rows; None for the mode's.
      timed: or only checked.
    """

    name: str
    blocks: tuple[int, ...]
    experts: int
    features: int
    width: int
    size: int = 8
    used: int | None = None
    scales: tuple[int, int] = (118, 124)
    dtype: Any = None
    timed: bool = False

    @classmethod
    def chosen(
        cls, name: str, experts: int, k: int, rows: int, features: int, width: int
    ) -> "Experts":
        """Returns a timed case of rows that chose k experts each at random."""
        rng = np.random.default_rng(0)
        every = np.concatenate([rng.permutation(experts)[:k] for _ in range(rows)])
        _, amounts = np.unique(every, return_counts=True)
        return cls(name, tuple(-(-amounts // 8)), experts, features, width, timed=True)

    def case(self, mode: Mode) -> Case:
        """Returns it for `Bench`."""
        count = sum(self.blocks)
        used = count if self.used is None else self.used
        dtype = jnp.dtype(self.dtype or mode.dtype)

        def inputs(key: jax.Array) -> Arrays:
            keys, shape = jax.random.split(key, 3), (self.experts, self.features, self.width // 32)
            x = jax.random.normal(keys[0], (count, self.size, self.width), dtype)
            x = jnp.where(jnp.arange(count)[:, None, None] < used, x, jnp.nan)
            packed = jax.random.randint(keys[1], (*shape, 16), 0, 256, jnp.uint8)
            scales = jax.random.randint(keys[2], shape, *self.scales, jnp.uint8)
            ids = np.repeat(np.arange(len(self.blocks)), self.blocks)
            return x, jnp.asarray(ids, jnp.int32), jnp.int32(used), packed, scales

        def computed(out: jax.Array, used: jax.Array) -> jax.Array:
            return jnp.where(jnp.arange(count)[:, None, None] < used, out, 0)

        def kernel(x: jax.Array, ids: jax.Array, used: jax.Array, *weights: jax.Array) -> jax.Array:
            out = mxfp4_product(x, ids, used, *weights, interpret=mode.interpret)
            return computed(out, used)

        def xla(x: jax.Array, ids: jax.Array, used: jax.Array, *weights: jax.Array) -> jax.Array:
            packed, scales = weights
            unpacked = unpack_mxfp4(packed[ids], scales[ids], x.dtype)
            out = jnp.einsum(
                "bni,boi->bno", x, unpacked, precision="highest", preferred_element_type=jnp.float32
            )
            return computed(out, used)

        def feed(out: jax.Array) -> jax.Array:  # [B, N, out] -> [B, N, in], about as large as x
            return (out[..., : self.width] * (0.2 * (2880 / self.width) ** 0.5)).astype(dtype)

        def vary(i: jax.Array, x: jax.Array, ids: jax.Array, *rest: jax.Array) -> Arrays:
            return x, (ids + i * len(self.blocks)) % self.experts, *rest  # the next experts

        expert = self.features * self.width * 17 / 32
        flops = 2 * count * self.size * self.features * self.width
        work = Work(len(self.blocks) * expert, flops, cycle=self.experts * expert)
        name = f"mxfp4 {self.name}"
        return Case(name, inputs, kernel, xla, work if self.timed else None, feed=feed, vary=vary)
