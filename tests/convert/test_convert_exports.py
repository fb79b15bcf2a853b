"""What other software gets: layouts, files, warnings, and what is refused."""

import dataclasses
import errno
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import DRAFTER, FAMILIES, TARGET
from convert_sources import (
    BF16,
    LLAMA,
    Tensors,
    read_source,
    target_tensors,
    write,
)
from export_sources import DRAFTERS, TARGETS, save_native

from peagle_jax import checkpoint
from peagle_jax.checkpoint import CheckpointError
from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.convert import ConvertError, shards, to_native
from peagle_jax.convert.to_hf import Format, drafter_warnings, to_hf

# Layouts


def test_layout_of_vllm(tmp_path: Path) -> None:
    native = save_native(tmp_path / "native", DRAFTER, "bfloat16")
    to_hf(native, tmp_path / "hf", "vllm")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["model_type"], config["torch_dtype"]) == ("llama", "bfloat16")
    assert (config["ptd_token_id"], config["draft_vocab_size"]) == (95, 64)
    assert (config["rope_theta"], config["rope_scaling"]) == (500.0, None)
    tensors = read_source(tmp_path / "hf")
    assert tensors["mask_hidden"].shape == (1, 1, 96)
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == np.bool_
    ids = np.arange(64) + tensors["d2t"]
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), ids)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    assert "layers.1.mlp.down_proj.weight" in tensors and "layers.0" not in str(list(tensors))
    assert {t.dtype for n, t in tensors.items() if n not in ("d2t", "t2d")} == {BF16}


def test_layout_of_speculators(tmp_path: Path) -> None:
    native = save_native(tmp_path / "native", DRAFTERS["eagle3"])
    target = write(tmp_path / "target", LLAMA, target_tensors(LLAMA))
    to_hf(native, tmp_path / "hf", "speculators", target=str(target))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["Eagle3DraftModel"]
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(target),
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["speculators_config"]["algorithm"] == "eagle3"
    assert "mask_token_id" not in config and config["embed_requires_grad"] is False
    tensors = read_source(tmp_path / "hf")
    assert "layers.0.hidden_norm.weight" in tensors and "mask_hidden" not in tensors


def test_stop_tokens_are_in_both_configs(tmp_path: Path) -> None:
    native = save_native(tmp_path / "native", TARGETS["qwen3_windows"])
    to_hf(native, tmp_path / "hf", "hf")
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "hf" / file).read_text())["eos_token_id"] == [7, 5]


def test_tokenizer_files_come_back_but_not_the_old_config(tmp_path: Path) -> None:
    source = write(tmp_path / "source", LLAMA | {"use_cache": True}, target_tensors(LLAMA))
    for name in ("tokenizer.json", "chat_template.jinja"):
        (source / name).write_text(name)
    to_native(source, tmp_path / "native")
    to_hf(tmp_path / "native", tmp_path / "hf", "hf")
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "hf" / name).read_text() == name
    assert "use_cache" not in json.loads((tmp_path / "hf" / "config.json").read_text())


# Files


def test_shards_are_named_and_indexed_as_transformers_does(tmp_path: Path) -> None:
    native = save_native(tmp_path / "native", TARGET)
    done = to_hf(native, tmp_path / "hf", "hf", max_shard_bytes=10_000)
    files = sorted(p.name for p in (tmp_path / "hf").glob("*.safetensors"))
    assert files == [
        f"model-{i:05}-of-{done.files:05}.safetensors" for i in range(1, 1 + len(files))
    ]
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    tensors = read_source(tmp_path / "hf")
    assert index["metadata"]["total_size"] == done.tensor_bytes
    assert done.tensor_bytes == sum(t.nbytes for t in tensors.values())
    assert set(index["weight_map"]) == set(tensors) and done.tensors == len(tensors)
    sizes = dict.fromkeys(files, 0)
    for name, file in index["weight_map"].items():
        sizes[file] += tensors[name].nbytes
    # Only the two tables are larger than a shard may be, and are alone in theirs.
    assert sum(size > 10_000 for size in sizes.values()) == 2


