"""The native checkpoint: a folder that the runtime loads and nothing else.

    DIR/config.json   kind ("target" or "drafter"), architecture, stored dtype, file sizes
    DIR/params/       the module's arrays by name, written by Orbax
    DIR/tokenizer/    the source's tokenizer files and config.json (targets that have one)

A folder appears under its name only when it is complete.
"""

import contextlib
import gc
import json
import os
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from orbax.checkpoint import v1 as ocp

from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.models import Drafter, Target
from peagle_jax.models.quantized import BLOCK, BLOCK_BYTES

FORMAT = "peagle_jax"
FORMAT_VERSION = 2

ModelConfig = TargetConfig | DrafterConfig
_KINDS: dict[type, str] = {TargetConfig: "target", DrafterConfig: "drafter"}


class CheckpointError(ValueError):
    """A checkpoint is missing, incomplete, damaged or of another kind."""


def abstract_parameters(
    config: ModelConfig, dtype: jnp.dtype | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the module's arrays by name, as shapes.

    Args:
      config: architecture.
      dtype: of the floating arrays, float32 by default. Ids are int32, packed weights uint8.
    """
    module = Target if isinstance(config, TargetConfig) else Drafter
    return dict(_named(_abstract_module(module, config, dtype or jnp.dtype("float32"))))


def arrays_of(module: Target | Drafter) -> dict[str, jax.Array]:
    """Returns a module's arrays by name, as `save` takes them."""
    return dict(_named(module))


def weight_count(name: str, array: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Returns how many weights an array holds, however they are packed.

    Ids are no weights, nor are the scales of packed ones.
    """
    if array.dtype == jnp.int32:
        return 0
    if array.dtype != jnp.uint8:
        return array.size
    return array.size // BLOCK_BYTES * BLOCK if name.endswith(".blocks") else 0


@contextlib.contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """Yields a folder to write into, which becomes `directory` when the block succeeds.

    It lies beside `directory` under a name that starts with ".", so a run that is killed leaves
    nothing that loads; what earlier killed runs left is removed.

    Raises:
      CheckpointError: `directory` exists and is not an empty folder, or the disk fails.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"{directory} exists already: remove it or name another folder")
    prefix = f".{directory.name}.partial-"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        for stale in directory.parent.glob(f"{prefix}*"):
            if not _is_running(stale.name.removeprefix(prefix).split("-")[0]):
                shutil.rmtree(stale, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=directory.parent))
    except OSError as error:
        raise CheckpointError(f"cannot write {directory}: {error}") from error
    try:
        partial.chmod(0o755)
        yield partial
        os.replace(partial, directory)
    except OSError as error:
        raise CheckpointError(f"cannot write {directory}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError, ValueError):
        return False
    return True


def save(
    directory: Path,
    config: ModelConfig,
    arrays: Mapping[str, jax.Array],
    tokenizer_files: Mapping[str, Path] | None = None,
) -> None:
    """Writes a native checkpoint, all or nothing.

    Args:
      directory: folder to make; it must not exist or be empty.
      config: architecture.
      arrays: by the names and shapes of `abstract_parameters(config)`; floating arrays all of
        one dtype. JAX arrays on the CPU are written without a copy.
      tokenizer_files: files to copy into `tokenizer/`, by their name there.

    Raises:
      CheckpointError: names or shapes do not fit the config, or the folder cannot be written.
    """
    expected = abstract_parameters(config)
    if set(arrays) != set(expected):
        missing, extra = sorted(set(expected) - set(arrays)), sorted(set(arrays) - set(expected))
        raise CheckpointError(f"arrays do not fit the config: missing {missing}, extra {extra}")
    for name, array in arrays.items():
        if array.shape != expected[name].shape:
            raise CheckpointError(f"{name} is {array.shape}, expected {expected[name].shape}")
    floats = (a.dtype for a in arrays.values() if jnp.issubdtype(a.dtype, jnp.floating))
    dtypes = sorted({str(dtype) for dtype in floats})
    if len(dtypes) != 1:
        raise CheckpointError(f"floating arrays must have one dtype, got {dtypes}")
    with atomic_directory(directory) as partial:
        _write_arrays(partial / "params", arrays)
        for name, source in (tokenizer_files or {}).items():
            (partial / "tokenizer").mkdir(exist_ok=True)
            shutil.copyfile(source, partial / "tokenizer" / name)
        header = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "kind": _KINDS[type(config)],
            "dtype": dtypes[0],
            "config": config.to_json(),
            "files": _file_sizes(partial),
        }
        (partial / "config.json").write_text(json.dumps(header, indent=2) + "\n")


def _write_arrays(folder: Path, arrays: Mapping[str, jax.Array]) -> None:
    # Compressing keeps all of the compressed model in memory until the end, and saves a fifth
    # of the space of real weights at best.
    context = ocp.Context()
    context.array.saving.use_compression = False
    try:
        with context:
            ocp.save(folder, dict(arrays))
    except ValueError as error:  # TensorStore has no type of its own for a full disk
        raise OSError(_first_line(error)) from error


def is_native(directory: Path) -> bool:
    """Whether the folder's config.json says that it is a native checkpoint."""
    try:
        header = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(header, dict) and header.get("format") == FORMAT


