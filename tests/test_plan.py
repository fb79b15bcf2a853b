"""The memory plan: the published sizes, the shapes that `generate` allocates, and XLA's buffers."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from conftest import GOLDEN, TARGET, random_drafter, random_target

from peagle_jax.checkpoint import CheckpointError
from peagle_jax.config import ConfigError, TargetConfig
from peagle_jax.convert import ConvertError, to_native
from peagle_jax.generate import check_pair, generate
from peagle_jax.plan import MemoryPlan, ModelMemory, PlanError, plan_memory
from peagle_jax.presets import (
    DEVICES,
    TARGETS,
    PresetError,
    find_device,
    find_target,
    usual_drafter,
    with_expert_weights,
)

GIB = 2**30


def plan(target: TargetConfig, **options: Any) -> MemoryPlan:
    usual = {"device_bytes": DEVICES["h200"], "batch_size": 1, "context": 16384}
    return plan_memory(target, **{**usual, **options})


def drafter_of(figures: MemoryPlan) -> ModelMemory:
    assert figures.drafter is not None
    return figures.drafter


# Published sizes: computed from the models' configs, by other code than ours.

SHEET = {  # parameters, GiB in bfloat16, KiB of keys and values per token where no layer slides
    "llama-3.2-1b": (1_235_814_400, "2.30", 32),
    "llama-3.2-3b": (3_212_749_824, "5.98", 112),
    "llama-3.1-8b": (8_030_261_248, "14.96", 128),
    "llama-3.1-70b": (70_553_706_496, "131.42", 320),
    "llama-3.3-70b": (70_553_706_496, "131.42", 320),
    "qwen3-0.6b": (596_049_920, "1.11", 112),
    "qwen3-1.7b": (1_720_574_976, "3.20", 112),
    "qwen3-4b": (4_022_468_096, "7.49", 144),
    "qwen3-8b": (8_190_735_360, "15.26", 144),
    "qwen3-14b": (14_768_307_200, "27.51", 160),
    "qwen3-32b": (32_762_123_264, "61.02", 256),
    "qwen3-30b-a3b": (30_532_122_624, "56.87", 96),
    "qwen3-coder-30b-a3b": (30_532_122_624, "56.87", 96),
    "qwen3-coder-480b-a35b": (480_154_875_392, "894.4", 248),
    "gpt-oss-20b": (20_914_757_184, "38.96", 24),
    "gpt-oss-120b": (116_829_156_672, "217.6", 36),
}


def test_the_sheet_names_every_preset() -> None:
    assert set(SHEET) == set(TARGETS)


@pytest.mark.parametrize("name", SHEET)
def test_sizes_of_published_targets(name: str) -> None:
    parameters, gib, kib = SHEET[name]
    config = TARGETS[name]
    if config.moe is not None:
        config = with_expert_weights(config, "plain")
    short, long = plan(config), plan(config, context=32768)
    model = long.target
    assert model.parameters == parameters
    digits = len(gib.partition(".")[2])
    assert f"{model.weight_bytes / GIB:.{digits}f}" == gib
    assert model.cache_bytes_per_token == kib * 1024
    assert model.cache_bytes - short.target.cache_bytes == 16384 * kib * 1024
    assert long.prompt_rows == 32768 and long.capacity == 32768 + 128


@pytest.mark.parametrize(
    ("name", "weight_bytes", "per_token", "window_bytes"),
    [
        ("gpt-oss-20b", 13_761_264_768, 24_576, 3_145_728),
        ("gpt-oss-120b", 65_248_815_744, 36_864, 4_718_592),
    ],
)
def test_packed_experts_and_windows(
    name: str, weight_bytes: int, per_token: int, window_bytes: int
) -> None:
    """The sheet's windows have 128 slots; ours hold K more, in eights."""
    config = TARGETS[name]
    plain = plan(config, batch_size=4)
    assert plain.target.weight_bytes == weight_bytes
    assert plain.target.parameters == SHEET[name][0]
    assert plain.target.cache_bytes_per_token == per_token
    assert plain.target.window_bytes_per_sequence == window_bytes
    drafted = plan(config, batch_size=4, drafter_layers=1, num_speculative_tokens=7)
    assert drafted.target.window_bytes_per_sequence == window_bytes * (128 + 8) // 128
    for figures in (plain, drafted):
        model = figures.target
        per_sequence = figures.capacity * per_token + model.window_bytes_per_sequence
        assert model.cache_bytes == 4 * per_sequence


