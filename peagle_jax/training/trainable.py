"""Which arrays of a head train and which stay, as two trees that make the head again."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.models import Drafter
from peagle_jax.models.quantized import Buffer

# The name of the one row of a frozen embedding that trains.
MASK_ROW = "embedding.mask_row"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parts:
    """A head cut in two. Names are paths such as "layers.0.attention.qkv".

    Attributes:
      trainable: what an optimiser gets.
      frozen: the rest, `d2t` always among it.
      structure: what turns them back into the head.
    """

    trainable: dict[str, jax.Array]
    frozen: dict[str, jax.Array]
    structure: tuple[nnx.GraphDef[Drafter], jax.tree_util.PyTreeDef, tuple[str, ...]] = (
        dataclasses.field(metadata={"static": True})
    )

    def build(self, trainable: dict[str, jax.Array]) -> Drafter:
        """Returns the head with these trainable arrays."""
        graphdef, treedef, names = self.structure
        arrays = self.frozen | trainable
        if MASK_ROW in arrays:
            module = nnx.merge(graphdef, treedef.unflatten(arrays[name] for name in names))
            row = module.config.mask_token_id
            arrays["embedding"] = arrays["embedding"].at[row].set(arrays[MASK_ROW])
        return nnx.merge(graphdef, treedef.unflatten(arrays[name] for name in names))


def split(head: Drafter, *, embedding: bool = True, lm_head: bool = False) -> Parts:
    """Cuts a head into what trains and what stays.

    The defaults are speculators': the embedding trains, the lm_head is the target's rows.

    Args:
      head: a P-EAGLE head.
      embedding: all of it trains, or of a frozen one the mask token's row alone.
      lm_head: it trains.

    Raises:
      ValueError: the head has no mask slots, or shares a table with its target.
    """
    config = head.config
    if config.mask_token_id is None:
        raise ValueError("an EAGLE-3 head has no mask slots to train")
    if not (config.own_embedding and config.own_lm_head):
        raise ValueError("a head in training needs an embedding and an lm_head of its own")
    graphdef, state = nnx.split(head)
    paths, treedef = jax.tree.flatten_with_path(state)
    kinds = nnx.to_flat_state(state)
    buffers = {".".join(map(str, path)) for path, kind in kinds if isinstance(kind, Buffer)}
    names = tuple(".".join(str(key.key) for key in path[:-1]) for path, _ in paths)
    arrays = dict(zip(names, (array for _, array in paths), strict=True))
    stays = buffers | ({"embedding"} if not embedding else set())
    stays |= {"lm_head"} if not lm_head else set()
    trainable = {name: array for name, array in arrays.items() if name not in stays}
    if not embedding:
        trainable[MASK_ROW] = jnp.asarray(arrays["embedding"])[config.mask_token_id]
    frozen = {name: array for name, array in arrays.items() if name in stays}
    return Parts(trainable, frozen, (graphdef, treedef, names))
