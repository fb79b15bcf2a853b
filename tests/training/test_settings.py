"""What a run is told: TOML, flags, and what is wrong with them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from conftest import TARGET

from peagle_jax.training.prepare import boundaries_of, find_mask_token, head_config
from peagle_jax.training.settings import SettingsError, TrainSettings

NEEDED = {"target": "t", "data": ("d",), "output": "o"}


def read(tmp_path: Path, text: str, **given: Any) -> TrainSettings:
    (tmp_path / "run.toml").write_text(text)
    return TrainSettings.read(tmp_path / "run.toml", given)


def test_a_file_and_what_is_given(tmp_path: Path) -> None:
    """Values come in the fields' types; what is given goes before the file."""
    text = 'target = "t"\ndata = ["a", "b"]\nsteps = 7\nwarmup_steps = 0\nlearning_rate = 1\n'
    settings = read(tmp_path, text + "aux_boundaries = [1, 2]\n", steps=9, output="o")
    assert settings == TrainSettings(
        target="t",
        data=("a", "b"),
        output="o",
        steps=9,
        warmup_steps=0,
        learning_rate=1.0,
        aux_boundaries=(1, 2),
    )
    assert type(settings.learning_rate) is float
    hash(settings)  # a static argument of compiled programs


def test_every_field_can_be_in_the_file(tmp_path: Path) -> None:
    """All of them but those that are None, which TOML cannot say."""
    settings = TrainSettings(**{**NEEDED, "aux_boundaries": (1,), "features": "f"})
    lines = []
    for name, value in dataclasses.asdict(settings).items():
        if value is None:
            continue
        shown = list(value) if isinstance(value, tuple) else value
        lines.append(f"{name} = {str(shown).lower() if isinstance(shown, bool) else repr(shown)}")
    assert read(tmp_path, "\n".join(lines)) == settings


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rat = 1", "unknown setting 'learning_rat'; there are target, data"),
        ("[train]\nsteps = 1", "unknown setting 'train'"),
        ('steps = "7"', "steps must be int, got '7'"),
        ("steps = 7.0", r"steps must be int, got 7\.0"),
        ("steps = true", "steps must be int, got True"),
        ("fc_norm = 1", "fc_norm must be bool, got 1"),
        ("learning_rate = true", "learning_rate must be float, got True"),
        ("target = 5", "target must be str, got 5"),
        ('data = "d"', "data must be a list of str, got 'd'"),
        ("aux_boundaries = [1, 2.5]", r"aux_boundaries must be a list of int, got \[1, 2\.5\]"),
        ("schedule = 5", "schedule must be str, got 5"),
        ('schedule = "step"', "schedule 'step' is not one of cosine, linear, constant"),
        ('method = "medusa"', "method 'medusa' is not one of p-eagle, eagle-3"),
        ('dtype = "float16"', "dtype 'float16' is not one of float32, bfloat16"),
        ('loss = "mse"', "loss 'mse' is not one of kl_div"),
        ("steps = 0", "steps must be at least 1, got 0"),
        ("rows_per_step = 0", "rows_per_step must be at least 1"),
        ("save_every = 0", "save_every must be at least 1"),
        ("seed = -1", "seed must be at least 0"),
        ("learning_rate = nan", "learning_rate must be positive, got nan"),
        ("clip_norm = 0.0", "clip_norm must be positive"),
        ("weight_decay = -0.1", "weight_decay must not be negative"),
        ("warmup_steps = 10000", "warmup_steps 10000 leave none of the 10000 steps"),
        ("data = []", "data names no dataset"),
        ("generate_every = 5", "generate_every needs generate_prompts"),
        ("steps = ", r"cannot read .*run\.toml"),
    ],
)
def test_bad_settings(text: str, said: str, tmp_path: Path) -> None:
    given = {name: value for name, value in NEEDED.items() if not text.startswith(name)}
    with pytest.raises(SettingsError, match=said):
        read(tmp_path, text, **given)


