"""The gradient of a packed row's loss, at once or segment by segment.

Sequence partitioning (paper, Algorithm 1) is gradient accumulation inside one packed row. The
published code gives each segment the real rows before it once more. Real rows never see a mask
slot, so here they go through the drafter once: every segment of mask slots reads their keys and
values, and the gradients of these, summed over the segments, go back through the real rows once.
What is in memory is the same, the S real rows and one segment; nothing is computed twice.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from peagle_jax.models import Drafter, KVCache
from peagle_jax.training.cod import Elements
from peagle_jax.training.flat import PackedRow, flat_inputs, real_inputs, slot_inputs
from peagle_jax.training.loss import EPSILON, ElementLoss, TargetHead, summed_loss
from peagle_jax.training.mask import Rows
from peagle_jax.training.metrics import Metrics, measure, supervised


def segments(deep: Elements, partitions: int, num_depths: int) -> tuple[Elements, jax.Array]:
    """Cuts mask slots into P segments of whole chains, alike in size.

    Chains are taken by anchor and a segment closes when it holds 1/P of all, so its size has a
    static bound wherever the anchors lie: a segment is longer by at most the rest of a chain.

    Args:
      deep: `[n]` elements of depth 1 and more, closed downwards.
      partitions: P.
      num_depths: K.

    Returns:
      elements `[P, C]`, unused slots not valid, and `[P, C]` int32, their places in `deep`, n for
      unused slots. C is at most n / P + K - 1.
    """
    count = deep.anchors.shape[0]
    share = max(1, -(-count // partitions))
    order = jnp.lexsort((deep.depths, deep.anchors, ~deep.valid))  # [n], chain after chain
    ordered = deep[order]
    place = jnp.arange(count, dtype=jnp.int32)
    begins = jnp.where(ordered.valid, place - (ordered.depths - 1), partitions * share)
    first = jnp.searchsorted(begins, share * jnp.arange(partitions + 1))  # [P + 1]
    slots = jnp.arange(share + max(num_depths - 2, 0))
    taken = first[:-1, None] + slots  # [P, C]
    used = taken < first[1:, None]
    index = jnp.where(used, order[jnp.minimum(taken, count - 1)], count).astype(jnp.int32)
    found = deep[jnp.minimum(index, count - 1)]
    return Elements(jnp.where(used, found.anchors, 0), found.depths, used), index


def gradients[Parameters](
    build: Callable[[Parameters], Drafter],
    parameters: Parameters,
    row: PackedRow,
    elements: Elements,
    teacher: TargetHead,
    *,
    loss: ElementLoss,
    num_depths: int,
    partitions: int = 1,
    chunk: int = 256,
    remat: bool = False,
) -> tuple[Metrics, Parameters]:
    """Returns one packed row's metrics and the gradient of its mean loss.

    The loss is summed over supervised elements and divided by their number + 1e-5, as speculators
    does it. To weigh rows by their elements, multiply by that number and divide by that of all.

    Args:
      build: makes the head of the parameters that train.
      parameters: any tree of float arrays.
      row: documents, features and the target's states.
      elements: `[n]`, a COD sample of the row.
      teacher: the target's head.
      loss: one of `LOSSES`.
      num_depths: K.
      partitions: P, segments that the mask slots are cut into.
      chunk: elements whose logits are in memory at a time.
      remat: compute the head's blocks again in the backward pass.
    """
    length = row.tokens.shape[0]
    charged = supervised(elements, row.loss_mask)

    def losses(
        head: Drafter, x: jax.Array, some: Elements, charged: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        answers = teacher, row.states, some.rows
        return summed_loss(head, x, charged, *answers, loss, chunk)

    def whole(parameters: Parameters) -> tuple[jax.Array, jax.Array]:
        head = build(parameters)
        x, _ = flat_inputs(head, row, elements).forward(head, remat=remat)
        return losses(head, x, elements, charged)

    if partitions == 1 or elements.anchors.shape[0] == length:
        (total, hits), slopes = jax.value_and_grad(whole, has_aux=True)(parameters)
    else:
        real, deep = elements[:length], elements[length:]
        total, hits, slopes = _accumulated(
            build, parameters, row, real, deep, losses, charged, num_depths, partitions, remat
        )
    scale = 1 / (jnp.sum(charged) + EPSILON)
    slopes = jax.tree.map(lambda slope, p: (slope * scale).astype(p.dtype), slopes, parameters)
    return measure(total, hits, elements, row.loss_mask, num_depths), slopes


def _accumulated(
    build: Callable[[Any], Drafter],
    parameters: Any,
    row: PackedRow,
    real: Elements,
    deep: Elements,
    losses: Callable[..., tuple[jax.Array, jax.Array]],
    charged: jax.Array,
    num_depths: int,
    partitions: int,
    remat: bool,
) -> tuple[jax.Array, jax.Array, Any]:
    """Returns the summed loss, hits `[n]` and float32 gradients, one segment after the other."""
    length, count = real.anchors.shape[0], deep.anchors.shape[0]
    parts, places = segments(deep, partitions, num_depths)

    def context(parameters: Any) -> tuple[tuple[jax.Array, KVCache], jax.Array]:
        head = build(parameters)
        x, kept = real_inputs(head, row, real).forward(head, remat=remat)
        total, hits = losses(head, x, real, charged[:length])
        return (total, kept), hits

    def segment(parameters: Any, kept: KVCache, part: Elements) -> tuple[jax.Array, jax.Array]:
        head = build(parameters)
        inputs = slot_inputs(head, row, part)
        x, _ = inputs.forward(head, (rows, kept), remat)
        return losses(head, x, part, supervised(part, row.loss_mask))

    def add(sums: Any, part: Elements) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        step = jax.value_and_grad(segment, argnums=(0, 1), has_aux=True)
        out, slopes = step(parameters, kept, part)
        return jax.tree.map(lambda s, slope: s + slope.astype(s.dtype), sums, slopes), out

    (total, kept), pull, real_hits = jax.vjp(context, parameters, has_aux=True)
    rows = Rows.of(real, row.document_ids)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (parameters, kept))
    (slopes, kept_slopes), (totals, hits) = jax.lax.scan(add, zeros, parts)
    kept_slopes = jax.tree.map(lambda slope, x: slope.astype(x.dtype), kept_slopes, kept)
    (real_slopes,) = pull((jnp.ones_like(total), kept_slopes))
    slopes = jax.tree.map(lambda s, slope: s + slope.astype(s.dtype), slopes, real_slopes)
    deep_hits = jnp.zeros((count,), bool).at[places].set(hits, mode="drop")
    return total + jnp.sum(totals), jnp.concatenate([real_hits, deep_hits]), slopes
