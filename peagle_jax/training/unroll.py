"""EAGLE-3 training: a packed row's gradient through the steps that drafting takes one by one.

Step 0 is the packed row itself. Step j gives each row a the token of row a + j, as if the drafts
before it had been accepted, and what the head feeds back of its own step j - 1; it answers for row
a + j, as element (a, j) of `cod.Elements` does. It sees what a mask slot of a chain would see: the
real rows of its document up to its anchor, and its own chain. That is drafting with EAGLE-3, K
tokens after every row of the document at once (EAGLE-3, arXiv 2503.01840, "training-time test").

Losses, their normalisation and their decay are those of speculators 0.9.0 (`ttt_steps`,
`ttt_step_loss_decay`), and gradients go back through the states fed back. Where its pass is not
what drafting does, drafting is followed:

- a chain ends with its document. Speculators goes on with the next one's tokens, and charges such
  rows if they are supervised; behind a prompt, as in chat data, they are not.
- a sliding layer's window moves on with the steps. Speculators leaves it where step 0 had it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from peagle_jax.models import Drafter, KVCache
from peagle_jax.training.cod import Elements
from peagle_jax.training.flat import Inputs, PackedRow
from peagle_jax.training.loss import EPSILON, ElementLoss, TargetHead, summed_loss
from peagle_jax.training.mask import Rows
from peagle_jax.training.metrics import Metrics, measure, supervised


def chains(document_ids: jax.Array, num_steps: int) -> Elements:
    """Returns the elements `[K * S]` of all steps: every chain that stays in its document.

    Args:
      document_ids: `[S]` int32, -1 for padding; a document's rows stand together.
      num_steps: K.
    """
    length = document_ids.shape[0]
    anchors = jnp.tile(jnp.arange(length, dtype=jnp.int32), num_steps)
    depths = jnp.repeat(jnp.arange(num_steps, dtype=jnp.int32), length)
    ends = jnp.pad(document_ids, (0, num_steps), constant_values=-1)[anchors + depths]
    valid = (ends >= 0) & (ends == document_ids[anchors])
    return Elements(jnp.where(valid | (depths == 0), anchors, 0), depths, valid)


def streams(
    head: Drafter, row: PackedRow, elements: Elements, remat: bool = False
) -> list[jax.Array]:
    """Returns the residual streams `[S, H]` of each step (give them to `head.logits`).

    Args:
      head: an EAGLE-3 head.
      row: documents and features.
      elements: `chains` of the row.
      remat: compute the head's blocks again in the backward pass.
    """
    length, count = row.tokens.shape[0], elements.anchors.shape[0]
    rows = Rows.of(elements, row.document_ids)
    hidden, context, out = head.project(row.features), None, []
    for begin in range(0, count, length):
        end = begin + length
        step = elements[begin:end]
        inputs = Inputs(row.tokens[step.rows], hidden, step.rows, _cut(rows, begin, end))
        x, kept = inputs.forward(head, context, remat)
        before = kept if context is None else _joined(context[1], kept)
        hidden, context = head.fed_back(x), (_cut(rows, 0, end), before)
        out.append(x)
    return out


def _cut(rows: Rows, begin: int, end: int) -> Rows:
    return jax.tree.map(lambda x: x[begin:end], rows)


def _joined(before: KVCache, after: KVCache) -> KVCache:
    """Returns the keys and values of both, beside each other."""
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), before, after)


def gradients[Parameters](
    build: Callable[[Parameters], Drafter],
    parameters: Parameters,
    row: PackedRow,
    teacher: TargetHead,
    *,
    loss: ElementLoss,
    num_steps: int = 3,
    step_decay: float = 1.0,
    chunk: int = 256,
    remat: bool = False,
) -> tuple[Metrics, Parameters]:
    """Returns one packed row's metrics and the gradient of its loss.

    The loss of a step is summed over its supervised elements and divided by their number + 1e-5;
    the row's loss is the sum over steps j of that, times `step_decay ** j`. It is the metrics'
    `mean_loss`: their summed loss is this loss times the elements of all steps, so that rows can
    be weighed as those of `partition.gradients`.

    Args:
      build: makes the head of the parameters that train.
      parameters: any tree of float arrays.
      row: documents, features and the target's states.
      teacher: the target's head.
      loss: one of `LOSSES`.
      num_steps: K, which speculators calls ttt_steps.
      step_decay: which speculators calls ttt_step_loss_decay.
      chunk: elements whose logits are in memory at a time.
      remat: compute the head's blocks again in the backward pass.
    """
    elements = chains(row.document_ids, num_steps)
    charged = supervised(elements, row.loss_mask)

    counts = jnp.sum(charged.reshape(num_steps, -1), axis=1, keepdims=True)  # [K, 1]
    decay = jnp.float32(step_decay) ** jnp.arange(num_steps)[:, None]
    weights = (charged.reshape(num_steps, -1) * decay / (counts + EPSILON)).reshape(-1)

    def whole(parameters: Parameters) -> tuple[jax.Array, jax.Array]:
        head = build(parameters)
        x = jnp.concatenate(streams(head, row, elements, remat))  # [K * S, H]
        return summed_loss(head, x, weights, teacher, row.states, elements.rows, loss, chunk)

    (mean, hits), slopes = jax.value_and_grad(whole, has_aux=True)(parameters)
    total = mean * (jnp.sum(charged) + EPSILON)
    return measure(total, hits, elements, row.loss_mask, num_steps), slopes