def is_intact(directory: Path) -> bool:
    """Whether the folder is a native checkpoint of this format with all of its files."""
    try:
        _read_header(directory)
    except CheckpointError:
        return False
    return True


def read_config[C: (TargetConfig, DrafterConfig)](
    directory: Path, config_type: type[C]
) -> tuple[C, jnp.dtype]:
    """Reads the architecture and the stored dtype, and checks that the files are all there.

    Raises:
      CheckpointError: no native checkpoint of this kind, or a file is missing or cut off.
      ConfigError: the config holds unknown values.
    """
    header = _read_header(directory)
    if header["kind"] != (kind := _KINDS[config_type]):
        raise CheckpointError(f"{directory} holds a {header['kind']}, not a {kind}")
    return config_type.from_json(header["config"]), jnp.dtype(header["dtype"])


def read_any_config(directory: Path) -> tuple[ModelConfig, jnp.dtype]:
    """Reads the architecture and the stored dtype of a target or a drafter; as `read_config`."""
    kind = _read_header(directory)["kind"]
    for config_type, name in _KINDS.items():
        if name == kind:
            return read_config(directory, config_type)
    raise CheckpointError(f"{directory} holds a {kind}, not a target or a drafter")


def _read_header(directory: Path) -> dict[str, Any]:
    """Reads config.json, and checks its entries and the files that it lists."""
    path = directory / "config.json"
    try:
        header = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CheckpointError(
            f"{directory} is no native checkpoint; convert it with peagle-convert"
        )
    kinds = {"format_version": int, "kind": str, "dtype": str, "config": dict, "files": dict}
    wrong = sorted(key for key, kind in kinds.items() if not isinstance(header.get(key), kind))
    if wrong:
        raise CheckpointError(
            f"{path} has no {wrong}, or of another type; convert the source checkpoint again"
        )
    if header["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{directory} has format version {header['format_version']}, this release reads "
            f"{FORMAT_VERSION}; convert the source checkpoint again"
        )
    if header["dtype"] not in ("bfloat16", "float32"):
        raise CheckpointError(f"{path}: dtype {header['dtype']!r} is not bfloat16 or float32")
    sizes = _file_sizes(directory)
    damaged = sorted(name for name, size in header["files"].items() if sizes.get(name) != size)
    if damaged:
        raise CheckpointError(
            f"{directory} is damaged: {damaged} missing or of another size; convert it again"
        )
    return header


def load[M: Target | Drafter](
    module: type[M],
    directory: Path,
    config: ModelConfig,
    dtype: jnp.dtype,
    sharding: jax.sharding.Sharding,
) -> M:
    """Loads the arrays of a native checkpoint into its module.

    Args:
      module: `Target` or `Drafter`, whichever the config is of.
      directory: the native checkpoint.
      config: what `read_config` returned for it.
      dtype: of weights and activations; stored weights are cast while they are read.
      sharding: where the arrays go.

    Raises:
      CheckpointError: the arrays cannot be read or do not fit the config.
    """
    abstract = _abstract_module(module, config, dtype)
    wanted = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
        for name, value in _named(abstract)
    }
    arrays = _read_arrays(directory, wanted, ocp.Context())
    graphdef, state = nnx.split(abstract)
    flat = [(path, v.replace(arrays[_name(path)])) for path, v in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def load_arrays(
    directory: Path, arrays: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, np.ndarray]:
    """Reads some arrays of a native checkpoint into memory, and no others.

    Args:
      directory: the native checkpoint.
      arrays: shapes and dtypes by name; `abstract_parameters` names them all.

    Raises:
      CheckpointError: the arrays cannot be read.
    """
    cpu = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    wanted = {
        name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=cpu) for name, a in arrays.items()
    }
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    loaded = _read_arrays(directory, wanted, context)
    return {name: np.asarray(array) for name, array in loaded.items()}


def _read_arrays(
    directory: Path, wanted: Mapping[str, jax.ShapeDtypeStruct], context: ocp.Context
) -> dict[str, jax.Array]:
    try:
        with context:
            return ocp.load(directory.absolute() / "params", dict(wanted))
    except Exception as error:  # Orbax and TensorStore raise many kinds for damaged files
        reason = _first_line(error)
        # The error holds coroutines that nobody awaited; Python would warn of each, any time later.
        traceback.clear_frames(error.__traceback__)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        gc.collect()
    raise CheckpointError(
        f"cannot load {directory / 'params'}: {reason}; convert the source checkpoint again"
    )


def _abstract_module[M: Target | Drafter](module: type[M], config: Any, dtype: jnp.dtype) -> M:
    return nnx.eval_shape(lambda: module(config, dtype=dtype, rngs=nnx.Rngs(0)))


def _named(module: nnx.Module) -> Iterator[tuple[str, Any]]:
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        yield _name(path), variable.get_value()


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in path)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _file_sizes(directory: Path) -> dict[str, int]:
    files = (p for p in directory.rglob("*") if p.is_file() and p != directory / "config.json")
    return {str(p.relative_to(directory)): p.stat().st_size for p in sorted(files)}