def test_what_must_be_given(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="data, output must be given"):
        read(tmp_path, 'target = "t"')
    with pytest.raises(SettingsError, match="cannot read"):
        TrainSettings.read(tmp_path / "none.toml", dict(NEEDED))
    (tmp_path / "latin.toml").write_bytes(b'target = "\xe9"')
    with pytest.raises(SettingsError, match=r"cannot read .*latin\.toml"):
        TrainSettings.read(tmp_path / "latin.toml", dict(NEEDED))
    assert TrainSettings.read(None, dict(NEEDED)).steps == 10000


class Tokenizer:
    def __init__(self, size: int, mask: int | None = None):
        self.size, self.mask_token_id = size, mask

    def __len__(self) -> int:
        return self.size


@pytest.mark.parametrize(
    ("changes", "tokenizer", "found"),
    [
        ({"mask_token_id": 7}, Tokenizer(90, 5), 7),
        ({}, Tokenizer(90, 5), 5),
        ({}, Tokenizer(90), 90),
        ({"method": "eagle-3"}, Tokenizer(90, 5), None),
        ({"mask_token_id": 7}, None, 7),
    ],
)
def test_the_mask_token(changes: dict[str, Any], tokenizer: Any, found: int | None) -> None:
    """The one named, the tokenizer's, or the first row of the embedding that is no token."""
    assert find_mask_token(TrainSettings(**NEEDED, **changes), TARGET, tokenizer) == found


@pytest.mark.parametrize(
    ("changes", "tokenizer", "said"),
    [
        ({}, Tokenizer(96), "no unused row for the mask token: name mask_token_id"),
        ({}, None, "name mask_token_id"),
        ({"mask_token_id": 96}, None, "mask_token_id 96 is outside the vocabulary 96"),
        ({"mask_token_id": -1}, None, "mask_token_id -1 is outside"),
    ],
)
def test_no_mask_token(changes: dict[str, Any], tokenizer: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        find_mask_token(TrainSettings(**NEEDED, **changes), TARGET, tokenizer)


def test_heads() -> None:
    """The target's sizes, what the settings say, and EAGLE-3's boundaries."""
    settings = TrainSettings(
        **NEEDED, num_layers=2, num_depths=5, draft_vocab_size=40, fc_norm=True
    )
    head = head_config(settings, dataclasses.replace(TARGET, qk_norm=True), 95)
    assert (head.num_layers, head.num_depths, head.mask_token_id) == (2, 5, 95)
    assert (head.hidden_size, head.draft_vocab_size, head.vocab_size) == (32, 40, 96)
    assert (head.qk_norm, head.fc_norm, head.norm_before_fc) == (True, True, False)
    assert head.aux_boundaries == (2, 1, 0)
    chosen = dataclasses.replace(settings, method="eagle-3", aux_boundaries=(3, 1))
    head = head_config(chosen, TARGET, None)
    assert (head.mask_token_id, head.num_depths, head.aux_boundaries) == (None, None, (3, 1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"aux_boundaries": (1, 4)}, r"aux_boundaries \(1, 4\) are not among the target's 0\.\.3"),
        ({"aux_boundaries": ()}, r"aux_boundaries \(\) are not among"),
        ({"draft_vocab_size": 97}, r"draft_vocab_size 97 is not in 1\.\.96"),
        ({"draft_vocab_size": 0}, "draft_vocab_size 0 is not in"),
        ({"method": "eagle-3", "embedding": "mask_row"}, "no mask row to train"),
    ],
)
def test_settings_that_do_not_fit_the_target(changes: dict[str, Any], said: str) -> None:
    settings = TrainSettings(**NEEDED, **changes)
    with pytest.raises(SettingsError, match=said):
        head_config(settings, TARGET, 95)
    if "aux_boundaries" in changes:
        with pytest.raises(SettingsError, match=said):
            boundaries_of(settings, TARGET)


def test_a_mask_token_is_needed() -> None:
    with pytest.raises(SettingsError, match="needs mask_token_id"):
        head_config(TrainSettings(**NEEDED), TARGET, None)
