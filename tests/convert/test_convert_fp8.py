"""Block FP8 checkpoints: weights times scales, and every scale that does not fit is named."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from convert_sources import (
    LLAMA,
    QWEN3,
    Config,
    Tensors,
    assert_identical,
    expected_target,
    target_tensors,
)
from expert_sources import (
    F8,
    FP8,
    QWEN3_MOE,
    converted,
    dequantised,
    expected_sparse_target,
    parse,
    qwen3_moe_tensors,
    refused,
)

from peagle_jax.convert import ConvertError

BF16 = ml_dtypes.bfloat16


def quantised(tensors: Tensors, block: tuple[int, int], scale_dtype: Any = BF16) -> Tensors:
    """Returns the tensors in bfloat16, the projections random FP8 with random scales."""
    rng = np.random.default_rng(2)
    out: Tensors = {}
    for name, value in tensors.items():
        if not name.endswith("proj.weight"):
            out[name] = value.astype(BF16)
            continue
        out[name] = rng.standard_normal(value.shape, np.float32).astype(F8)
        grid = [-(-size // part) for size, part in zip(value.shape, block, strict=True)]
        out[f"{name}_scale_inv"] = rng.uniform(0.01, 3, grid).astype(scale_dtype)
    return out


# Blocks that divide, leave a ragged edge in rows and columns, or are larger than the weight.
@pytest.mark.parametrize("block", [(8, 4), (5, 7), (128, 128)])
@pytest.mark.parametrize("scale_dtype", [BF16, np.float32])
def test_fp8_is_dequantised(block: tuple[int, int], scale_dtype: Any, tmp_path: Path) -> None:
    tensors = quantised(target_tensors(QWEN3), block, scale_dtype)
    config = QWEN3 | {"quantization_config": FP8 | {"weight_block_size": list(block)}}
    _, arrays = converted(tmp_path, config, tensors)
    assert_identical(arrays, expected_target(dequantised(tensors, block, BF16), 2))


@pytest.mark.parametrize(("dtype", "stored"), [("bfloat16", BF16), ("float32", np.float32)])
def test_dtype_of_dequantised_experts(dtype: str, stored: Any, tmp_path: Path) -> None:
    tensors = quantised(qwen3_moe_tensors(), (8, 4))
    config = QWEN3_MOE | {"quantization_config": FP8}
    _, arrays = converted(tmp_path, config, tensors, dtype)
    plain = dequantised(tensors, (8, 4), stored)
    wide = {name: value.astype(stored) for name, value in plain.items()}
    assert_identical(arrays, expected_sparse_target(wide, 4))


def test_weights_of_an_fp8_checkpoint_may_be_plain(tmp_path: Path) -> None:
    """Which ones are quantised, the tensors say; `modules_to_not_convert` says it once more."""
    tensors = quantised(target_tensors(LLAMA), (8, 4))
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].astype(BF16)
    del tensors[f"{name}_scale_inv"]
    _, arrays = converted(tmp_path, LLAMA | {"quantization_config": FP8}, tensors)
    assert_identical(arrays, expected_target(dequantised(tensors, (8, 4), BF16), 2))


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({f"{Q}_scale_inv": None}, rf"{Q}_scale_inv is missing"),
        ({f"{Q}_scale_inv": np.ones((4, 2), BF16)}, r"q_proj.weight_scale_inv is \(4, 2\), expect"),
        ({f"{Q}_scale_inv": np.ones((2, 4), np.uint8)}, "scale_inv is U8, expected BF16"),
        ({f"{Q}_scale_inv": np.full((2, 4), np.inf, np.float32)}, f"{Q} holds NaN or infinity"),
        ({Q: np.full((16, 16), np.nan, F8)}, f"{Q} holds NaN or infinity"),
        ({Q: np.ones((16, 16), BF16)}, rf"{Q}_scale_inv \(2, 4\) is unexpected"),
        ({"model.norm.weight_scale_inv": np.ones((2, 4), BF16)}, "norm.* is unexpected"),
        ({"model.norm.weight": np.ones(16, F8)}, "model.norm.weight_scale_inv is missing"),
        (
            {
                "model.norm.weight": np.ones(16, F8),
                "model.norm.weight_scale_inv": np.ones((1, 1), BF16),
            },
            r"model.norm.weight is F8_E4M3 \(16,\)",
        ),
    ],
)
def test_fp8_scales_that_do_not_fit(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    tensors = quantised(target_tensors(LLAMA), (8, 4)) | change
    tensors = {name: value for name, value in tensors.items() if value is not None}
    refused(tmp_path, LLAMA | {"quantization_config": FP8}, tensors, named)


def test_wrong_block_size_is_named(tmp_path: Path) -> None:
    tensors = quantised(target_tensors(LLAMA), (8, 4))
    config = LLAMA | {"quantization_config": FP8 | {"weight_block_size": [4, 4]}}
    refused(tmp_path, config, tensors, r"expected \(4, 4\).*\(4, 4\) \(weight_block_size\)")


def test_fp8_without_quantization_config(tmp_path: Path) -> None:
    tensors = quantised(target_tensors(LLAMA), (8, 4))
    refused(tmp_path, LLAMA, tensors, "F8_E4M3.*quantization_config says nothing of FP8")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weight_block_size": None}, "weight_block_size is None"),
        ({"weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ({"weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\]"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static'"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'"),
        ({"quant_method": "compressed-tensors"}, "quant_method is 'compressed-tensors'"),
        ({"kv_cache_scheme": {}}, "kv_cache_scheme = "),
    ],
)
def test_unsupported_fp8_config_is_named(change: Config, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=rf"config\.json: quantization_config.*{named}"):
        parse(tmp_path, QWEN3 | {"quantization_config": FP8 | change})