def test_presets_are_what_the_converter_reads(tmp_path: Path) -> None:
    """The one preset whose config.json the sheet has word for word."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5472,
        "max_position_embeddings": 262144,
        "max_window_layers": 28,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "qkv_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.0,
        "shared_expert_intermediate_size": 0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_qk_norm": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    generation = {"eos_token_id": [151645, 151643]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert find_target(str(tmp_path)) == TARGETS["qwen3-coder-30b-a3b"]


# The drafter


def test_the_usual_drafter_is_as_large_as_the_published_one() -> None:
    """`amazon/gpt-oss-120b-p-eagle`: four layers, 1.7 B weights, fc of [2880, 8640]."""
    target = TARGETS["gpt-oss-120b"]
    figures = plan(target, drafter_layers=4)
    assert f"{drafter_of(figures).parameters / 1e9:.1f}" == "1.7"
    assert drafter_of(figures).weight_bytes == 2 * drafter_of(figures).parameters
    assert drafter_of(figures).cache_bytes == 4 * figures.capacity * 2 * 8 * 64 * 2
    config = usual_drafter(target, 4)
    assert (config.hidden_size, config.feature_size) == (2880, 8640)
    assert config.aux_boundaries == (2, 18, 33)
    assert config.own_embedding and config.own_lm_head
    assert config.draft_vocab_size == config.vocab_size == 201088
    assert usual_drafter(TARGETS["qwen3-8b"], 1).intermediate_size == 12288
    assert config.intermediate_size == 4 * 2880
    check_pair(target, config)


def test_a_reduced_draft_vocabulary() -> None:
    target = TARGETS["qwen3-8b"]
    full = drafter_of(plan(target, drafter_layers=1))
    reduced = drafter_of(plan(target, drafter_layers=1, draft_vocab_size=32000))
    rows = 151936 - 32000
    assert full.parameters - reduced.parameters == rows * 4096
    assert full.weight_bytes - reduced.weight_bytes == 2 * rows * 4096 - 4 * 32000  # d2t


# What generate does


class Enough(Exception):
    pass


@pytest.mark.parametrize("windows", [(None, None, None), (24, None, 24)])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("batch", "prompt", "new"), [(1, 5, 9), (3, 33, 100), (2, 200, 56)])
def test_shapes_are_those_that_generate_allocates(
    windows: tuple[int | None, ...],
    drafts: int,
    batch: int,
    prompt: int,
    new: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = dataclasses.replace(TARGET, sliding_windows=windows)
    head = usual_drafter(config, 2)
    seen: list[Any] = []

    def compiled(function: Any, *arguments: Any, prompt_rows: int, **options: Any) -> Any:
        seen.extend([prompt_rows, *arguments])
        raise Enough

    monkeypatch.setattr(sys.modules["peagle_jax.batch"], "_compiled", compiled)
    target, drafter = random_target(config), random_drafter(head)
    with pytest.raises(Enough):
        generate(
            target,
            [[1] * prompt] * batch,
            drafter=drafter if drafts else None,
            max_new_tokens=new,
            num_speculative_tokens=drafts or None,
        )
    prompt_rows, _, proposer, request, target_cache, draft_cache, *_ = seen
    figures = plan(
        config,
        batch_size=batch,
        context=prompt + new,
        prompt_tokens=prompt,
        drafter_layers=2 if drafts else 0,
        num_speculative_tokens=drafts or 5,
        dtype="float32",
    )

    def size(tree: Any) -> int:
        return sum(a.nbytes for a in jax.tree.leaves(tree))

    assert prompt_rows == figures.prompt_rows
    assert request.tokens.shape == (figures.rows, figures.capacity)
    assert figures.num_speculative_tokens == proposer.num_drafts == drafts
    assert figures.target.weight_bytes == size(target.weights)
    assert figures.target.cache_bytes == size(target_cache)
    assert size(draft_cache) == (drafter_of(figures).cache_bytes if drafts else 0)
    if drafts:
        assert drafter_of(figures).weight_bytes == size(drafter.weights)


def test_by_default_the_prompt_is_as_long_as_it_can_be() -> None:
    figures = plan(TARGETS["qwen3-0.6b"], context=1000)
    assert (figures.prompt_rows, figures.rows) == (1024, 1)
    assert plan(TARGETS["qwen3-0.6b"], context=1, batch_size=5).rows == 8
    short = plan(TARGETS["qwen3-0.6b"], context=1000, prompt_tokens=100)
    assert (short.prompt_rows, short.capacity) == (128, 1152)
    assert short.prefill_bytes < figures.prefill_bytes


# What is computed in between

# Two layers of a target, batch, prompt rows, further tokens, K, and the MiB of temporary buffers
# that XLA (jax 0.12.0.1) plans when it compiles `generate_tokens` for an H200 in bfloat16, as
# `tests/gpu/programs.py h200 generation ...` prints them. A drafter has two layers too. The last
# two read their prompts in several passes.
BUFFERS = [
    ("llama-3.1-8b", 1, 4096, 256, 0, 640),
    ("llama-3.1-8b", 8, 32, 8192, 5, 171),
    ("llama-3.1-8b", 64, 128, 100, 0, 738),
    ("qwen3-30b-a3b", 4, 2048, 256, 0, 713),
    ("qwen3-30b-a3b", 64, 128, 100, 0, 433),
    ("gpt-oss-120b", 1, 4096, 256, 0, 407),
    ("gpt-oss-120b", 1, 32, 4096, 5, 24),
    ("gpt-oss-120b", 8, 32, 8192, 5, 332),
    ("gpt-oss-120b", 4, 2048, 256, 5, 726),
    ("gpt-oss-120b", 8, 32760, 8, 0, 490),
    ("gpt-oss-120b", 8, 32760, 8, 5, 662),
]


@pytest.mark.parametrize(("name", "batch", "prompt", "new", "drafts", "mebibytes"), BUFFERS)
def test_the_estimates_are_near_what_xla_plans(
    name: str, batch: int, prompt: int, new: int, drafts: int, mebibytes: int
) -> None:
    config = TARGETS[name]
    moe = config.moe and dataclasses.replace(config.moe, layers=(True,) * 2)
    config = dataclasses.replace(
        config, num_layers=2, sliding_windows=config.sliding_windows[:2], moe=moe
    )
    figures = plan(
        config,
        batch_size=batch,
        context=prompt + new,
        prompt_tokens=prompt,
        drafter_layers=2 if drafts else 0,
        num_speculative_tokens=drafts,
    )
    estimate = max(figures.prefill_bytes, figures.round_bytes) / 2**20
    assert 0.85 < estimate / mebibytes < 1.15


def test_the_peak_is_the_sum_of_its_parts() -> None:
    figures = plan(TARGETS["llama-3.1-8b"], drafter_layers=2, batch_size=2, prompt_tokens=10)
    models = (figures.target, drafter_of(figures))
    kept = sum(m.weight_bytes + m.cache_bytes for m in models)
    assert figures.round_bytes > figures.prefill_bytes > 0
    assert figures.peak_bytes == kept + figures.round_bytes
    assert figures.spare_bytes == DEVICES["h200"] - figures.peak_bytes > 0
    assert figures.fits and not figures.needs_memory_fraction
    assert figures.to_json()["peak_bytes"] == figures.peak_bytes
    assert json.loads(json.dumps(figures.to_json())) == figures.to_json()

    exact = plan(
        TARGETS["llama-3.1-8b"],
        drafter_layers=2,
        batch_size=2,
        prompt_tokens=10,
        device_bytes=figures.peak_bytes,
    )
    assert exact.fits and exact.spare_bytes == 0 and exact.needs_memory_fraction
    smaller = dataclasses.replace(exact, device_bytes=figures.peak_bytes - 1)
    assert not smaller.fits and smaller.spare_bytes == -1


def test_what_is_known_to_fit_on_an_h200() -> None:
    """Short prompts: 20b packed and plain, 120b packed only; nothing is left by Llama 70B."""
    options: dict[str, Any] = {"context": 2048, "prompt_tokens": 64, "drafter_layers": 4}
    for name, weights, fits in (
        ("gpt-oss-20b", "mxfp4", True),
        ("gpt-oss-20b", "plain", True),
        ("gpt-oss-120b", "mxfp4", True),
        ("gpt-oss-120b", "plain", False),
    ):
        config = with_expert_weights(TARGETS[name], weights)  # type: ignore[arg-type]
        assert plan(config, **options).fits is fits
    assert plan(TARGETS["qwen3-coder-30b-a3b"], **options).fits
    assert not plan(TARGETS["llama-3.3-70b"], **options).fits


@pytest.mark.parametrize("device", ["h200", "b200"])
def test_a_long_context_fits(device: str) -> None:
    """Of 32k; eight at a time of the small ones, one of GPT-OSS-120B."""
    for name, batch in (("gpt-oss-20b", 8), ("qwen3-coder-30b-a3b", 8), ("gpt-oss-120b", 1)):
        figures = plan(
            TARGETS[name],
            context=32768,
            prompt_tokens=32000,
            drafter_layers=4,
            batch_size=batch,
            device_bytes=DEVICES[device],
        )
        assert figures.fits, name


def test_float32_takes_twice_as_much() -> None:
    half, full = (
        plan(TARGETS["qwen3-0.6b"], drafter_layers=1, dtype=dtype)
        for dtype in ("bfloat16", "float32")
    )
    assert full.target.weight_bytes == 2 * half.target.weight_bytes
    assert full.target.cache_bytes == 2 * half.target.cache_bytes
    assert drafter_of(full).weight_bytes == 2 * drafter_of(half).weight_bytes


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 40961}, "a context of 40961 is more than the 40960 tokens that the target"),
        ({"context": 0}, "the context must be at least 1, got 0"),
        ({"batch_size": 0}, "the batch size must be at least 1, got 0"),
        ({"prompt_tokens": 0}, "the number of prompt tokens must be in 1..16384"),
        ({"prompt_tokens": 16385}, "the number of prompt tokens must be in 1..16384"),
        ({"drafter_layers": -1}, "the number of drafter layers must be at least 0, got -1"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be at least 1 and less"),
        ({"num_speculative_tokens": 16384}, "less than the context of 16384, got 16384"),
        ({"draft_vocab_size": 0}, "the draft vocabulary must be in 1..151936"),
        ({"draft_vocab_size": 151937}, "the draft vocabulary must be in 1..151936"),
        ({"dtype": "float16"}, "dtype must be bfloat16 or float32, got 'float16'"),
    ],
)
def test_sizes_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as error:
        plan(TARGETS["qwen3-8b"], **{"drafter_layers": 1, **options})
    assert message in str(error.value) and "\n" not in str(error.value)


# Names and paths


def test_targets_by_name_and_path(tmp_path: Path) -> None:
    assert find_target("GPT-OSS-120b") is TARGETS["gpt-oss-120b"]
    folder = GOLDEN / "targets" / "llama_gqa"
    config = find_target(str(folder))
    assert find_target(str(folder / "config.json")) == config
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("config.json", "generation_config.json"):
        (alone / name).write_bytes((folder / name).read_bytes())
    assert find_target(str(alone)) == config
    to_native(folder, tmp_path / "native", progress=False)
    assert find_target(str(tmp_path / "native")) == config
    assert find_target(str(tmp_path / "native" / "config.json")) == config


def test_a_target_that_is_not_there(tmp_path: Path) -> None:
    for name in ("gpt-oss", "./no/where", ""):
        with pytest.raises(PresetError, match="no known target; known are gpt-oss-120b, "):
            find_target(name)
    with pytest.raises(PresetError, match=r"cannot read .*config\.json"):
        find_target(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(PresetError, match="must hold a JSON object"):
        find_target(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConvertError, match="model_type is 'gpt2'"):
        find_target(str(tmp_path))
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(PresetError, match=r"is no config\.json"):
        find_target(str(tmp_path / "other.json"))
    drafter = tmp_path / "drafter"
    to_native(GOLDEN / "drafters" / "wide", drafter, progress=False)
    with pytest.raises(CheckpointError, match="holds a drafter, not a target"):
        find_target(str(drafter))


def test_expert_weights() -> None:
    config = TARGETS["qwen3-30b-a3b"]
    assert with_expert_weights(config, None) is config
    packed = with_expert_weights(config, "mxfp4")
    assert packed.moe is not None and packed.moe.weights == "mxfp4"
    with pytest.raises(PresetError, match="expert weights are plain, but the target has no expe"):
        with_expert_weights(TARGETS["qwen3-8b"], "plain")
    assert config.moe is not None
    odd = dataclasses.replace(config, moe=dataclasses.replace(config.moe, intermediate_size=100))
    with pytest.raises(ConfigError, match="multiples of 32"):
        with_expert_weights(odd, "mxfp4")


@pytest.mark.parametrize(
    ("memory", "size"),
    [
        ("141e9", 141 * 10**9),
        ("141GB", 141 * 10**9),
        ("139.5 GiB", 139.5 * GIB),
        ("24000 mib", 24000 * 2**20),
        ("180000000000", 180 * 10**9),
    ],
)
def test_memory_of_a_device(memory: str, size: float) -> None:
    assert find_device(None, memory) == find_device("unknown", memory) == size
    assert find_device("H200") == 141 * 10**9


@pytest.mark.parametrize(
    "memory", ["141", "-1GB", "GB", "", "1e9 parsecs", "nan", "1e999", "1,5GB"]
)
def test_a_size_that_is_none(memory: str) -> None:
    with pytest.raises(PresetError, match="is no size of at least 100 MB"):
        find_device("h200", memory)


def test_a_device_that_is_not_known() -> None:
    with pytest.raises(PresetError, match="'tpu' is no known device; known are a100-40gb, "):
        find_device("tpu")
    with pytest.raises(PresetError, match="no device is given; known are a100-40gb, "):
        find_device(None)
