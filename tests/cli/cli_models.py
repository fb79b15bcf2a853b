"""A tiny target with a tokenizer and a chat template, and a cache folder of a test's own."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from conftest import GOLDEN
from jax.experimental.compilation_cache import compilation_cache
from tokenizers import Tokenizer, models, pre_tokenizers

from peagle_jax.convert import to_native

DRAFTER = GOLDEN / "drafters" / "norm_before_fc"
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant"
WORDS = ["<unk>", "user", "assistant", *(f"w{i}" for i in range(93))]


def make_target(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Makes a native tiny target with a tokenizer of 96 words and a chat template."""
    source = folder / "hf"
    source.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / "targets" / "llama_gqa" / name, source / name)
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(source / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None:
        settings["chat_template"] = template
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    to_native(source, folder / "target", progress=False)
    return folder / "target"


def own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sets the cache folder, and puts JAX's settings back in the end."""
    monkeypatch.setenv("PEAGLE_JAX_CACHE", str(folder))
    options = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in options}
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
