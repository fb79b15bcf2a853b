"""What a training step reports, as sums that may be added over rows, steps and devices."""

import dataclasses

import jax
import jax.numpy as jnp

from peagle_jax.training.cod import Elements
from peagle_jax.training.loss import EPSILON


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Metrics:
    """Sums over supervised elements.

    A hit is an element where the drafter's favourite is the target's within the draft vocabulary.

    Attributes:
      loss: [], summed loss.
      total: `[K]`, supervised elements of each depth.
      hits: `[K]`, how many of them are hits.
      chains: `[K]`, elements of each depth whose anchor is supervised too. A round never starts
        from another: its first token is the target's own.
      survivors: `[K]`, how many of these end a chain of hits, (a, 0) .. (a, d).
    """

    loss: jax.Array
    total: jax.Array
    hits: jax.Array
    chains: jax.Array
    survivors: jax.Array

    @property
    def mean_loss(self) -> jax.Array:
        """The loss as speculators divides it."""
        return self.loss / (jnp.sum(self.total) + EPSILON)

    @property
    def accuracy(self) -> jax.Array:
        """`[K]`, part of hits at each depth, whatever came before; 0 where there is none."""
        return self.hits / jnp.maximum(self.total, 1)

    @property
    def acceptance_length(self) -> jax.Array:
        """What greedy decoding would accept a round, the target's own token included.

        It is 1 + sum over depths of how often a chain survives so far. COD draws the chains of a
        depth uniformly from those before, so the elements kept stand for all. A reduced draft
        vocabulary makes it too high by what the target would say outside of it.
        """
        return 1 + jnp.sum(self.survivors / jnp.maximum(self.chains, 1))


def supervised(elements: Elements, loss_mask: jax.Array) -> jax.Array:
    """Returns which elements `[n]` carry loss, those that answer for a supervised row `[S]`."""
    return elements.valid & loss_mask.astype(bool)[elements.rows]


def measure(
    loss: jax.Array, hits: jax.Array, elements: Elements, loss_mask: jax.Array, num_depths: int
) -> Metrics:
    """Sums up one packed row.

    Args:
      loss: summed over the supervised elements.
      hits: `[n]` bool.
      elements: `[n]`.
      loss_mask: `[S]` bool.
      num_depths: K.
    """
    charged = supervised(elements, loss_mask)
    table = jnp.zeros((num_depths, loss_mask.shape[0]), bool)
    table = table.at[elements.depths, elements.anchors].max(hits & elements.valid)
    alive = jnp.cumprod(table, axis=0)[elements.depths, elements.anchors] > 0  # [n]

    def by_depth(which: jax.Array) -> jax.Array:
        return jnp.zeros((num_depths,), jnp.float32).at[elements.depths].add(which)

    chains = charged & loss_mask.astype(bool)[elements.anchors]
    sums = (by_depth(which) for which in (charged, charged & hits, chains, chains & alive))
    return Metrics(loss, *sums)
