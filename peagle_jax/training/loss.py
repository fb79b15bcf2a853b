"""How far the drafter's law is from the target's, element by element and without whole logits.

Names and formulas are those of speculators 0.9.0 (`training.md`, section 5): p is the target's law
renormalised on the draft vocabulary, q the drafter's. Depths weigh alike.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from peagle_jax.kernels import linear
from peagle_jax.models import Drafter, Frozen, Target
from peagle_jax.models.layers import RMSNorm

# What the published code adds to the number of elements that it divides by.
EPSILON = 1e-5

# (draft logits [..., D_V], target logits [..., D_V]), both float32 -> [...]
ElementLoss = Callable[[jax.Array, jax.Array], jax.Array]


def _divergence(log_a: jax.Array, log_b: jax.Array) -> jax.Array:
    """Returns KL(a || b) of log-probabilities `[..., D_V]`."""
    return jnp.sum(jnp.exp(log_a) * (log_a - log_b), axis=-1)


def _laws(draft: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.nn.log_softmax(draft), jax.nn.log_softmax(target)


def _overlap(draft: jax.Array, target: jax.Array) -> jax.Array:
    """Returns alpha, the probability that rejection sampling accepts a draft."""
    return jnp.sum(jnp.minimum(jax.nn.softmax(draft), jax.nn.softmax(target)), axis=-1)


def kl_div(draft: jax.Array, target: jax.Array) -> jax.Array:
    """KL(p || q)."""
    log_q, log_p = _laws(draft, target)
    return _divergence(log_p, log_q)


def rkl(draft: jax.Array, target: jax.Array) -> jax.Array:
    """KL(q || p)."""
    log_q, log_p = _laws(draft, target)
    return _divergence(log_q, log_p)


def jsd(draft: jax.Array, target: jax.Array) -> jax.Array:
    """Mean of KL(p || m) and KL(q || m) with m = (p + q) / 2."""
    log_q, log_p = _laws(draft, target)
    log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2.0)
    return (_divergence(log_p, log_m) + _divergence(log_q, log_m)) / 2


def ce(draft: jax.Array, target: jax.Array) -> jax.Array:
    """-log q of the target's favourite."""
    favourite = jnp.argmax(target, axis=-1, keepdims=True)
    return -jnp.take_along_axis(jax.nn.log_softmax(draft), favourite, axis=-1)[..., 0]


def tv(draft: jax.Array, target: jax.Array) -> jax.Array:
    """Total variation, 1 - alpha with alpha = sum min(p, q)."""
    return 1 - _overlap(draft, target)


def nla(draft: jax.Array, target: jax.Array) -> jax.Array:
    """-log alpha, alpha at least 1e-5."""
    return -jnp.log(jnp.maximum(_overlap(draft, target), 1e-5))


def lk_hybrid(draft: jax.Array, target: jax.Array) -> jax.Array:
    """KL and tv weighed w to 1 - w, with w = exp(-3 alpha) taken as a constant."""
    alpha = _overlap(draft, target)
    weight = jax.lax.stop_gradient(jnp.exp(-3 * alpha))
    return weight * kl_div(draft, target) + (1 - weight) * (1 - alpha)


