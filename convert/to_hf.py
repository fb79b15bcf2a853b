"""Conversion of a native checkpoint to a folder that other software reads."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from peagle_jax import checkpoint
from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.convert.drafters import Given, drafter_config, drafter_slots
from peagle_jax.convert.errors import ConvertError, listed
from peagle_jax.convert.export_config import (
    DrafterFormat,
    generation_json,
    speculators_json,
    target_json,
    vllm_json,
)
from peagle_jax.convert.layouts import target_slots
from peagle_jax.convert.plan import Slot
from peagle_jax.convert.shards import Piece, assign_files, write_files
from peagle_jax.convert.source import Source, Tensor
from peagle_jax.convert.targets import target_config
from peagle_jax.convert.to_native import Folder

Format = Literal["vllm", "speculators", "hf"]
FORMATS: tuple[Format, ...] = ("vllm", "speculators", "hf")
SHARD_BYTES = 5_000_000_000

_CONFIGS = ("config.json", "generation_config.json")
_USUAL_BOUNDARIES = 3


@dataclasses.dataclass(frozen=True)
class Export:
    """What an export made.

    Attributes:
      path: the folder.
      config: architecture of what it holds.
      format: its layout.
      files: safetensors files in it.
      tensors: number of tensors in them.
      tensor_bytes: size of the tensors.
      warnings: what other software is known to make of this folder that it should not.
    """

    path: Path
    config: TargetConfig | DrafterConfig
    format: Format
    files: int
    tensors: int
    tensor_bytes: int
    warnings: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class _Contents:
    """What goes in the folder: JSON files by name, and tensors."""

    json_files: dict[str, dict[str, Any]]
    pieces: list[Piece]


def to_hf(
    source: Folder,
    destination: Folder,
    format: Format,
    target: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> Export:
    """Converts a native checkpoint to a folder that other software reads.

    Nothing appears under `destination` before it is complete. The memory needed is a few times
    that of the largest array, however large the model is.

    Args:
      source: a native checkpoint.
      destination: folder to make; it must not exist or be empty.
      format: "vllm" and "speculators" for drafters, "hf" for targets.
      target: hub id or folder of a drafter's target, which the speculators layout names.
      max_shard_bytes: size above which tensors go to several files.
      progress: show a bar on standard error, if that is a terminal.

    Raises:
      ConvertError: the format does not fit the checkpoint or cannot hold what its config says.
      CheckpointError: the source is missing or damaged, the destination exists or cannot be
        written.
      ConfigError: the source's config holds values that this release does not support.
    """
    native, to = Path(source), Path(destination)
    config, dtype = checkpoint.read_any_config(native)
    arrays = checkpoint.abstract_parameters(config, dtype)
    if isinstance(config, TargetConfig):
        _require_format(format, ("hf",), "target")
        contents = _target_folder(config, dtype, arrays)
        warnings: tuple[str, ...] = ()
    else:
        _require_format(format, ("vllm", "speculators"), "drafter")
        d2t = {n: a for n, a in arrays.items() if n == "d2t"}
        offsets = checkpoint.load_arrays(native, d2t)["d2t"] if d2t else None
        layout: DrafterFormat = "vllm" if format == "vllm" else "speculators"
        contents = _drafter_folder(config, dtype, arrays, offsets, layout, target)
        warnings = drafter_warnings(config, layout)
    _check_reads_back(config, contents, to, format)

    files = assign_files(contents.pieces, max_shard_bytes)
    size = sum(piece.nbytes for piece in contents.pieces)
    with checkpoint.atomic_directory(to) as partial:
        if (free := shutil.disk_usage(partial).free) < size:
            raise ConvertError(f"cannot write {to}: it needs {size:,} bytes, {free:,} are free")
        for name, values in contents.json_files.items():
            (partial / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        for path in sorted((native / "tokenizer").glob("*")):
            if path.name not in contents.json_files:
                shutil.copyfile(path, partial / path.name)
        with tqdm(
            total=size,
            desc=f"Writing {to.name}",
            unit="B",
            unit_scale=True,
            disable=None if progress else True,
        ) as bar:
            write_files(
                partial,
                files,
                {name: a.size * a.dtype.itemsize for name, a in arrays.items()},
                lambda names: checkpoint.load_arrays(native, {n: arrays[n] for n in names}),
                bar.update,
            )
    return Export(to, config, format, len(files), len(contents.pieces), size, warnings)


def _require_format(given: Format, fitting: tuple[Format, ...], kind: str) -> None:
    if given not in fitting:
        raise ConvertError(
            f"format {given} is not one of a {kind}'s: use --format {' or '.join(fitting)}"
        )


def _target_folder(
    config: TargetConfig, dtype: jnp.dtype, arrays: dict[str, jax.ShapeDtypeStruct]
) -> _Contents:
    values = (target_json(config, str(dtype)), generation_json(config))
    return _Contents(
        dict(zip(_CONFIGS, values, strict=True)), _pieces(target_slots(config), arrays)
    )


def _drafter_folder(
    config: DrafterConfig,
    dtype: jnp.dtype,
    arrays: dict[str, jax.ShapeDtypeStruct],
    d2t: np.ndarray | None,
    layout: DrafterFormat,
    target: str | None,
) -> _Contents:
    if layout == "vllm":
        values = vllm_json(config, str(dtype))
        slots = drafter_slots(config, first="midlayer")
    else:
        if target is None and not (config.own_embedding and config.own_lm_head):
            raise ConvertError(
                "the head shares the target's embedding or lm_head, which the speculators package "
                "reads from the target by its name: give it as --target"
            )
        values = speculators_json(config, str(dtype), _verifier(target))
        slots = drafter_slots(config, first="layers.0")
    pieces = _pieces(slots, arrays)
    # The AWS heads have the two maps with a full vocabulary too, the package's have not.
    if layout == "vllm" or d2t is not None:
        pieces += _vocabulary(config, d2t)
    return _Contents({"config.json": values}, pieces)


def _verifier(target: str | None) -> dict[str, Any]:
    """Returns what a speculators config says about the target; its classes if it is a folder."""
    path = Path(target or "") / "config.json"
    architectures: list[str] = []
    if target is not None and path.is_file():
        try:
            architectures = json.loads(path.read_text(encoding="utf-8")).get("architectures") or []
        except (OSError, ValueError, AttributeError) as error:
            raise ConvertError(f"cannot read {path}: {error}") from error
    return {"name_or_path": target, "architectures": architectures}


def _pieces(slots: dict[str, Slot], arrays: dict[str, jax.ShapeDtypeStruct]) -> list[Piece]:
    return [
        # Everybody stores the one vector that is shaped like a batch of rows as such.
        Piece(
            name,
            (1, 1, *slot.shape) if name == "mask_hidden" else slot.shape,
            np.dtype(arrays[slot.native].dtype),
            slot,
        )
        for name, slot in slots.items()
    ]


def _vocabulary(config: DrafterConfig, d2t: np.ndarray | None) -> list[Piece]:
    """Returns the maps of the draft vocabulary, by default the identity."""
    size, vocab = config.draft_vocab_size, config.vocab_size
    offsets = np.zeros(size, np.int64) if d2t is None else d2t.astype(np.int64)
    drafted = np.zeros(vocab, np.bool_)
    drafted[np.arange(size) + offsets] = True
    maps = {"d2t": offsets, "t2d": drafted}
    return [Piece(name, value.shape, value.dtype, value) for name, value in maps.items()]


def _check_reads_back(
    config: TargetConfig | DrafterConfig, contents: _Contents, to: Path, format: Format
) -> None:
    """Checks that the importer makes the same config of what is about to be written.

    Raises:
      ConvertError: it does not; the message names what would be lost.
    """
    values, generation = (contents.json_files.get(name, {}) for name in _CONFIGS)
    tensors = {p.name: Tensor(p.name, "", p.shape, to, offset=0) for p in contents.pieces}
    source = Source(to, values, generation, tensors)
    again: TargetConfig | DrafterConfig
    try:
        if isinstance(config, TargetConfig):
            again = target_config(source)
        else:
            again = dataclasses.replace(
                drafter_config(source, Given(aux_convention="boundary")),
                aux_source_convention=config.aux_source_convention,  # for display
            )
    except ConvertError as error:
        raise ConvertError(f"the {format} layout cannot hold this model: {error}") from error
    before, after = (dataclasses.asdict(c) for c in (config, again))
    lost = [
        f"{name} = {value!r} would be read as {after[name]!r}"
        for name, value in before.items()
        if value != after[name]
    ]
    if lost:
        raise ConvertError(f"the {format} layout cannot hold this model: {listed(lost)}")


def drafter_warnings(config: DrafterConfig, layout: DrafterFormat) -> tuple[str, ...]:
    """Returns what known readers of a head's folder do not do as its config says."""
    parallel = config.mask_token_id is not None
    found = []
    if config.qk_norm and layout == "vllm":
        found.append(
            "the head has q/k norms: vLLM serves it only in versions that have the class "
            f"{'PeagleQwen3ForCausalLM' if parallel else 'Eagle3Qwen3ForCausalLM'}"
        )
    if config.fc_norm and layout == "vllm":
        found.append("the head has fc_norm: vLLM knows it only since EAGLE-3.1 (its PR 42764)")
    if config.fc_norm and layout == "speculators" and parallel:
        found.append(
            "the head has fc_norm: vLLM does not take that over from a P-EAGLE config in the "
            "speculators layout and serves the head wrongly; use --format vllm for it"
        )
    if config.hidden_size != config.target_hidden_size and layout == "speculators":
        found.append(
            f"hidden_size {config.hidden_size} is not the target's {config.target_hidden_size}: "
            "vLLM serves such a head, but the speculators package cannot load it"
        )
    if config.attention_bias and not config.attention_output_bias:
        found.append(
            "q, k and v have biases and o_proj has none: vLLM and speculators make a bias for "
            "o_proj too and leave it unset"
        )
    if len(config.aux_boundaries) != _USUAL_BOUNDARIES:
        found.append(
            f"the head reads the target at {len(config.aux_boundaries)} boundaries: vLLM once took "
            f"{_USUAL_BOUNDARIES} for granted, so it needs a recent one"
        )
    if config.aux_boundaries[0] == 1:
        found.append(
            "the first boundary is 1: SGLang takes such ids for layers whose output is read, and "
            "shifts them all by one"
        )
    return tuple(found)