def test_one_file_has_no_index(tmp_path: Path) -> None:
    native = save_native(tmp_path / "native", TARGET)
    assert to_hf(native, tmp_path / "hf", "hf").files == 1
    names = sorted(p.name for p in (tmp_path / "hf").iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors"]


def test_no_array_is_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = save_native(tmp_path / "native", TARGETS["qwen3_moe"])
    monkeypatch.setattr(shards, "_READ_BYTES", 30_000)
    read: list[str] = []
    load = checkpoint.load_arrays

    def count(directory: Path, arrays: Mapping[str, jax.ShapeDtypeStruct]) -> Tensors:
        read.extend(arrays)
        return load(directory, arrays)

    monkeypatch.setattr(checkpoint, "load_arrays", count)
    to_hf(native, tmp_path / "hf", "hf", max_shard_bytes=20_000)
    assert sorted(read) == sorted(checkpoint.abstract_parameters(TARGETS["qwen3_moe"]))


# What cannot be written, and what others are known to get wrong


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (TARGET, "vllm", "format vllm is not one of a target's: use --format hf"),
        (DRAFTER, "hf", "format hf is not one of a drafter's: use --format vllm or speculators"),
        (
            dataclasses.replace(FAMILIES["qwen3"], sliding_windows=(8, 16, None)),
            "hf",
            r"windows of \[8, 16\] tokens",
        ),
        (
            dataclasses.replace(FAMILIES["qwen3_moe"], sliding_windows=(8, None, None)),
            "hf",
            "the hf layout cannot hold this model: sliding_windows",
        ),
        (
            dataclasses.replace(TARGET, attention_bias=True),
            "hf",
            "attention_output_bias = False would be read as True",
        ),
        (dataclasses.replace(TARGET, family="gemma"), "hf", "family 'gemma' has no"),
        (dataclasses.replace(DRAFTER, qk_norm=True, mlp_bias=True), "vllm", "mlp_bias = True"),
        (dataclasses.replace(DRAFTER, attention_sinks=True), "vllm", "attention_sinks = True"),
        (DRAFTERS["shared"], "speculators", "give it as --target"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused(
    config: TargetConfig | DrafterConfig, layout: Format, message: str, tmp_path: Path
) -> None:
    native = save_native(tmp_path / "native", config)
    with pytest.raises(ConvertError, match=message):
        to_hf(native, tmp_path / "hf", layout)
    assert [p.name for p in tmp_path.iterdir()] == ["native"]


@pytest.mark.parametrize(
    ("name", "vllm", "speculators"),
    [
        ("plain", [], []),
        ("fc_norm", ["EAGLE-3.1"], ["use --format vllm"]),
        ("qwen3", ["PeagleQwen3ForCausalLM", "EAGLE-3.1"], ["use --format vllm"]),
        ("eagle3_qwen3", ["Eagle3Qwen3ForCausalLM", "EAGLE-3.1"], []),
        ("wide", ["EAGLE-3.1", "2 boundaries"], ["use --format vllm", "48", "2 boundaries"]),
        ("no_output_bias", ["EAGLE-3.1", "o_proj"], ["use --format vllm", "o_proj"]),
    ],
)
def test_known_readers_that_ignore_something_are_named(
    name: str, vllm: list[str], speculators: list[str]
) -> None:
    config = DRAFTERS[name]
    sglang = [] if config.aux_boundaries[0] != 1 else ["SGLang"]
    for layout, expected in (("vllm", vllm), ("speculators", speculators)):
        found = drafter_warnings(config, layout)  # type: ignore[arg-type]
        assert len(found) == len(expected + sglang), found
        for part, warning in zip(expected + sglang, found, strict=True):
            assert part in warning


@pytest.mark.parametrize("moment", ["before", "while writing"])
def test_full_disk(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = save_native(tmp_path / "native", TARGET)
    if moment == "before":
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        error: type[Exception] = ConvertError
    else:

        def fail(*args: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(shards.Piece, "parts", fail)
        error = CheckpointError
    with pytest.raises(
        error, match=r"cannot write .*hf: (it needs [\d,]+ bytes, 1,000|.*No space)"
    ):
        to_hf(native, tmp_path / "hf", "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["native"]
    monkeypatch.undo()
    to_hf(native, tmp_path / "hf", "hf")


def test_source_and_destination_are_checked_first(tmp_path: Path) -> None:
    source = write(tmp_path / "hf", LLAMA, target_tensors(LLAMA))
    with pytest.raises(CheckpointError, match="is no native checkpoint"):
        to_hf(source, tmp_path / "out", "hf")
    native = save_native(tmp_path / "native", TARGET)
    with pytest.raises(CheckpointError, match="exists already"):
        to_hf(native, source, "hf")


def test_damaged_arrays_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = save_native(tmp_path / "native", TARGET)
    data = max((native / "params").rglob("*"), key=lambda p: p.stat().st_size)
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(CheckpointError, match="cannot load"):
        to_hf(native, tmp_path / "hf", "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["native"]
