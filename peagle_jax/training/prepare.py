"""From settings and a target to what the loop takes: a head to start from and rows to learn."""

import dataclasses
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.models import Frozen, Target
from peagle_jax.presets import usual_drafter
from peagle_jax.training.dataset import Dataset
from peagle_jax.training.features import Online, Source, Stored
from peagle_jax.training.folders import DataError
from peagle_jax.training.identity import identity
from peagle_jax.training.initial import new_head
from peagle_jax.training.loss import TargetHead
from peagle_jax.training.packing import PackedRows
from peagle_jax.training.settings import SettingsError, TrainSettings
from peagle_jax.training.trainable import MASK_ROW, Parts, split
from peagle_jax.training.trainer import Materials
from peagle_jax.training.vocabulary import choose, count_supervised, coverage


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a run is about to do, for people.

    Attributes:
      documents: of the data.
      supervised: tokens that are learnt.
      rows: packed rows.
      fill: which part of them is taken.
      coverage: which part of the supervised tokens the draft vocabulary holds.
      trainable: weights that train.
      steps_per_epoch: optimiser steps that read every row once.
    """

    documents: int
    supervised: int
    rows: int
    fill: float
    coverage: float
    trainable: int
    steps_per_epoch: float

    def lines(self) -> list[str]:
        """Returns it in words."""
        return [
            f"{self.documents} documents, {self.supervised} supervised tokens, in {self.rows} rows "
            f"({self.fill:.0%} full): {self.steps_per_epoch:.0f} steps an epoch",
            f"the draft vocabulary covers {self.coverage:.2%} of the supervised tokens",
            f"{self.trainable:,} weights train",
        ]


def prepare(
    settings: TrainSettings,
    config: TargetConfig,
    weights: Frozen[Target],
    mask_token_id: int | None,
) -> tuple[Parts, Materials, Summary]:
    """Reads the data and makes the head that training starts from.

    Args:
      settings: the run.
      config: of the target.
      weights: the target's.
      mask_token_id: what `settings` or the tokenizer says; None for EAGLE-3.

    Raises:
      DataError: the data or the stored features are missing, damaged or do not fit the target.
      SettingsError, ConfigError: settings do not fit the target.
    """
    dataset = Dataset.read(*settings.data)
    rows = _rows(dataset, settings, config)
    architecture = head_config(settings, config, mask_token_id)
    token = architecture.mask_token_id
    if token is not None and (dataset.input_ids == token).any():
        raise SettingsError(
            f"mask_token_id {token} occurs in the data; name a token that text never holds"
        )
    source: Source = Online(rows, weights, architecture.aux_boundaries)
    if settings.features is not None:
        source = Stored(settings.features, rows, weights, architecture.aux_boundaries)
    validation = None
    if settings.validation:
        others = _rows(Dataset.read(*settings.validation), settings, config)
        validation = others, Online(others, weights, architecture.aux_boundaries)

    counts = count_supervised(dataset.input_ids, dataset.loss_mask, config.vocab_size)
    d2t, covered, ids = None, 1.0, None
    if architecture.draft_vocab_size < config.vocab_size:
        d2t, t2d = choose(counts, architecture.draft_vocab_size)
        covered, ids = coverage(counts, t2d), jnp.asarray(np.flatnonzero(t2d))
    target = weights.merge()
    try:
        head = new_head(
            architecture,
            target,
            d2t,
            seed=settings.seed,
            layers_from_target=settings.layers_from_target,
        )
    except ValueError as error:
        raise SettingsError(f"layers_from_target: {error}") from error
    parts = split(head, embedding=settings.embedding == "train", lm_head=settings.train_lm_head)
    if settings.embedding == "frozen":
        parts.trainable.pop(MASK_ROW, None)
    teacher = TargetHead.of(target, ids)
    content = _content(rows, weights, architecture, d2t)
    materials = Materials(rows, source, validation, teacher, content)
    supervised = int(counts.sum())
    size = sum(x.size for x in parts.trainable.values())
    summary = Summary(
        len(dataset), supervised, len(rows), rows.fill, covered, size,
        len(rows) / settings.rows_per_step,
    )  # fmt: skip
    return _in_dtype(parts, jnp.dtype(settings.dtype)), materials, summary


def online_source(settings: TrainSettings, config: TargetConfig, weights: Frozen[Target]) -> Online:
    """Returns a run's packed rows with what makes their features; raises as `prepare` does."""
    rows = _rows(Dataset.read(*settings.data), settings, config)
    return Online(rows, weights, boundaries_of(settings, config))


