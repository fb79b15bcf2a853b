"""The rows that a drafter is trained on: real rows, then the mask slots of the sampled elements.

All elements of a packed row go through the drafter in one pass (`training.md`, sections 3 and 4).
"""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp

from peagle_jax.models import Drafter, KVCache, Target
from peagle_jax.training.cod import Elements
from peagle_jax.training.mask import Rows, among

# A head in training has an embedding and an lm_head of its own, and never looks at the target's.
NO_TARGET = cast(Target, None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRow:
    """Documents packed into one row of S tokens, shifted: row i of a document with tokens x.

    Attributes:
      tokens: `[S]` int32, x[i + 1].
      features: `[S, F]`, the target's feature of token i.
      states: `[S, H]`, the target's residual stream of token i + 1 after the last layer, before
        the final norm; its logits are the answer of row i.
      loss_mask: `[S]` bool, whether token i + 1 is supervised.
      document_ids: `[S]` int32, -1 for padding.
    """

    tokens: jax.Array
    features: jax.Array
    states: jax.Array
    loss_mask: jax.Array
    document_ids: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What T elements feed to the drafter.

    Attributes:
      tokens: `[T]` int32.
      hidden: `[T, H]`, projected features and mask slots.
      positions: `[T]` int32, a + d, counted in the packed row.
      rows: who sees whom.
    """

    tokens: jax.Array
    hidden: jax.Array
    positions: jax.Array
    rows: Rows

    def forward(
        self, head: Drafter, context: tuple[Rows, KVCache] | None = None, remat: bool = False
    ) -> tuple[jax.Array, KVCache]:
        """Returns the residual streams `[T, H]` and the keys and values, of batch 1."""
        x, kept = head(
            self.tokens[None],
            self.hidden[None],
            self.positions[None],
            among(self.rows, context),
            NO_TARGET,
            remat,
        )
        return x[0], kept


def real_inputs(head: Drafter, row: PackedRow, elements: Elements) -> Inputs:
    """Returns the inputs of the packed row's own elements, the S of depth 0."""
    rows = Rows.of(elements, row.document_ids)
    return Inputs(row.tokens, head.project(row.features), elements.rows, rows)


def slot_inputs(head: Drafter, row: PackedRow, elements: Elements) -> Inputs:
    """Returns the inputs of deeper elements, each a mask slot."""
    count = elements.anchors.shape[0]
    hidden = head.project(head.mask_hidden[...])  # [H], the same in every slot
    token = cast(int, head.config.mask_token_id)
    return Inputs(
        jnp.full((count,), token, jnp.int32),
        jnp.broadcast_to(hidden, (count, hidden.shape[0])),
        elements.rows,
        Rows.of(elements, row.document_ids),
    )


def flat_inputs(head: Drafter, row: PackedRow, elements: Elements) -> Inputs:
    """Returns the inputs of all elements `[n]` of a packed row."""
    length = row.tokens.shape[0]
    parts = real_inputs(head, row, elements[:length]), slot_inputs(head, row, elements[length:])
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
