"""Large tensors on their way through: memory, transposed copies, and the bar that shows it."""

import io
import json
import math
import re
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from convert_sources import (
    BF16,
    LLAMA,
    Config,
    block_tensors,
    random_bits,
    run_python,
    target_tensors,
    write,
)
from expert_sources import GPT_OSS

from peagle_jax.convert import to_native
from peagle_jax.convert.source import Tensor

GIB = 1 << 30
Shapes = dict[str, tuple[int, ...]]

# Memory

# Llama 3.1 8B with 5 of its 32 layers.
LARGE_LLAMA = LLAMA | {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
# GPT-OSS 20B with 2 of its 24 layers and half of its vocabulary, not packed.
LARGE_GPT_OSS = GPT_OSS | {
    "vocab_size": 90_000,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
}


def shape_only(shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(BF16.type(0), shape)  # takes no memory


def llama_shapes() -> Shapes:
    return {name: t.shape for name, t in target_tensors(LARGE_LLAMA, shape_only).items()}


def gpt_oss_shapes() -> Shapes:
    """Gate and up alternate, and the experts' weights lie input first: all is transposed."""
    hidden, inner, vocab = (
        LARGE_GPT_OSS[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads, experts = LARGE_GPT_OSS["num_attention_heads"], LARGE_GPT_OSS["num_local_experts"]
    shapes: Shapes = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for i in range(LARGE_GPT_OSS["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        block = block_tensors(LARGE_GPT_OSS, layer, hidden, shape_only)
        shapes |= {name: t.shape for name, t in block.items() if ".mlp." not in name} | {
            f"{layer}.self_attn.sinks": (heads,),
            f"{layer}.mlp.router.weight": (experts, hidden),
            f"{layer}.mlp.router.bias": (experts,),
            f"{layer}.mlp.experts.gate_up_proj": (experts, hidden, 2 * inner),
            f"{layer}.mlp.experts.gate_up_proj_bias": (experts, 2 * inner),
            f"{layer}.mlp.experts.down_proj": (experts, inner, hidden),
            f"{layer}.mlp.experts.down_proj_bias": (experts, hidden),
        }
    return shapes


def write_large(folder: Path, config: Config, shapes: Shapes, shards: int = 4) -> None:
    """Writes bfloat16 tensors that are never in memory: the same random block again and again."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    block = memoryview(random_bits(0)(((8 << 20) + 1,)).view(np.uint8))
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard:05}-of-{shards:05}.safetensors"
        header, end = {}, 0
        for tensor in list(shapes)[shard::shards]:
            start, end = end, end + 2 * math.prod(shapes[tensor])
            place = {"dtype": "BF16", "shape": shapes[tensor], "data_offsets": [start, end]}
            header[tensor], weight_map[tensor] = place, name
        text = json.dumps(header).encode()
        with open(folder / name, "wb", buffering=0) as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for start in range(0, end, len(block)):
                file.write(block[: end - start])
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


MEASURED = """
    import resource, sys
    from peagle_jax.convert import to_native

    done = to_native(sys.argv[1], sys.argv[2])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    print(1024 * peak, done.array_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems count ru_maxrss otherwise")
@pytest.mark.parametrize(
    ("config", "shapes"),
    [(LARGE_LLAMA, llama_shapes), (LARGE_GPT_OSS, gpt_oss_shapes)],
    ids=["llama", "gpt_oss"],
)
def test_four_gibibytes_take_no_more_than_five(
    config: Config, shapes: Callable[[], Shapes], tmp_path: Path
) -> None:
    """The output and 1 GiB for all else: the interpreter, JAX, buffers, what Orbax holds."""
    try:
        write_large(tmp_path / "hf", config, shapes())
        with run_python(MEASURED, tmp_path / "hf", tmp_path / "out") as process:
            out, errors = process.communicate(timeout=900)
    finally:
        for folder in ("hf", "out"):  # pytest would keep them
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
    assert process.returncode == 0, errors
    peak, output = map(int, out.split())
    assert output > 3.9 * GIB
    assert peak <= output + GIB, f"{peak:,} bytes for an output of {output:,}"


# Transposed copies


@pytest.mark.parametrize("stored", [BF16, np.dtype(np.float16), np.dtype(np.float32)])
@pytest.mark.parametrize("wanted", [BF16, np.dtype(np.float32)])
@pytest.mark.parametrize("rows", [1, 64, 150])
def test_reading_into_other_axes(
    rows: int, stored: np.dtype, wanted: np.dtype, tmp_path: Path
) -> None:
    """As GPT-OSS's gate and up: `[E, in, 2I]`, alternating, into `[E, 2I, in]`, gate first."""
    experts, inner = 3, 5
    values = np.random.default_rng(0).standard_normal((experts, rows, 2 * inner)).astype(stored)
    (tmp_path / "data").write_bytes(b"header" + values.tobytes())
    codes = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    tensor = Tensor("x", codes[str(stored)], values.shape, tmp_path / "data", offset=6)
    array = np.zeros((experts, 2 * inner, rows), wanted)
    view = np.moveaxis(array.reshape(experts, 2, inner, rows).swapaxes(1, 2), -1, 1)
    tensor.read_into(view)
    expected = np.concatenate([values[..., 0::2], values[..., 1::2]], axis=-1).swapaxes(1, 2)
    np.testing.assert_array_equal(array, expected.astype(wanted))


# The bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Makes standard error a terminal that keeps what it is sent.

    No fixture, because pytest sets standard error anew when a test begins.
    """
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    return shown


def every(shown: Terminal, stage: str) -> Iterable[tuple[int, str]]:
    """Returns percentage and rest of each time that a bar was drawn."""
    drawn = re.findall(rf"\r{stage}: +(\d+)%\|[^|]*\|([^\r]*)", shown.getvalue())
    return [(int(percentage), rest) for percentage, rest in drawn]


def test_a_terminal_shows_bytes_and_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = terminal(monkeypatch)
    read_into, read = Tensor.read_into, []

    def slow(self: Tensor, out: np.ndarray) -> None:
        read.append(self)
        if len(read) % 4 == 0:
            time.sleep(0.11)  # tqdm draws a tenth of a second after the last time
        read_into(self, out)

    monkeypatch.setattr(Tensor, "read_into", slow)
    config = LLAMA | {"vocab_size": 4000}
    write(tmp_path / "hf", config, target_tensors(config))
    size = to_native(tmp_path / "hf", tmp_path / "out").array_bytes
    total = f"{size / 1000:.0f}k"
    time_left = re.compile(rf" [\d.]+k?/{total} \[\d\d:\d\d<\d\d:\d\d, +[\d.]+[kM]?B/s\]")
    between = [rest for percentage, rest in every(shown, "Reading hf") if 0 < percentage < 100]
    assert between and all(time_left.match(rest) for rest in between), shown.getvalue()
    for stage in ("Writing out", "Converted hf"):
        drawn = every(shown, stage)
        assert drawn and all(percentage == 100 for percentage, _ in drawn)
        assert all(f" {total}/{total} [" in rest for _, rest in drawn)


def test_no_bar_where_none_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = terminal(monkeypatch)
    source = write(tmp_path / "hf", LLAMA, target_tensors(LLAMA))
    to_native(source, tmp_path / "out", progress=False)
    assert shown.getvalue() == ""