LOSSES: dict[str, ElementLoss] = {
    loss.__name__: loss for loss in (kl_div, ce, rkl, jsd, tv, nla, lk_hybrid)
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetHead:
    """The end of the target, restricted to the draft vocabulary: it answers for every row.

    Attributes:
      norm: the final norm.
      head: `[D_V, H]`, the rows of the target's head that the drafter can propose.
    """

    norm: Frozen[RMSNorm]
    head: jax.Array

    @classmethod
    def of(cls, target: Target, draft_ids: jax.Array | None) -> Self:
        """Cuts it from the target; `draft_ids` `[D_V]` or None for the whole vocabulary."""
        head = target.head if draft_ids is None else target.head[draft_ids]
        return cls(Frozen.of(target.final_norm), head)

    def logits(self, states: jax.Array) -> jax.Array:
        """Returns logits `[..., D_V]`, float32, of the target's last residual streams."""
        return linear(self.norm.merge()(states), self.head).astype(jnp.float32)


def summed_loss(
    head: Drafter,
    x: jax.Array,
    charged: jax.Array,
    teacher: TargetHead,
    states: jax.Array,
    rows: jax.Array,
    loss: ElementLoss,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """Sums the loss of charged elements, without gradients to the target.

    Logits are made for `chunk` elements at a time, of charged ones alone (but for what fills the
    last chunk up), and only once: the gradient of a sum needs nothing of what comes after it, so
    it is made with them.

    Args:
      head: for its final norm and lm_head.
      x: `[n, H]`, the drafter's residual streams.
      charged: `[n]`, bool, or float32 weights of the elements' losses, 0 where not charged.
      teacher: the target's head.
      states: `[S, H]`, the target's residual streams.
      rows: `[n]` int32, which of them answers the element.
      loss: of one element.
      chunk: elements whose logits are in memory at a time.

    Returns:
      the sum, float32, and `[n]` bool: the drafter's favourite is the target's; of charged
      elements.
    """
    order = jnp.argsort(charged == 0, stable=True)
    answers = charged[order], teacher, states, rows[order]
    norm = Frozen.of(head.final_norm)
    total, hits = _summed(loss, chunk, norm, head.lm_head[...], x[order], answers)
    return total, jnp.zeros_like(hits).at[order].set(hits)


# Charged elements, the target's head and states, and which state answers each element.
Answers = tuple[jax.Array, TargetHead, jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed(
    loss: ElementLoss,
    chunk: int,
    norm: Frozen[RMSNorm],
    lm_head: jax.Array,
    x: jax.Array,
    answers: Answers,
) -> tuple[jax.Array, jax.Array]:
    def of_chunk(total: jax.Array, part: Chunk) -> tuple[jax.Array, jax.Array]:
        some, hits = _chunk_loss(loss, norm, lm_head, part, answers)
        return total + some, hits

    def step(total: jax.Array, part: Chunk) -> tuple[jax.Array, jax.Array]:
        nothing = total, jnp.zeros(part[1].shape, bool)
        return jax.lax.cond(jnp.any(part[1]), of_chunk, lambda *_: nothing, total, part)

    total, hits = jax.lax.scan(step, jnp.float32(0), _chunks(chunk, x, answers))
    return total, hits.reshape(-1)[: x.shape[0]]


# [C, H] residual streams, [C] charged, [C] rows of the target's states.
Chunk = tuple[jax.Array, jax.Array, jax.Array]


def _chunks(chunk: int, x: jax.Array, answers: Answers) -> Chunk:
    """Cuts `[n, ...]` into `[chunks, C, ...]`; what fills the last one up is not charged."""
    count = x.shape[0]
    chunks = -(-count // chunk)
    spare = chunks * -(-count // chunks) - count

    def cut(array: jax.Array) -> jax.Array:
        filled = jnp.pad(array, ((0, spare), *((0, 0),) * (array.ndim - 1)))
        return filled.reshape(chunks, -1, *array.shape[1:])

    charged, _, _, rows = answers
    return cut(x), cut(charged), cut(rows)


def _chunk_loss(
    loss: ElementLoss, norm: Frozen[RMSNorm], lm_head: jax.Array, part: Chunk, answers: Answers
) -> tuple[jax.Array, jax.Array]:
    (some, charge, row), (_, teacher, states, _) = part, answers
    draft = linear(norm.merge()(some), lm_head).astype(jnp.float32)
    target = jax.lax.stop_gradient(teacher.logits(states[row]))
    hits = jnp.argmax(draft, axis=-1) == jnp.argmax(target, axis=-1)
    return jnp.sum(jnp.where(charge != 0, charge * loss(draft, target), 0)), hits


def _summed_forward(
    loss: ElementLoss, chunk: int, norm: Any, lm_head: Any, x: Any, answers: Any
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """Returns the sum and hits, and the sum's gradients."""
    trains = lm_head.perturbed  # else the largest of the gradients is not made
    norm, lm_head, x, answers = jax.tree.map(
        lambda primal: primal.value,
        (norm, lm_head, x, answers),
        is_leaf=lambda leaf: hasattr(leaf, "perturbed"),
    )

    def of_part(
        norm: Frozen[RMSNorm], some: jax.Array, table: jax.Array | None, rest: Any
    ) -> tuple[jax.Array, jax.Array]:
        used = lm_head if table is None else table
        return _chunk_loss(loss, norm, used, (some, *rest), answers)

    def of_chunk(sums: Any, part: Chunk) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        total, slopes = sums
        some, *rest = part
        value_and_slopes = jax.value_and_grad(of_part, argnums=(0, 1, 2), has_aux=True)
        table = lm_head if trains else None
        (more, hits), (norm_slope, x_slope, table_slope) = value_and_slopes(norm, some, table, rest)
        slopes = jax.tree.map(
            lambda s, slope: s + slope.astype(s.dtype), slopes, (norm_slope, table_slope)
        )
        return (total + more, slopes), (hits, x_slope)

    def step(sums: Any, part: Chunk) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        nothing = sums, (jnp.zeros(part[1].shape, bool), jnp.zeros_like(part[0]))
        return jax.lax.cond(jnp.any(part[1]), of_chunk, lambda *_: nothing, sums, part)

    wide = jax.tree.map(
        lambda a: jnp.zeros(a.shape, jnp.float32), (norm, lm_head if trains else None)
    )
    (total, slopes), (hits, x_slope) = jax.lax.scan(
        step, (jnp.float32(0), wide), _chunks(chunk, x, answers)
    )
    count = x.shape[0]
    hits, x_slope = hits.reshape(-1)[:count], x_slope.reshape(-1, x.shape[1])[:count]
    return (total, hits), (slopes, x_slope, norm, lm_head)


def _summed_backward(loss: ElementLoss, chunk: int, kept: Any, given: Any) -> tuple[Any, ...]:
    del loss, chunk
    (norm_slope, table_slope), x_slope, norm, lm_head = kept
    by = given[0]

    def scaled(slope: jax.Array, like: jax.Array) -> jax.Array:
        return (slope * by).astype(like.dtype)

    if isinstance(by, SymbolicZero):
        return None, None, None, None
    table = None if table_slope is None else scaled(table_slope, lm_head)
    return jax.tree.map(scaled, norm_slope, norm), table, scaled(x_slope, x_slope), None


_summed.defvjp(_summed_forward, _summed_backward, symbolic_zeros=True)
