"""Where each tensor of a source goes in the native arrays."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from peagle_jax.checkpoint import abstract_parameters
from peagle_jax.config import DecoderConfig, DrafterConfig, TargetConfig


@dataclasses.dataclass(frozen=True)
class Slot:
    """The part of one native array that one source tensor fills, and how it lies there.

    Attributes:
      native: name of the array.
      shape: of the source tensor.
      start: first row; queries, keys and values lie one after the other in one array.
      expert: index into the first axis of an array that stacks all experts, where the source
        has a tensor for each.
      interleaved: rows of gate and up alternate in the source; here all of gate comes first.
      input_first: the source holds `[E, in, out]`, the array `[E, out, in]`.
      any_shape: the source may shape its elements otherwise (`mask_hidden`).
    """

    native: str
    shape: tuple[int, ...]
    start: int = 0
    expert: int | None = None
    interleaved: bool = False
    input_first: bool = False
    any_shape: bool = False

    def view(self, array: np.ndarray) -> np.ndarray:
        """Returns the part of the (contiguous) array, seen in the order of the source.

        Its elements in C order are those of the source tensor in C order; its axes may be split.
        """
        part = array if self.expert is None else array[self.expert]
        part = part[self.start : self.start + self.shape[0]]
        if self.interleaved:  # [E, 2I, ...] -> [E, I, 2, ...]
            experts, rows, *rest = part.shape
            part = part.reshape(experts, 2, rows // 2, *rest).swapaxes(1, 2)
        return np.moveaxis(part, -1, 1) if self.input_first else part

    def extent(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the first and one past the last element filled in an array of this shape."""
        axes = shape if self.expert is None else shape[1:]
        first = self.start * math.prod(axes[1:]) + (self.expert or 0) * math.prod(axes)
        return first, first + math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A conversion, decided from the config and the tensors' names and shapes alone.

    Attributes:
      config: the native architecture.
      slots: by source tensor.
      given: native arrays that are computed, not copied (`d2t`).
      equal: pairs of source tensors that must hold the same values (a tied head and its table).
      used: source tensors that are accounted for without being copied.
      block: rows and columns that share a scale in the source's FP8 weights, None without those.
    """

    config: TargetConfig | DrafterConfig
    slots: Mapping[str, Slot]
    given: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    equal: tuple[tuple[str, str], ...] = ()
    used: frozenset[str] = frozenset()
    block: tuple[int, int] | None = None

    def natives(self, dtype: np.dtype | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of every native array that slots fill, and checks that they do.

        Floating arrays have the dtype given, by default float32.
        An array is never read uninitialised: slots must cover its elements once, without gaps.
        """
        natives = abstract_parameters(self.config, dtype)
        filled: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for slot in self.slots.values():
            filled[slot.native].append(slot.extent(natives[slot.native].shape))
        for name, value in self.given.items():
            assert value.shape == natives.pop(name).shape, name
        assert set(filled) == set(natives), sorted(set(filled) ^ set(natives))
        for name, extents in filled.items():
            starts, ends = zip(*sorted(extents), strict=True)
            assert (*starts, natives[name].size) == (0, *ends), (name, extents)
        return natives


def block_slots(
    source: str, native: str, config: DecoderConfig, input_size: int
) -> Iterator[tuple[str, Slot]]:
    """Yields the slots of a decoder block with a dense MLP, in Hugging Face's naming.

    Args:
      source: the block's prefix in the source, such as "model.layers.3".
      native: its prefix here, such as "layers.3".
      config: sizes and flags.
      input_size: width of the attention's input rows.
    """
    yield from attention_slots(source, native, config, input_size)
    yield from mlp_slots(source, native, config)


def attention_slots(
    source: str, native: str, config: DecoderConfig, input_size: int
) -> Iterator[tuple[str, Slot]]:
    """Yields the slots of a block's attention and its two norms; as `block_slots`."""
    hidden = config.hidden_size
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
    if config.attention_sinks:
        yield f"{attention}.sinks", Slot(f"{to}.sinks", (config.num_heads,))


def mlp_slots(source: str, native: str, config: DecoderConfig) -> Iterator[tuple[str, Slot]]:
    """Yields the slots of a block's dense MLP; as `block_slots`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    mlp, to = f"{source}.mlp", f"{native}.mlp"
    for name, start in (("gate", 0), ("up", inner)):
        yield f"{mlp}.{name}_proj.weight", Slot(f"{to}.gate_up", (inner, hidden), start)
        if config.mlp_bias:
            yield f"{mlp}.{name}_proj.bias", Slot(f"{to}.gate_up_bias", (inner,), start)
    yield f"{mlp}.down_proj.weight", Slot(f"{to}.down", (hidden, inner))
    if config.mlp_bias:
        yield f"{mlp}.down_proj.bias", Slot(f"{to}.down_bias", (hidden,))
