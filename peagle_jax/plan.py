"""How much memory a target and a drafter take on a device, told before anything is loaded.

Weights and caches have the shapes of the model code itself, traced without arrays. Only what a
pass computes in between is estimated by formulas, those of `prefill_bytes` and `round_bytes`.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from peagle_jax import checkpoint
from peagle_jax.batch import Bucket
from peagle_jax.config import DecoderConfig, DrafterConfig, TargetConfig
from peagle_jax.decoding import prefill_rows
from peagle_jax.generate import DEFAULT_SPECULATIVE_TOKENS
from peagle_jax.kernels.attention import PIECE_ROWS, block_rows
from peagle_jax.kernels.experts import MAX_BLOCK
from peagle_jax.models import KVCache
from peagle_jax.presets import usual_drafter

DTYPES = ("bfloat16", "float32")
# Of a GPU's memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
DEFAULT_MEMORY_FRACTION = 0.75


class PlanError(ValueError):
    """Sizes make no sense, or not together."""


@dataclasses.dataclass(frozen=True)
class ModelMemory:
    """What one model takes.

    Attributes:
      parameters: number of weights, packed ones included.
      weight_bytes: size of its arrays.
      cache_bytes: size of its KV cache, all sequences together.
      cache_bytes_per_token: what one position more of one sequence adds to it.
      window_bytes_per_sequence: the part of a sequence's cache that does not grow, the rings of
        the layers with a sliding window.
    """

    parameters: int
    weight_bytes: int
    cache_bytes: int
    cache_bytes_per_token: int
    window_bytes_per_sequence: int

    @classmethod
    def of(
        cls,
        config: TargetConfig | DrafterConfig,
        cache: KVCache,
        capacity: int,
        dtype: jnp.dtype,
    ) -> Self:
        """Measures a model.

        Args:
          config: architecture.
          cache: its KV cache, as shapes.
          capacity: slots of the layers without a window.
          dtype: of the weights that are not packed.
        """
        arrays = checkpoint.abstract_parameters(config, dtype)
        layers = zip((*cache.keys, *cache.values), config.sliding_windows * 2, strict=True)
        rows = cache.keys[0].shape[0]
        sizes = [(_bytes(array), window is None) for array, window in layers]
        growing = sum(size for size, grows in sizes if grows)
        total = sum(size for size, _ in sizes)
        return cls(
            parameters=sum(checkpoint.weight_count(name, a) for name, a in arrays.items()),
            weight_bytes=sum(map(_bytes, arrays.values())),
            cache_bytes=total,
            cache_bytes_per_token=growing // (rows * capacity),
            window_bytes_per_sequence=(total - growing) // rows,
        )


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What decoding takes at its peak.

    Attributes:
      target: weights and cache of the target.
      drafter: those of the drafter; None for plain decoding.
      num_speculative_tokens: K, 0 for plain decoding.
      rows: sequences of the program, the batch size rounded up to a power of two.
      prompt_rows: rows that the prefill computes for each sequence, in one or more passes.
      capacity: slots of a sequence in a layer without a window.
      prefill_bytes: estimate of what the prefill computes in between.
      round_bytes: estimate of what a round computes in between.
      device_bytes: memory of the device.
    """

    target: ModelMemory
    drafter: ModelMemory | None
    num_speculative_tokens: int
    rows: int
    prompt_rows: int
    capacity: int
    prefill_bytes: int
    round_bytes: int
    device_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Weights, caches, and the larger of what a prefill and a round compute in between."""
        models = (self.target,) if self.drafter is None else (self.target, self.drafter)
        kept = sum(m.weight_bytes + m.cache_bytes for m in models)
        return kept + max(self.prefill_bytes, self.round_bytes)

    @property
    def spare_bytes(self) -> int:
        """What the peak leaves of the device's memory; negative if it does not fit."""
        return self.device_bytes - self.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak is no more than the device's memory."""
        return self.spare_bytes >= 0

    @property
    def needs_memory_fraction(self) -> bool:
        """Whether the peak is more than what JAX takes of a GPU's memory by default."""
        return self.peak_bytes > DEFAULT_MEMORY_FRACTION * self.device_bytes

    def to_json(self) -> dict[str, Any]:
        """Returns all figures as plain JSON values."""
        figures = dataclasses.asdict(self)
        for name in ("peak_bytes", "spare_bytes", "fits"):
            figures[name] = getattr(self, name)
        return figures


