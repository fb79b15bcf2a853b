"""Which arrays of a head train and which stay, as two trees that make the head again."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from peagle_jax.models import Drafter, Target
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
        """Returns the head with these trainable arrays, and with every table its own."""
        graphdef, treedef, names = self.structure
        arrays = self.frozen | trainable
        if MASK_ROW in arrays:
            module = nnx.merge(graphdef, treedef.unflatten(arrays[name] for name in names))
            row = module.config.mask_token_id
            table = arrays["embedding"].astype(arrays[MASK_ROW].dtype)
            arrays["embedding"] = table.at[row].set(arrays[MASK_ROW])
        return nnx.merge(graphdef, treedef.unflatten(arrays[name] for name in names))


def split(
    head: Drafter,
    *,
    embedding: bool | None = None,
    lm_head: bool = False,
    target: Target | None = None,
) -> Parts:
    """Cuts a head into what trains and what stays.

    The defaults are speculators': the embedding of a P-EAGLE head trains, that of an EAGLE-3 head
    does not, and the lm_head is the target's rows.

    Args:
      head: a P-EAGLE or EAGLE-3 head.
      embedding: all of it trains, or of a P-EAGLE head's frozen one the mask token's row alone.
        By default it trains if it is the head's own and the head is a P-EAGLE one.
      lm_head: it trains.
      target: whose tables a head without its own ones shares. They stay as they are, the mask
        token's row too.

    Raises:
      ValueError: a table is shared and told to train, or there is no target to take it from.
    """
    config = head.config
    parallel = config.mask_token_id is not None
    if embedding is None:
        embedding = parallel and config.own_embedding
    if (embedding and not config.own_embedding) or (lm_head and not config.own_lm_head):
        raise ValueError(
            "a table that trains must be of its own: the head shares it with its target"
        )
    has_mask_row = parallel and config.own_embedding and not embedding
    if not (config.own_embedding and config.own_lm_head):
        if target is None:
            raise ValueError(
                "a head without an embedding and an lm_head of its own needs its target"
            )
        head = _with_tables(head, target)
    graphdef, state = nnx.split(head)
    paths, treedef = jax.tree.flatten_with_path(state)
    kinds = nnx.to_flat_state(state)
    buffers = {".".join(map(str, path)) for path, kind in kinds if isinstance(kind, Buffer)}
    names = tuple(".".join(str(key.key) for key in path[:-1]) for path, _ in paths)
    arrays = dict(zip(names, (array for _, array in paths), strict=True))
    stays = buffers | ({"embedding"} if not embedding else set())
    stays |= {"lm_head"} if not lm_head else set()
    trainable = {name: array for name, array in arrays.items() if name not in stays}
    if has_mask_row:
        trainable[MASK_ROW] = jnp.asarray(arrays["embedding"])[config.mask_token_id]
    frozen = {name: array for name, array in arrays.items() if name in stays}
    return Parts(trainable, frozen, (graphdef, treedef, names))


def _with_tables(head: Drafter, target: Target) -> Drafter:
    """Returns the same head with the target's tables where it has none, not copied."""
    config, whole = head.config, nnx.clone(head)
    if not config.own_embedding:
        whole.embedding = nnx.Param(target.embedding[...])
    if not config.own_lm_head:
        whole.lm_head = nnx.Param(target.head)
    whole.config = dataclasses.replace(config, own_embedding=True, own_lm_head=True)
    return whole
