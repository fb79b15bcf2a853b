"""From a name that a user gives to a loaded model: folder or hub id, conversion, arrays."""

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from peagle_jax import checkpoint
from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.models import Drafter, Frozen, Target

# What a hub repository is downloaded for: weights, configs and tokenizer. Stars match slashes too.
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*merges.txt", "params/**")
# Torch's files hold the same weights, so they are wanted only where there are no safetensors.
HUB_TORCH_PATTERNS = ("pytorch_model*.bin",)
# Where GPT-OSS and Llama repositories keep the whole model once more, in other formats.
HUB_COPIES = ("original/*", "metal/*")


Source = str | os.PathLike[str]


class LoadError(ValueError):
    """A model cannot be found or loaded."""


@dataclasses.dataclass(frozen=True)
class LoadedTarget:
    """A target, ready for `generate`.

    Attributes:
      config: architecture.
      weights: the module's arrays on the device.
      tokenizer: the Hugging Face tokenizer, or None where the checkpoint has none.
      path: the native checkpoint it came from.
    """

    config: TargetConfig
    weights: Frozen[Target]
    tokenizer: Any
    path: Path


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
    """A drafter, ready for `generate`.

    Attributes:
      config: architecture.
      weights: the module's arrays on the device.
      path: the native checkpoint it came from.
    """

    config: DrafterConfig
    weights: Frozen[Drafter]
    path: Path


def load_target(source: Source, *, dtype: str | None = None) -> LoadedTarget:
    """Loads a target.

    Args:
      source: folder of a native checkpoint or of a Hugging Face one (converted once into the
        cache folder, see `cache_folder`), or an id on the Hugging Face hub.
      dtype: "float32" or "bfloat16" for weights and activations. By default float32 on CPU,
        where bfloat16 is slower, and the stored dtype elsewhere.

    Raises:
      LoadError: nothing is found under `source`, or `dtype` is unknown.
      CheckpointError, ConvertError, ConfigError: what is found is damaged or not supported.
    """
    path = _native_path(source, "target")
    config, stored = checkpoint.read_config(path, TargetConfig)
    module = checkpoint.load(Target, path, config, _dtype(dtype, stored), _device())
    return LoadedTarget(config, Frozen.of(module), _tokenizer(path / "tokenizer"), path)


def load_tokenizer(source: Source) -> tuple[TargetConfig, Any]:
    """Returns a target's config and tokenizer (None where it has none), without its weights.

    Args:
      source: as for `load_target`.

    Raises:
      as `load_target`.
    """
    path = _native_path(source, "target")
    return checkpoint.read_config(path, TargetConfig)[0], _tokenizer(path / "tokenizer")


def load_drafter(
    source: Source,
    *,
    dtype: str | None = None,
    target_layers: int | None = None,
) -> LoadedDrafter:
    """Loads a drafter.

    Args:
      source: as for `load_target`.
      dtype: as for `load_target`.
      target_layers: decoder blocks of its target. Needed only by a Hugging Face checkpoint
        that does not say at which boundaries it reads the target.

    Raises:
      LoadError: nothing is found under `source`, or `dtype` is unknown.
      CheckpointError, ConvertError, ConfigError: what is found is damaged or not supported.
    """
    path = _native_path(source, "drafter", target_layers)
    config, stored = checkpoint.read_config(path, DrafterConfig)
    module = checkpoint.load(Drafter, path, config, _dtype(dtype, stored), _device())
    return LoadedDrafter(config, Frozen.of(module), path)


def cache_folder() -> Path:
    """Returns where converted checkpoints and compiled programs are kept.

    `$PEAGLE_JAX_CACHE`, else `$XDG_CACHE_HOME/peagle_jax`, else `~/.cache/peagle_jax`.
    """
    if named := os.environ.get("PEAGLE_JAX_CACHE"):
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "peagle_jax"


def _native_path(source: Source, kind: str, target_layers: int | None = None) -> Path:
    """Returns the native checkpoint of `source`, converting it into the cache if need be."""
    if not os.fspath(source):
        raise LoadError(f"the name of the {kind} is empty")
    folder = Path(source).expanduser()
    if not os.path.exists(folder):
        folder = _download(str(source))
    if not folder.is_dir():
        raise LoadError(f"{folder} is a file; name the folder of the checkpoint")
    if checkpoint.is_native(folder):
        return folder
    name = f"{folder.resolve().name}-{_fingerprint(folder, target_layers)}"
    destination = cache_folder() / "models" / name
    if not checkpoint.is_intact(destination):
        shutil.rmtree(destination, ignore_errors=True)  # damaged since it was made
        from peagle_jax.convert import ConvertError, convert_drafter, convert_target

        try:
            if kind == "target":
                convert_target(folder, destination)
            else:
                convert_drafter(folder, destination, target_layers=target_layers)
        except ConvertError:
            if not checkpoint.is_intact(destination):  # else another process was faster
                raise
    return destination


def _download(name: str) -> Path:
    """Downloads a hub repository and returns its folder."""
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise LoadError(f"{name}: no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch(*patterns: str) -> Path:
        wanted, copies = list(patterns), list(HUB_COPIES)
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=copies))

    try:
        folder = fetch(*HUB_PATTERNS)
        if any(folder.glob("*.safetensors")) or checkpoint.is_native(folder):
            return folder
        return fetch(*HUB_PATTERNS, *HUB_TORCH_PATTERNS)  # what is there is not fetched again
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise LoadError(
            f"{name}: no such folder, and the Hugging Face hub did not give a model of that id "
            f"({reason}); name a folder, or check the id and the network"
        ) from error


def _fingerprint(folder: Path, target_layers: int | None) -> str:
    """Returns a short hash of the folder's place and of its files' names, sizes and times."""
    facts: Iterable[Any] = (
        (p.name, p.stat().st_size, p.stat().st_mtime_ns)
        for p in sorted(folder.iterdir())
        if p.is_file()
    )
    described = repr((checkpoint.FORMAT_VERSION, str(folder.resolve()), target_layers, *facts))
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _dtype(name: str | None, stored: jnp.dtype) -> jnp.dtype:
    if name is None:
        return jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" else stored
    if name not in ("float32", "bfloat16"):
        raise LoadError(f"dtype {name!r} is not supported; use float32 or bfloat16")
    return jnp.dtype(name)


def _device() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _tokenizer(folder: Path) -> Any:
    if not folder.is_dir():
        return None
    # Importing transformers warns that there is no torch, which a tokenizer does not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the tokenizers library raises plain Exceptions
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise LoadError(
            f"{folder}: the tokenizer cannot be loaded ({reason}); mend the source's tokenizer "
            "files and convert it again"
        ) from error
