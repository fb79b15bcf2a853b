"""An NNX module as an argument of a jitted program: flat arrays and a static structure."""

import dataclasses
from collections.abc import Hashable
from typing import Any, Self

import jax
from flax import nnx


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen[M: nnx.Module]:
    """A module's arrays as a flat list, so that a call costs next to nothing to dispatch.

    Attributes:
      leaves: the module's arrays.
      structure: what turns them back into the module.
    """

    leaves: list[jax.Array]
    structure: Hashable = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, module: M) -> Self:
        """Splits `module`."""
        graphdef, state = nnx.split(module)
        leaves, treedef = jax.tree.flatten(state)
        return cls(leaves, (graphdef, treedef))

    def merge(self) -> M:
        """Returns the module; inside a jitted function its arrays are tracers."""
        structure: Any = self.structure
        graphdef, treedef = structure
        return nnx.merge(graphdef, jax.tree.unflatten(treedef, self.leaves))