def plan_memory(
    target: TargetConfig,
    *,
    device_bytes: int,
    batch_size: int,
    context: int,
    prompt_tokens: int | None = None,
    drafter_layers: int = 0,
    draft_vocab_size: int | None = None,
    num_speculative_tokens: int = DEFAULT_SPECULATIVE_TOKENS,
    dtype: str = "bfloat16",
) -> MemoryPlan:
    """Plans the memory of `generate`, which pads batches and prompts to powers of two.

    Args:
      target: architecture of the target.
      device_bytes: memory of the device.
      batch_size: sequences that run together.
      context: tokens of the longest sequence, prompt and answer together.
      prompt_tokens: tokens of its prompt; by default all but one, which takes the most memory.
      drafter_layers: decoder blocks of the drafter (see `usual_drafter`); 0 for plain decoding.
      draft_vocab_size: tokens that the drafter can propose; by default all.
      num_speculative_tokens: K; without effect on plain decoding.
      dtype: of weights and activations, "bfloat16" or "float32".

    Raises:
      PlanError: sizes are out of range.
    """
    if context > target.max_position_embeddings:
        raise PlanError(
            f"a context of {context} is more than the {target.max_position_embeddings} tokens "
            "that the target was made for"
        )
    if prompt_tokens is None:
        prompt_tokens = max(1, context - 1)
    _check(batch_size >= 1, "the batch size", batch_size, "at least 1")
    _check(context >= 1, "the context", context, "at least 1")
    _check(
        1 <= prompt_tokens <= context,
        "the number of prompt tokens",
        prompt_tokens,
        f"in 1..{context} (the context)",
    )
    _check(drafter_layers >= 0, "the number of drafter layers", drafter_layers, "at least 0")
    _check(
        drafter_layers == 0 or 1 <= num_speculative_tokens < context,
        "num_speculative_tokens",
        num_speculative_tokens,
        f"at least 1 and less than the context of {context}",
    )
    _check(
        draft_vocab_size is None or 1 <= draft_vocab_size <= target.vocab_size,
        "the draft vocabulary",
        draft_vocab_size,
        f"in 1..{target.vocab_size} (the target's vocabulary)",
    )
    _check(dtype in DTYPES, "dtype", repr(dtype), " or ".join(DTYPES))

    drafts = num_speculative_tokens if drafter_layers else 0
    bucket = Bucket.of(
        batch_size,
        prompt_tokens,
        context - prompt_tokens,
        target.max_position_embeddings,
        drafts,
    )
    rows, prompt_rows, capacity = bucket.rows, bucket.prompt_rows, bucket.capacity

    kind = jnp.dtype(dtype)
    cache = _cache(target, rows, capacity, kind, drafts + 1)
    drafter = draft_cache = drafter_memory = None
    if drafter_layers:
        drafter = usual_drafter(target, drafter_layers, draft_vocab_size)
        draft_cache = _cache(drafter, rows, capacity, kind, 2 * drafts)
        drafter_memory = ModelMemory.of(drafter, draft_cache, capacity, kind)
    return MemoryPlan(
        target=ModelMemory.of(target, cache, capacity, kind),
        drafter=drafter_memory,
        num_speculative_tokens=drafts,
        rows=rows,
        prompt_rows=prompt_rows,
        capacity=capacity,
        prefill_bytes=prefill_bytes(target, drafter, cache, draft_cache, prompt_rows),
        round_bytes=round_bytes(target, drafter, cache, draft_cache, drafts),
        device_bytes=device_bytes,
    )


def prefill_bytes(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    cache: KVCache,
    draft_cache: KVCache | None,
    prompt_rows: int,
) -> int:
    """Estimates what the prefill computes in between, in bytes.

    Passes reuse each other's buffers, and so do layers: it is what the largest layer of target or
    drafter takes (`_layer_bytes`) for the rows of one pass. Beside the target's layers the pass's
    feature `[B, T, F]` is kept, of which the drafter needs only a projection. A single pass sees
    its own rows alone; with a window, those of a piece and the window before it. One of several
    passes sees all slots of the cache, or with a window the ring and its own rows; and XLA keeps
    the zeros that attention's loops over blocks begin with (`_zeros_bytes`) from one layer to the
    next.

    Args:
      target: architecture.
      drafter: architecture, or None.
      cache: of the target, as shapes.
      draft_cache: of the drafter, as shapes, or None.
      prompt_rows: P.
    """
    rows, dtype = cache.keys[0].shape[0], cache.keys[0].dtype
    length = prefill_rows(rows, prompt_rows)
    piece, single = min(length, PIECE_ROWS), length == prompt_rows

    def largest(config: DecoderConfig, kept: KVCache) -> int:
        layers, zeros = [], [0]
        for layer, window in enumerate(config.sliding_windows):
            slots = kept.keys[layer].shape[2]
            if single:
                seen = length if window is None else min(length, piece + window - 1)
            else:
                seen = slots if window is None else slots + length
                zeros.append(_zeros_bytes(config, rows, length, seen, dtype.itemsize))
            layers.append(_layer_bytes(config, layer, rows, length, seen, dtype.itemsize))
        return max(layers) + max(zeros)

    if drafter is None or draft_cache is None:
        return largest(target, cache)
    features = rows * length * drafter.feature_size * dtype.itemsize
    return max(features + largest(target, cache), largest(drafter, draft_cache))


