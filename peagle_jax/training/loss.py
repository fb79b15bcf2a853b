"""How far the drafter's law is from the target's, element by element and without whole logits.

Names and formulas are those of speculators 0.9.0 (`training.md`, section 5): p is the target's law
renormalised on the draft vocabulary, q the drafter's. Depths weigh alike.
"""

import dataclasses
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp

from peagle_jax.kernels import linear
from peagle_jax.models import Drafter, Frozen, Target
from peagle_jax.models.layers import RMSNorm
from peagle_jax.training.flat import NO_TARGET

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

    Logits are made for `chunk` elements at a time, and made again in the backward pass.

    Args:
      head: for its final norm and lm_head.
      x: `[n, H]`, the drafter's residual streams.
      charged: `[n]` bool.
      teacher: the target's head.
      states: `[S, H]`, the target's residual streams.
      rows: `[n]` int32, which of them answers the element.
      loss: of one element.
      chunk: elements whose logits are in memory at a time.

    Returns:
      the sum, float32, and `[n]` bool: the drafter's favourite is the target's.
    """
    count = x.shape[0]
    chunks = -(-count // chunk)
    size = -(-count // chunks)

    def cut(array: jax.Array) -> jax.Array:  # [n, ...] -> [chunks, size, ...]
        spare = (0, chunks * size - count)
        filled = jnp.pad(array, (spare, *((0, 0),) * (array.ndim - 1)))
        return filled.reshape(chunks, size, *array.shape[1:])

    def body(
        total: jax.Array, part: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        some, charge, row = part
        draft = head.logits(some, NO_TARGET)
        target = jax.lax.stop_gradient(teacher.logits(states[row]))
        hits = jnp.argmax(draft, axis=-1) == jnp.argmax(target, axis=-1)
        return total + jnp.sum(jnp.where(charge, loss(draft, target), 0)), hits

    total, hits = jax.lax.scan(
        jax.checkpoint(body, prevent_cse=False), jnp.float32(0), (cut(x), cut(charged), cut(rows))
    )
    return total, hits.reshape(-1)[:count]