def boundaries_of(settings: TrainSettings, target: TargetConfig) -> tuple[int, ...]:
    """Returns the boundaries that make the feature.

    Raises:
      SettingsError: the target has not so many.
    """
    if settings.aux_boundaries is None:
        return usual_drafter(target, 1).aux_boundaries
    boundaries = settings.aux_boundaries
    if not boundaries or not all(0 <= b <= target.num_layers for b in boundaries):
        raise SettingsError(
            f"aux_boundaries {boundaries} are not among the target's 0..{target.num_layers}"
        )
    return boundaries


def head_config(
    settings: TrainSettings, target: TargetConfig, mask_token_id: int | None
) -> DrafterConfig:
    """Returns the head's architecture: the target's sizes, with dense MLPs and full attention."""
    parallel = settings.method == "p-eagle"
    if parallel and mask_token_id is None:
        raise SettingsError("a P-EAGLE head needs mask_token_id")
    if not parallel and settings.embedding == "mask_row":
        raise SettingsError("an EAGLE-3 head has no mask row to train: embedding must be frozen")
    size = settings.draft_vocab_size
    if size is not None and not 1 <= size <= target.vocab_size:
        raise SettingsError(
            f"draft_vocab_size {size} is not in 1..{target.vocab_size}, the target's vocabulary"
        )
    usual = usual_drafter(target, settings.num_layers, settings.draft_vocab_size)
    return dataclasses.replace(
        usual,
        qk_norm=target.qk_norm,
        aux_boundaries=boundaries_of(settings, target),
        mask_token_id=mask_token_id if parallel else None,
        num_depths=settings.num_depths if parallel else None,
        norm_before_residual=settings.norm_before_residual,
        norm_before_fc=settings.norm_before_fc,
        fc_norm=settings.fc_norm,
    )


def find_mask_token(settings: TrainSettings, config: TargetConfig, tokenizer: Any) -> int | None:
    """Returns the token of mask slots: the one named, the tokenizer's, or the first unused row.

    Raises:
      SettingsError: there is none; or the one named is outside the vocabulary.
    """
    if settings.method == "eagle-3":
        return None
    token = settings.mask_token_id
    if token is None and tokenizer is not None:
        token = tokenizer.mask_token_id
        if token is None and len(tokenizer) < config.vocab_size:
            token = len(tokenizer)
    if token is None:
        raise SettingsError(
            "the target's vocabulary has no unused row for the mask token: name mask_token_id, a "
            "token that text never holds"
        )
    if not 0 <= token < config.vocab_size:
        raise SettingsError(f"mask_token_id {token} is outside the vocabulary {config.vocab_size}")
    return token


def _rows(dataset: Dataset, settings: TrainSettings, config: TargetConfig) -> PackedRows:
    if dataset.vocab_size != config.vocab_size:
        raise DataError(
            f"the data is for a vocabulary of {dataset.vocab_size} tokens, the target has "
            f"{config.vocab_size}"
        )
    longest, context = int(np.diff(dataset.offsets).max()), config.max_position_embeddings
    if longest > context:
        raise DataError(
            f"a document has {longest} tokens, more than the target's context of {context}: make "
            f"the data with at most {context} tokens each"
        )
    return PackedRows(dataset, settings.row_tokens, settings.seed)


def _in_dtype(parts: Parts, dtype: jnp.dtype) -> Parts:
    def cast(array: jax.Array) -> jax.Array:
        return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array

    return dataclasses.replace(parts, frozen={k: cast(v) for k, v in parts.frozen.items()})


def _content(
    rows: PackedRows, target: Frozen[Target], head: DrafterConfig, d2t: np.ndarray | None
) -> str:
    ids = None if d2t is None else d2t.tolist()
    facts = rows.fingerprint(), identity(target), head.to_json(), ids
    return hashlib.sha256(repr(facts).encode()).hexdigest()