def round_bytes(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    cache: KVCache,
    draft_cache: KVCache | None,
    num_drafts: int,
) -> int:
    """Estimates what a round computes in between, in bytes.

    Buffers are reused, so it is the largest of: a layer of the verification (K + 1 rows, over
    all slots of its cache), the logits `[B, K + 1, V]` in float32 and as they leave the product,
    a layer of the draft (2K rows), and its logits `[B, K, V_draft]`.

    Args:
      target: architecture.
      drafter: architecture, or None.
      cache: of the target, as shapes.
      draft_cache: of the drafter, as shapes, or None.
      num_drafts: K.
    """
    rows, dtype = cache.keys[0].shape[0], cache.keys[0].dtype
    logit = jnp.dtype(jnp.float32).itemsize + dtype.itemsize

    def largest(config: DecoderConfig, kept: KVCache, length: int) -> int:
        return max(
            _layer_bytes(config, layer, rows, length, keys.shape[2], dtype.itemsize)
            for layer, keys in enumerate(kept.keys)
        )

    verified = num_drafts + 1
    parts = [largest(target, cache, verified), rows * verified * target.vocab_size * logit]
    if drafter is not None and draft_cache is not None:
        parts += [
            largest(drafter, draft_cache, 2 * num_drafts),
            rows * num_drafts * drafter.draft_vocab_size * logit,
        ]
    return max(parts)


def _layer_bytes(
    config: DecoderConfig, layer: int, rows: int, length: int, keys: int, itemsize: int
) -> int:
    """Estimates what one layer computes in between for `[B, T]` rows, in bytes.

    The residual stream `[B, T, H]`, and the larger of

    - attention: queries, keys, values and output, `[B, T, 2 N + 2 N_kv, D]`, where there are
      several pieces also what RoPE made queries and keys of, `[B, T, N + N_kv, D]`; and the scores
      `[B, N, T', S]` of the rows that are scored together (`_scored_rows`) in float32, twice,
      before and after the softmax (with attention sinks XLA's softmax works in place);
    - the MLP: gate, up and their product, `[B, T, 3 I]`; or a mixture of experts: few pairs of row
      and expert (no more than experts) are computed one by one, with `[B T k, H + 3 I]`; many in
      blocks (`_block_output`). Meanwhile it keeps its input `[B, T, H]` and the unpacked weights
      of one expert.
    """
    total, moe = rows * length, config.moe
    heads = (config.num_heads + config.num_kv_heads) * config.head_dim
    heads *= 2 if length <= PIECE_ROWS else 3
    scores = rows * config.num_heads * keys * _scored_rows(config, rows, length, keys)
    copies = 1 if config.attention_sinks else 2
    attention = total * heads * itemsize + copies * scores * jnp.dtype(jnp.float32).itemsize
    if moe is not None and moe.layers[layer]:
        pairs = total * moe.num_experts_per_token
        hidden, inner = config.hidden_size, moe.intermediate_size
        if pairs <= moe.num_experts:
            mlp = pairs * (hidden + 3 * inner) * itemsize
        else:
            mlp = (_block_output(config, total) + (total + 3 * inner) * hidden) * itemsize
    else:
        mlp = 3 * total * config.intermediate_size * itemsize
    return total * config.hidden_size * itemsize + max(attention, mlp)


def _zeros_bytes(config: DecoderConfig, rows: int, length: int, keys: int, itemsize: int) -> int:
    """Returns the size of the array that attention's loop over blocks fills.

    It is the output `[B, T', N, D]` of a piece that is cut into blocks. XLA makes the zeros of all
    layers one array.
    """
    piece = min(length, PIECE_ROWS)
    if _scored_rows(config, rows, length, keys) == piece:
        return 0
    return rows * piece * config.num_heads * config.head_dim * itemsize


def _scored_rows(config: DecoderConfig, rows: int, length: int, keys: int) -> int:
    """Returns the rows of each sequence whose scores attention holds at a time."""
    return block_rows(min(length, PIECE_ROWS), rows * config.num_heads * keys)


def _block_output(config: DecoderConfig, total: int) -> int:
    """Returns the values that a mixture of experts puts out in blocks, for so many rows.

    They are H for each pair of row and expert, in blocks of up to `MAX_BLOCK` rows of one expert;
    every expert in use may leave its last block unfilled.
    """
    assert config.moe is not None
    pairs = total * config.moe.num_experts_per_token
    padding = config.moe.num_experts * min(MAX_BLOCK, total)
    return (pairs + padding) * config.hidden_size


def _cache(
    config: DecoderConfig, rows: int, capacity: int, dtype: jnp.dtype, block: int
) -> KVCache:
    """Returns the shapes of the KV cache."""
    return jax.eval_shape(lambda: KVCache.zeros(config, rows, capacity, dtype, block))


def _bytes(array: jax.ShapeDtypeStruct | jax.Array) -> int:
    return array.size * array.dtype.itemsize


def _check(condition: bool, name: str, value: Any, expected: str) -> None:
    if not condition:
        raise PlanError(f"{name} must be {expected}, got {value}")
