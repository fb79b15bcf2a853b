"""Which target something was made with, so that nothing is mixed with another one's."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.models import Frozen, Target

# Numbers of each array that are looked at.
SAMPLE = 4096


def identity(target: Frozen[Target]) -> dict[str, Any]:
    """Returns the target's config as JSON, and under `weights` a hash of some of each array.

    The hash is of what the numbers are in bfloat16, so it is the same in whatever precision the
    target was loaded. Two targets that were tuned differently differ in nearly every array.
    """
    digest = hashlib.sha256()
    for array in _some(target.leaves):
        digest.update(np.asarray(array).tobytes())
    return {**target.merge().config.to_json(), "weights": digest.hexdigest()[:16]}


@jax.jit
def _some(arrays: list[jax.Array]) -> list[jax.Array]:
    """Returns numbers from all over the arrays, at equal distances."""

    def some(array: jax.Array) -> jax.Array:
        few = array.reshape(-1)[:: max(1, array.size // SAMPLE)]
        return few.astype(jnp.bfloat16) if jnp.issubdtype(few.dtype, jnp.floating) else few

    return [some(array) for array in arrays]
