"""What a training run is told, as a dataclass and as TOML."""

import dataclasses
import math
import tomllib
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_type_hints

from peagle_jax.training.cod import CodConfig
from peagle_jax.training.loss import LOSSES


class SettingsError(ValueError):
    """A setting is unknown or out of range."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """A training run. Every field is a key of the TOML file and a flag of `peagle-jax train`.

    Attributes:
      target: folder or hub id of the target.
      data: datasets that `peagle-jax data` made.
      output: folder for checkpoints, metrics and the head.
      features: folder of `peagle-jax data features`, or None to run the target while training.
      validation: datasets that are only measured on.
      method: "p-eagle" (mask slots, in parallel) or "eagle-3" (test-time-training unroll).
      num_layers: decoder blocks of the head.
      num_depths: K, drafts per pass; of EAGLE-3 the steps of the unroll.
      draft_vocab_size: tokens that the head can propose, the most frequent ones of the data; None
        for all.
      mask_token_id: token that mask slots are fed, one that text never holds. None takes the
        tokenizer's mask token, or the first row of the embedding that is no token.
      aux_boundaries: boundaries of the target that make the feature; None for EAGLE-3's choice,
        2, L / 2 and L - 3.
      norm_before_residual: of the head; see `DrafterConfig`, and so are the next two.
      norm_before_fc: of the head.
      fc_norm: of the head.
      layers_from_target: start from the target's last blocks instead of drawn ones.
      embedding: "train" it, train the "mask_row" alone (P-EAGLE), or leave it "frozen": then the
        saved head shares its target's.
      train_lm_head: train the lm_head too; without, it stays the target's rows.
      ratio: part of its elements that a depth keeps of the one before (COD).
      ratio_floor: least part of the supervised rows that a depth keeps.
      max_anchors: most rows of a packed row that chains start from, or None.
      loss: name of an element's loss, as in speculators.
      step_decay: weight of an EAGLE-3 step relative to the one before.
      row_tokens: S, tokens of a packed row.
      rows_per_step: packed rows of an optimiser step (gradient accumulation).
      steps: optimiser steps.
      optimiser: "adamw", or "muon" for the matrices of the blocks and AdamW for the rest.
      learning_rate: at its highest.
      warmup_steps: steps in which it rises, evenly, to that.
      schedule: how it falls afterwards, to `final_learning_rate`.
      final_learning_rate: as a part of `learning_rate`.
      weight_decay: of matrices only; with Muon, of those that it takes.
      beta1: AdamW's.
      beta2: AdamW's.
      clip_norm: largest norm of the gradient.
      dtype: of activations and of the weights in products; masters are float32.
      partitions: segments that the mask slots of a row are cut into, to save memory.
      remat: compute the head's blocks again in the backward pass, to save memory.
      chunk: elements whose logits are in memory at a time.
      seed: of everything that is drawn.
      save_every: steps between two checkpoints.
      keep: checkpoints kept.
      validate_every: steps between two passes over `validation`.
      generate_every: steps between two measurements of the real acceptance length; 0 for never.
      generate_prompts: JSON lines of prompts for them.
      generate_tokens: tokens of an answer there.
    """

    target: str
    data: tuple[str, ...]
    output: str
    features: str | None = None
    validation: tuple[str, ...] = ()
    method: Literal["p-eagle", "eagle-3"] = "p-eagle"
    num_layers: int = 4
    num_depths: int = 8
    draft_vocab_size: int | None = None
    mask_token_id: int | None = None
    aux_boundaries: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    layers_from_target: bool = False
    embedding: Literal["train", "mask_row", "frozen"] = "train"
    train_lm_head: bool = False
    ratio: float = 0.8
    ratio_floor: float = 0.2
    max_anchors: int | None = None
    loss: str = "kl_div"
    step_decay: float = 1.0
    row_tokens: int = 2048
    rows_per_step: int = 8
    steps: int = 10000
    optimiser: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-4
    warmup_steps: int = 100
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_learning_rate: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    partitions: int = 1
    remat: bool = False
    chunk: int = 256
    seed: int = 0
    save_every: int = 500
    keep: int = 2
    validate_every: int = 500
    generate_every: int = 0
    generate_prompts: str | None = None
    generate_tokens: int = 128

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            choices = get_args(kinds[field.name])
            if choices and all(isinstance(c, str) for c in choices) and value not in choices:
                raise SettingsError(f"{field.name} {value!r} is not one of {', '.join(choices)}")
        if self.loss not in LOSSES:
            raise SettingsError(f"loss {self.loss!r} is not one of {', '.join(LOSSES)}")
        least = dict.fromkeys(
            ("num_layers", "num_depths", "rows_per_step", "steps", "partitions", "chunk", "keep"), 1
        ) | dict.fromkeys(("warmup_steps", "generate_every", "seed"), 0)
        least |= {"row_tokens": 2, "save_every": 1, "validate_every": 1, "generate_tokens": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise SettingsError(f"{name} must be at least {bound}, got {getattr(self, name)}")
        for name in ("learning_rate", "clip_norm", "step_decay"):
            if not 0 < getattr(self, name) < math.inf:
                raise SettingsError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise SettingsError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if not 0 <= self.final_learning_rate <= 1:
            raise SettingsError(
                f"final_learning_rate must be in 0..1, got {self.final_learning_rate}"
            )
        if not 0 <= self.weight_decay < math.inf:
            raise SettingsError(f"weight_decay must not be negative, got {self.weight_decay}")
        if self.warmup_steps >= self.steps:
            raise SettingsError(
                f"warmup_steps {self.warmup_steps} leave none of the {self.steps} steps"
            )
        try:
            _ = self.cod
        except ValueError as error:
            raise SettingsError(str(error)) from error
        if not self.data:
            raise SettingsError("data names no dataset")
        if self.generate_every and not self.generate_prompts:
            raise SettingsError("generate_every needs generate_prompts, a file of prompts")

    @property
    def cod(self) -> CodConfig:
        """How many elements each depth keeps."""
        return CodConfig(self.num_depths, self.ratio, self.ratio_floor, self.max_anchors)

    @classmethod
    def read(cls, path: Path | None, given: dict[str, Any]) -> Self:
        """Reads a TOML file, and puts what is given in place of its values.

        Raises:
          SettingsError: the file cannot be read, or a setting is unknown, missing, of another type
            or out of range.
        """
        values: dict[str, Any] = {}
        if path is not None:
            try:
                values = tomllib.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise SettingsError(f"cannot read {path}: {error}") from error
        values |= given
        kinds = get_type_hints(cls)
        if unknown := sorted(set(values) - set(kinds)):
            raise SettingsError(f"unknown setting {unknown[0]!r}; there are {', '.join(kinds)}")
        needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        if missing := [name for name in needed if name not in values]:
            raise SettingsError(f"{', '.join(missing)} must be given")
        return cls(**{name: _typed(name, value, kinds[name]) for name, value in values.items()})


def _typed(name: str, value: Any, kind: Any) -> Any:
    """Returns a value of a TOML file as the field holds it."""
    options = get_args(kind)
    if kind in (tuple[str, ...], tuple[int, ...]) or tuple[int, ...] in options:
        element = int if kind != tuple[str, ...] else str
        if isinstance(value, list | tuple) and all(type(v) is element for v in value):
            return tuple(value)
        raise SettingsError(f"{name} must be a list of {element.__name__}, got {value!r}")
    if type(None) in options:
        if value is None:
            return None
        kind = next(option for option in options if option is not type(None))
    elif options:  # a Literal
        kind = str
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise SettingsError(f"{name} must be {kind.__name__}, got {value!r}")
    return value
