"""Reading torch's own files (`pytorch_model.bin`), which SafeAILab's heads come in.

Such a file is a pickle, and unpickling runs what the file says. So torch reads it, in the mode that
makes tensors and plain containers only; without torch it is not read at all. The tensors' bytes
stay in the file, mapped, until they are copied to where they are needed.
"""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from peagle_jax.convert.errors import ConvertError, listed

# Safetensors' codes of torch's dtypes.
_CODES = {
    "torch.bfloat16": "BF16",
    "torch.float16": "F16",
    "torch.float32": "F32",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.bool": "BOOL",
    "torch.uint8": "U8",
    "torch.float8_e4m3fn": "F8_E4M3",
}


@dataclasses.dataclass(frozen=True)
class TorchTensor:
    """A tensor of a torch file.

    Attributes:
      dtype: safetensors code, or torch's name where there is none here.
      shape: axes.
      mapped: `[bytes]` uint8, its elements in C order.
    """

    dtype: str
    shape: tuple[int, ...]
    mapped: np.ndarray


def load_torch_file(path: Path) -> dict[str, TorchTensor]:
    """Returns the tensors of a file that `torch.save` made of a state dict.

    Raises:
      ConvertError: torch is not installed, the file is damaged or of the format before torch 1.6,
        or it holds anything but a dictionary of tensors.
    """
    try:
        import torch
    except ImportError as error:
        raise ConvertError(
            f"{path} can only be read with torch, which is not installed: install "
            "peagle-jax[torch], or save the model again as safetensors"
        ) from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:  # torch's message says how to run such a file
        raise ConvertError(
            f"{path} holds more than tensors, which is not read, because it could run code; save "
            "the model's weights again as safetensors"
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConvertError(
            f"{path} is cut off, damaged or of the format before torch 1.6 ({reason}); download it "
            "again, or save the model again as safetensors"
        ) from error
    if not isinstance(state, dict):
        raise ConvertError(f"{path} holds a {type(state).__name__}, not a dictionary of tensors")
    others = [f"{name!r}" for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ConvertError(
            f"{path}: these are no tensors: {listed(others, 5)}; save the model's state_dict() "
            "alone"
        )
    return {str(name): _mapped(value, torch) for name, value in state.items()}


def _mapped(tensor: Any, torch: Any) -> TorchTensor:
    # Only a tensor that is a view of another with strides of its own is copied here.
    flat = tensor.detach().contiguous().reshape(-1)
    code = _CODES.get(str(tensor.dtype), str(tensor.dtype))
    return TorchTensor(code, tuple(tensor.shape), flat.view(torch.uint8).numpy())
