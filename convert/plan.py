"""Where each tensor of a source goes in the native arrays."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from peagle_jax.checkpoint import abstract_parameters
from peagle_jax.config import DecoderConfig, DrafterConfig, TargetConfig


@dataclasses.dataclass(frozen=True)
class Slot:
    """Rows of one native array that one source tensor fills.

    Attributes:
      native: name of the array.
      shape: of the source tensor.
      start: first row; queries, keys and values lie one after the other in one array.
      any_shape: the source may shape its elements otherwise (`mask_hidden`).
    """

    native: str
    shape: tuple[int, ...]
    start: int = 0
    any_shape: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """A conversion, decided from the config and the tensors' names and shapes alone.

    Attributes:
      config: the native architecture.
      slots: by source tensor.
      given: native arrays that are computed, not copied (`d2t`).
      equal: pairs of source tensors that must hold the same values (a tied head and its table).
      used: source tensors that are accounted for without being copied.
    """

    config: TargetConfig | DrafterConfig
    slots: Mapping[str, Slot]
    given: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    equal: tuple[tuple[str, str], ...] = ()
    used: frozenset[str] = frozenset()

    def native_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every native array that slots fill, and checks that they do.

        An array is never read uninitialised: slots must cover its rows once, without gaps.
        """
        shapes = {name: value.shape for name, value in abstract_parameters(self.config).items()}
        rows: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for slot in self.slots.values():
            assert slot.shape[1:] == shapes[slot.native][1:], slot
            rows[slot.native].append((slot.start, slot.start + slot.shape[0]))
        for name, value in self.given.items():
            assert value.shape == shapes.pop(name), name
        assert set(rows) == set(shapes), sorted(set(rows) ^ set(shapes))
        for name, spans in rows.items():
            starts, ends = zip(*sorted(spans), strict=True)
            assert (*starts, shapes[name][0]) == (0, *ends), (name, spans)
        return shapes


def block_slots(
    source: str, native: str, config: DecoderConfig, input_size: int
) -> Iterator[tuple[str, Slot]]:
    """Yields the slots of a decoder block in Hugging Face's naming.

    Args:
      source: the block's prefix in the source, such as "model.layers.3".
      native: its prefix here, such as "layers.3".
      config: sizes and flags.
      input_size: width of the attention's input rows.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    yield f"{source}.input_layernorm.weight", Slot(f"{native}.attention_norm.weight", (hidden,))
    yield f"{source}.post_attention_layernorm.weight", Slot(f"{native}.mlp_norm.weight", (hidden,))

    attention, to = f"{source}.self_attn", f"{native}.attention"
    for name, rows, start in (
        ("q", queries, 0),
        ("k", keys, queries),
        ("v", keys, queries + keys),
    ):
        yield f"{attention}.{name}_proj.weight", Slot(f"{to}.qkv", (rows, input_size), start)
        if config.attention_bias:
            yield f"{attention}.{name}_proj.bias", Slot(f"{to}.qkv_bias", (rows,), start)
    yield f"{attention}.o_proj.weight", Slot(f"{to}.out", (hidden, queries))
    if config.attention_output_bias:
        yield f"{attention}.o_proj.bias", Slot(f"{to}.out_bias", (hidden,))
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield f"{attention}.{name}.weight", Slot(f"{to}.{name}.weight", (config.head_dim,))

    mlp, to = f"{source}.mlp", f"{native}.mlp"
    for name, start in (("gate", 0), ("up", inner)):
        yield f"{mlp}.{name}_proj.weight", Slot(f"{to}.gate_up", (inner, hidden), start)
        if config.mlp_bias:
            yield f"{mlp}.{name}_proj.bias", Slot(f"{to}.gate_up_bias", (inner,), start)
    yield f"{mlp}.down_proj.weight", Slot(f"{to}.down", (hidden, inner))
    if config.mlp_bias:
        yield f"{mlp}.down_proj.bias", Slot(f"{to}.down_bias", (hidden,))
