"""COD sampling: which (anchor, depth) elements of a packed row are trained on.

An element (a, d) is a prediction made d mask slots after the real row a. All rows are elements of
depth 0; of the deeper ones a random part is kept, nested: (a, d) only where (a, d - 1) is kept
(arXiv 2602.01469, section 2; PARD, arXiv 2504.18583, calls it conditional drop-token).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Elements:
    """Elements of one packed row of S tokens, by depth and then by anchor.

    The first S are the row itself (depth 0, anchors 0..S-1). Chains are closed downwards: with
    (a, d) come (a, 0) .. (a, d - 1). Slots that are not used have anchor 0.

    Attributes:
      anchors: `[n]` int32, the row a whose token and feature are the last that the element knows.
      depths: `[n]` int32, mask slots after the anchor, 0..K-1.
      valid: `[n]` bool, False for padding of the packed row and for slots that are not used.
    """

    anchors: jax.Array
    depths: jax.Array
    valid: jax.Array

    @property
    def rows(self) -> jax.Array:
        """`[n]`, a + d: the row of the target's answer, and the RoPE position."""
        return self.anchors + self.depths

    def __getitem__(self, index: slice | jax.Array) -> "Elements":
        """Returns the elements at these indices."""
        return Elements(self.anchors[index], self.depths[index], self.valid[index])


@dataclasses.dataclass(frozen=True)
class CodConfig:
    """How many elements each depth keeps.

    Attributes:
      num_depths: K, depths 0..K-1.
      ratio: r, what a depth keeps of the one before it. The paper's 0.8.
      ratio_floor: of the seeds no depth keeps a smaller part. Every public trainer's 0.2, which
        8 depths at 0.8 do not reach.
      max_anchors: at most so many seeds are drawn, or None for every supervised row.
    """

    num_depths: int
    ratio: float = 0.8
    ratio_floor: float = 0.2
    max_anchors: int | None = None

    def __post_init__(self) -> None:
        if self.num_depths < 1:
            raise ValueError(f"num_depths must be at least 1, got {self.num_depths}")
        if not 0 < self.ratio <= 1 or not 0 <= self.ratio_floor <= 1:
            raise ValueError(
                f"ratio ({self.ratio}) and ratio_floor ({self.ratio_floor}) must be in 0..1"
            )
        if self.max_anchors is not None and self.max_anchors < 1:
            raise ValueError(f"max_anchors must be at least 1 or None, got {self.max_anchors}")

    def counts(self, length: int) -> np.ndarray:
        """Returns how many elements each depth wants, `[K, S + 1]` by number of seeds."""
        seeds = np.arange(length + 1)
        # In Python's floats, as the published code counts; float32 rounds a few products up.
        rates = [max(self.ratio**d, self.ratio_floor) for d in range(self.num_depths)]
        wanted = [np.floor((seeds - d) * rate) for d, rate in enumerate(rates)]
        return np.maximum(wanted, 0).astype(np.int32)

    def slots(self, length: int) -> tuple[int, ...]:
        """Returns the slots of each depth, enough for any supervision of S rows."""
        most = length if self.max_anchors is None else min(length, self.max_anchors)
        deep = self.counts(length)[1:, most]
        return (length, *(min(int(n), max(length - d, 0)) for d, n in enumerate(deep, 1)))

    def bound(self, length: int) -> int:
        """Returns n, the elements (used or not) of a packed row of S tokens."""
        return sum(self.slots(length))


@functools.partial(jax.jit, static_argnames="config")
def sample(
    key: jax.Array, loss_mask: jax.Array, document_ids: jax.Array, config: CodConfig
) -> Elements:
    """Draws the elements of one packed row.

    The seeds are the supervised rows p, or a random part of them; a seed is the first row that
    the chain of anchor p - 1 skips. Depth d keeps `floor((seeds - d) max(r^d, floor))` chains, all
    if there are fewer, drawn uniformly from those that depth d - 1 kept and whose row a + d is
    supervised and of the anchor's document.

    Args:
      key: random key.
      loss_mask: `[S]` bool, the supervised rows.
      document_ids: `[S]` int32, the row's document, -1 for padding.
      config: depths, ratios and bound of the seeds; static.

    Returns:
      `config.bound(S)` elements.
    """
    length, depths = loss_mask.shape[0], config.num_depths
    # One order serves all draws: among the chains that it puts first, theirs is again uniform.
    order = jax.random.permutation(key, length)

    def first(candidates: jax.Array, count: jax.Array | int) -> jax.Array:
        """Keeps `count` of the candidates `[S]`, those that come first in the order."""
        ordered = candidates[order]
        kept = ordered & (jnp.cumsum(ordered) <= count)
        return jnp.zeros_like(candidates).at[order].set(kept)

    # Chains are indexed by their first skipped row s = a + 1. There is none of row 0.
    supervised = loss_mask.astype(bool) & (document_ids >= 0)
    most = length if config.max_anchors is None else config.max_anchors
    chains = first(supervised, most)  # [S]
    wanted = jnp.asarray(config.counts(length))[:, jnp.sum(chains)]  # [K]
    anchor_documents = jnp.concatenate([jnp.full((1,), -2, jnp.int32), document_ids[:-1]])
    # Row s + d - 1, the one that (a, d) answers for, of every s.
    later_supervised = jnp.pad(supervised, (0, depths))
    later_documents = jnp.pad(document_ids, (0, depths), constant_values=-1)

    everything = jnp.arange(length, dtype=jnp.int32)
    anchors, valid = [everything], [document_ids >= 0]
    slots = config.slots(length)
    for depth in range(1, depths):
        row = slice(depth - 1, depth - 1 + length)
        pool = chains & later_supervised[row] & (later_documents[row] == anchor_documents)
        chains = first(pool, wanted[depth])
        (found,) = jnp.nonzero(chains, size=slots[depth], fill_value=0)
        anchors.append(jnp.maximum(found - 1, 0).astype(jnp.int32))
        valid.append(found > 0)
    each = np.repeat(np.arange(depths, dtype=np.int32), slots)
    return Elements(jnp.concatenate(anchors), jnp.asarray(each), jnp.concatenate(valid))
