"""The head that a training run starts from."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from peagle_jax.config import DrafterConfig
from peagle_jax.models import Drafter, Target
from peagle_jax.models.quantized import Buffer


def new_head(
    config: DrafterConfig,
    target: Target,
    d2t: np.ndarray | None,
    *,
    seed: int,
    layers_from_target: bool,
) -> Drafter:
    """Makes a head with its target's embedding, its rows of the target's lm_head and final norm.

    Args:
      config: architecture; the head has tables of its own, to train or to leave out when it is
        saved.
      target: the target, of the same hidden size.
      d2t: `[D_V]` offsets of the draft vocabulary, None for the whole one.
      seed: of everything else.
      layers_from_target: the blocks start as the target's last ones, and the projection as the
        last boundary's part of the feature, so that the head starts as the target's own end; if
        not, they are drawn.

    Raises:
      ValueError: the target's blocks are not of the head's shapes.
    """
    dtype = target.embedding[...].dtype
    head = Drafter(config, dtype=dtype, rngs=nnx.Rngs(seed))
    ids = jnp.arange(config.vocab_size)
    if d2t is not None:
        head.d2t = Buffer(jnp.asarray(d2t, jnp.int32))
        ids = jnp.arange(config.draft_vocab_size) + head.d2t[...]
    head.embedding[...] = target.embedding[...]
    head.lm_head[...] = target.head[ids]
    head.final_norm.weight[...] = target.final_norm.weight[...]
    if layers_from_target:
        _copy_layers(head, target)
    return head


def _copy_layers(head: Drafter, target: Target) -> None:
    config, hidden = head.config, head.config.hidden_size
    last = list(target.layers)[-config.num_layers :]
    if len(last) < config.num_layers:
        raise ValueError(f"the target has {len(last)} layers, the head {config.num_layers}")
    fc = jnp.zeros_like(head.fc[...])
    head.fc[...] = fc.at[:, -hidden:].set(jnp.eye(hidden, dtype=fc.dtype))
    for index, (mine, theirs) in enumerate(zip(head.layers, last, strict=True)):
        own, others = (dict(nnx.to_flat_state(nnx.state(block))) for block in (mine, theirs))
        for path, variable in others.items():
            if index == 0 and path == ("attention_norm", "weight"):
                path = ("hidden_norm", "weight")
            value = variable.get_value()
            if path not in own:
                raise ValueError(
                    f"the target's layers have {'.'.join(map(str, path))} and the head's have not; "
                    "start from drawn layers"
                )
            shape = own[path].get_value().shape
            if index == 0 and path[-1] == "qkv":
                # The half that reads the embedding starts at nothing.
                value = jnp.pad(value, ((0, 0), (hidden, 0)))
            if value.shape != shape:
                name = ".".join(map(str, path))
                raise ValueError(
                    f"the target's {name} is {value.shape}, the head's {shape}; start from drawn "
                    "layers"
                )
            _at(mine, path)[...] = value


def _at(module: Any, path: Sequence[Any]) -> nnx.Variable:
    for name in path:
        module = module[name] if isinstance(name, int) else getattr(module, name)
    return module
