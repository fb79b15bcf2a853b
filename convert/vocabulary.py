"""The draft vocabulary: which target token each row of a drafter's head stands for."""

import numpy as np

from peagle_jax.config import DrafterConfig
from peagle_jax.convert.errors import ConvertError
from peagle_jax.convert.source import Source


def draft_to_target(
    source: Source, config: DrafterConfig, unset_is_arange: bool = False
) -> np.ndarray:
    """Reads and checks `d2t`, the offset of each draft id: target id = id + d2t[id].

    With `t2d` alone (true at the target ids that are drafted) the rows are in ascending order,
    as speculators makes them; without either, a full vocabulary maps to itself.

    Args:
      source: the drafter's folder.
      config: its architecture.
      unset_is_arange: the writer stores 0, 1, 2, ... as the `d2t` of a full vocabulary, which it
        never reads (verl-SpeCo): as offsets they would name every other token.

    Returns:
      `[D]` int32 offsets.

    Raises:
      ConvertError: the two are missing for a reduced vocabulary, disagree, are mis-shaped, or
        name a target id twice or one outside the vocabulary.
    """
    size, vocab = config.draft_vocab_size, config.vocab_size
    rows = np.arange(size)
    mask = _t2d(source, size, vocab) if "t2d" in source.tensors else None
    if "d2t" in source.tensors:
        offsets = _d2t(source, size)
        unset = unset_is_arange and size == vocab and np.array_equal(offsets, rows)
        ids = rows if unset else rows + offsets
    elif mask is not None:
        ids = np.flatnonzero(mask)
    elif size == vocab:
        ids = rows
    else:
        raise ConvertError(
            f"{source.folder}: d2t is missing, but the draft vocabulary is {size} of {vocab} tokens"
        )
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if outside.size:
        i = outside[0]
        raise ConvertError(
            f"{source.folder}: d2t maps {outside.size} draft ids outside the target's {vocab} "
            f"tokens, the first is {i} -> {ids[i]} (d2t holds offsets, not target ids)"
        )
    if len(np.unique(ids)) != size:
        raise ConvertError(f"{source.folder}: d2t maps several draft ids to one target id")
    if mask is not None and not mask[ids].all():
        raise ConvertError(f"{source.folder}: d2t and t2d name different target ids")
    if size == vocab and not np.array_equal(ids, rows):
        raise ConvertError(
            f"{source.folder}: d2t reorders a full draft vocabulary, which is not supported"
        )
    return (ids - rows).astype(np.int32)


def _d2t(source: Source, size: int) -> np.ndarray:
    tensor = source.tensors["d2t"]
    if tensor.shape != (size,) or tensor.dtype not in ("I64", "I32"):
        raise ConvertError(
            f"{source.folder}: d2t is {tensor.dtype} {tensor.shape}, expected I64 {(size,)}"
        )
    return tensor.read().astype(np.int64)


def _t2d(source: Source, size: int, vocab: int) -> np.ndarray:
    tensor = source.tensors["t2d"]
    if tensor.shape != (vocab,) or tensor.dtype != "BOOL":
        raise ConvertError(
            f"{source.folder}: t2d is {tensor.dtype} {tensor.shape}, expected BOOL {(vocab,)}"
        )
    mask = tensor.read()
    if mask.sum() != size:
        raise ConvertError(
            f"{source.folder}: t2d holds {mask.sum()} target ids, but draft_vocab_size is {size}"
        )
    return mask
