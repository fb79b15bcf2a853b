"""Conversion of a Hugging Face folder to a native checkpoint."""

import dataclasses
import os
from pathlib import Path

import jax
from tqdm import tqdm

from peagle_jax import checkpoint
from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.convert.aux_ids import AuxConvention
from peagle_jax.convert.drafters import Given, drafter_plan, is_drafter
from peagle_jax.convert.errors import ConvertError
from peagle_jax.convert.plan import Plan
from peagle_jax.convert.source import Source, open_source
from peagle_jax.convert.targets import target_plan
from peagle_jax.convert.weights import (
    check_tensors,
    read_arrays,
    stored_dtype,
)

Folder = str | os.PathLike[str]

_TOKENIZER_MODELS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TOKENIZER_FILES = (
    *_TOKENIZER_MODELS,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",  # says which tokenizer class to use where tokenizer_config.json does not
)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What a conversion made.

    Attributes:
      path: the native checkpoint.
      config: its architecture.
      dtype: of its floating arrays.
      parameters: number of weights, however they are packed.
      array_bytes: size of all arrays in memory.
    """

    path: Path
    config: TargetConfig | DrafterConfig
    dtype: str
    parameters: int
    array_bytes: int


def to_native(
    source: Folder,
    destination: Folder,
    dtype: str = "keep",
    target_layers: int | None = None,
    progress: bool = True,
    aux_convention: AuxConvention | None = None,
    mask_token_id: int | None = None,
) -> Conversion:
    """Converts a Hugging Face folder, a drafter's or a target's, to a native checkpoint.

    Nothing appears under `destination` before it is complete. The memory needed is the output's
    size and a few megabytes.

    Args:
      source: folder with config.json and safetensors, or torch's `.bin` files.
      destination: folder to make; it must not exist or be empty.
      dtype: "bfloat16", "float32", or "keep": bfloat16 if all weights are, else float32.
      target_layers: decoder blocks of a drafter's target, which a drafter needs whose config
        does not say at which boundaries it reads the target. Targets ignore it.
      progress: show a bar on standard error, if that is a terminal.
      aux_convention: what the layer ids in a drafter's config count, where neither its format nor
        the ids themselves say it: "boundary" (the input of layer id) or "layer_output". Targets
        ignore it.
      mask_token_id: a P-EAGLE head's mask token, where its config names none. Targets ignore it.

    Raises:
      ConvertError: the source is missing, damaged or not supported, or the destination exists
        or cannot be written.
    """
    opened = _open(source, destination)
    if is_drafter(opened):
        plan = drafter_plan(opened, Given(target_layers, aux_convention, mask_token_id))
    else:
        plan = target_plan(opened)
    return _convert(opened, Path(destination), plan, dtype, progress)


def convert_target(
    source: Folder, destination: Folder, dtype: str = "keep", progress: bool = True
) -> Conversion:
    """Converts a target; as `to_native`, but a drafter's folder is an error."""
    opened = _open(source, destination)
    if is_drafter(opened):
        raise ConvertError(f"{opened.folder} holds a drafter, not a target")
    return _convert(opened, Path(destination), target_plan(opened), dtype, progress)


def convert_drafter(
    source: Folder,
    destination: Folder,
    dtype: str = "keep",
    target_layers: int | None = None,
    progress: bool = True,
    aux_convention: AuxConvention | None = None,
    mask_token_id: int | None = None,
) -> Conversion:
    """Converts a drafter; as `to_native`, but a target's folder is an error."""
    opened = _open(source, destination)
    if not is_drafter(opened):
        raise ConvertError(f"{opened.folder} holds no P-EAGLE or EAGLE-3 head: no fc.weight")
    plan = drafter_plan(opened, Given(target_layers, aux_convention, mask_token_id))
    return _convert(opened, Path(destination), plan, dtype, progress)


def _open(source: Folder, destination: Folder) -> Source:
    folder, to = Path(source), Path(destination)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConvertError(f"{to} exists already: remove it or name another folder")
    if checkpoint.is_native(folder):
        raise ConvertError(f"{folder} is a native checkpoint already")
    return open_source(folder)


def _convert(
    source: Source, destination: Path, plan: Plan, dtype: str, progress: bool
) -> Conversion:
    with jax.default_device(jax.devices("cpu")[0]):
        check_tensors(source, plan)
        stored = stored_dtype(source, plan, dtype)
        with tqdm(
            total=sum(a.size * a.dtype.itemsize for a in plan.natives(stored).values()),
            desc=f"Reading {source.folder.name}",
            unit="B",
            unit_scale=True,
            disable=None if progress else True,
        ) as bar:
            arrays = read_arrays(source, plan, stored, bar.update)
            bar.set_description(f"Writing {destination.name}")
            try:
                checkpoint.save(destination, plan.config, arrays, _tokenizer_files(source.folder))
            except checkpoint.CheckpointError as error:
                raise ConvertError(str(error)) from error
            bar.set_description(f"Converted {source.folder.name}")
    return Conversion(
        path=destination,
        config=plan.config,
        dtype=str(stored),
        parameters=sum(checkpoint.weight_count(name, a) for name, a in arrays.items()),
        array_bytes=sum(a.nbytes for a in arrays.values()),
    )


def _tokenizer_files(folder: Path) -> dict[str, Path]:
    """Returns the files of the source's tokenizer, none if it has no tokenizer."""
    if not any((folder / name).is_file() for name in _TOKENIZER_MODELS):
        return {}
    return {name: folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()}
