"""The loop: what it repeats after an interruption, what it logs, what it leaves behind."""

import dataclasses
import gc
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from jax.experimental.compilation_cache import compilation_cache
from runs import entries, prepared, run, settings_of

import peagle_jax
from peagle_jax.checkpoint import CheckpointError
from peagle_jax.load import LoadedDrafter
from peagle_jax.models import Drafter, Frozen
from peagle_jax.training.checkpoints import Checkpoints
from peagle_jax.training.dataset import Document, Recipe, Writer
from peagle_jax.training.features import Online, write_features
from peagle_jax.training.folders import DataError, exclusive
from peagle_jax.training.log import Log
from peagle_jax.training.settings import SettingsError
from peagle_jax.training.step import TrainState, make_optimiser, row_gradients
from peagle_jax.training.trainable import MASK_ROW
from peagle_jax.training.trainer import TrainingError, take_step, train, trained_head

PROMPTS = [[5, 60, 33], list(range(20, 40))]


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    options = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in options}
    folder = tmp_path_factory.mktemp("programs")
    runs.cache_programs(folder)
    compilation_cache.reset_cache()
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that nothing interrupted."""
    output = tmp_path_factory.mktemp("unbroken") / "run"
    run(output)
    return output


def weights(head: Path) -> dict[str, np.ndarray]:
    module = peagle_jax.load_drafter(head).weights.merge()
    return {name: np.asarray(x) for name, x in peagle_jax.checkpoint.arrays_of(module).items()}


def same_weights(one: Path, other: Path) -> bool:
    first, second = weights(one / "head"), weights(other / "head")
    return all((first[name] == second[name]).all() for name in {**first, **second})


# What a run leaves


def test_a_run(unbroken: Path) -> None:
    train_entries = entries(unbroken)
    assert [entry["step"] for entry in train_entries] == [1, 2, 3, 4, 5, 6]
    for entry in train_entries:
        assert np.isfinite([entry["loss"], entry["gradient_norm"]]).all()
        assert len(entry["accuracy"]) == 3
    assert [e["learning_rate"] for e in train_entries[:2]] == pytest.approx([1.5e-3, 3e-3])
    assert train_entries[-1]["loss"] < train_entries[0]["loss"]
    assert sorted(p.name for p in (unbroken / "checkpoints").iterdir()) == ["4", "6"]
    (board,) = (unbroken / "tensorboard").iterdir()
    assert b"train/gradient_norm" in board.read_bytes()


def test_the_head(unbroken: Path) -> None:
    """It loads, keeps what it was trained for, and drafts without changing a token."""
    head = peagle_jax.load_drafter(unbroken / "head")
    config = head.config
    assert (config.num_depths, config.mask_token_id, config.draft_vocab_size) == (3, runs.MASK, 40)
    assert config.own_embedding and config.own_lm_head
    model = runs.target()
    plain = peagle_jax.generate(model, PROMPTS, max_new_tokens=12)
    drafted = peagle_jax.generate(model, PROMPTS, drafter=head, max_new_tokens=12)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert len(drafted.metrics.acceptance_per_position) == 3


# Interruptions


def start(output: Path, programs: Path, **changes: Any) -> subprocess.Popen[bytes]:
    given = [f"{name}={json.dumps(value)}" for name, value in changes.items()]
    return subprocess.Popen(
        [sys.executable, runs.__file__, str(output), *given],
        env={**os.environ, "PROGRAMS": str(programs)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def kill_at(output: Path, programs: Path, lines: int, **changes: Any) -> None:
    """Kills a run once it has logged so many steps."""
    process = start(output, programs, **changes)
    metrics, deadline = output / "metrics.jsonl", time.monotonic() + 120
    try:
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < lines:
            assert process.poll() is None, process.communicate()[0].decode()
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, programs: Path, unbroken: Path) -> None:
    """Killed at a random step, of which each begins to save a state."""
    output = tmp_path / "run"
    step = random.SystemRandom().randint(2, 5)
    kill_at(output, programs, step, save_every=1)
    assert not (output / "head").exists()
    run(output, save_every=1)
    assert entries(output) == entries(unbroken), f"killed at step {step}"
    assert same_weights(output, unbroken)
    assert not list((output / "checkpoints").glob("*tmp*"))


@pytest.mark.slow
def test_a_run_killed_again_and_again(tmp_path: Path, programs: Path) -> None:
    """At random moments, before the first state is saved too."""
    changes = {"steps": 40, "save_every": 3, "rows_per_step": 3}
    run(tmp_path / "whole" / "run", **changes)
    output = tmp_path / "killed" / "run"
    for lines in sorted(random.SystemRandom().sample(range(1, 38), 6)):
        kill_at(output, programs, lines, **changes)
    run(output, **changes)
    assert entries(output) == entries(tmp_path / "whole" / "run")
    assert same_weights(output, tmp_path / "whole" / "run")


class Stop(Exception):
    pass


def stop_after(step: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a run raise once it has logged a step."""
    write = Log.write

    def writes(self: Log, kind: str, at: int, *rest: Any) -> None:
        write(self, kind, at, *rest)
        if kind == "train" and at == step:
            raise error

    monkeypatch.setattr(Log, "write", writes)


def test_an_interrupted_run_goes_on(
    tmp_path: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C; what was logged after the last state is logged once, an unfinished line not."""
    output = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_after(5, KeyboardInterrupt(), patch)
        run(output)
    assert [entry["step"] for entry in entries(output)] == [1, 2, 3, 4, 5]
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    run(output)
    assert entries(output) == entries(unbroken)
    assert same_weights(output, unbroken)


def test_a_complete_run_is_not_started_again(unbroken: Path) -> None:
    with pytest.raises(SettingsError, match=r"head exists, so this run is complete: name another"):
        run(unbroken)


def test_one_run_in_a_folder(tmp_path: Path) -> None:
    with exclusive(tmp_path / "run"), pytest.raises(DataError, match="another run is writing to"):
        run(tmp_path / "run")


@pytest.fixture
def half(tmp_path: Path, unbroken: Path) -> Path:
    """The output of a run after its fourth step."""
    shutil.copytree(unbroken.parent, tmp_path / "half")
    output = tmp_path / "half" / "run"
    shutil.rmtree(output / "head")
    shutil.rmtree(output / "checkpoints" / "6")
    return output


def test_what_may_change_when_a_run_goes_on(half: Path, unbroken: Path) -> None:
    """Where things lie, and how often something is measured or saved."""
    shutil.move(half.parent / "data", half.parent / "moved")
    settings = settings_of(half, data=(str(half.parent / "moved"),), save_every=5, keep=1)
    train(settings, *prepared(settings))
    assert entries(half) == entries(unbroken)
    assert same_weights(half, unbroken)
    assert [p.name for p in (half / "checkpoints").iterdir()] == ["6"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"learning_rate": 1e-3}, r"learning_rate = 0.003, not 0.001: go on with the same"),
        ({"steps": 8}, "steps = 6, not 8"),
        ({"seed": 1}, "seed = 0, not 1"),
        ({"aux_boundaries": (0, 1)}, r"aux_boundaries = None, not \[0, 1\]"),
    ],
)
def test_other_settings(half: Path, changes: dict[str, Any], said: str) -> None:
    before = sorted(p.name for p in (half / "checkpoints").iterdir())
    with pytest.raises(SettingsError, match=said):
        run(half, **changes)
    assert sorted(p.name for p in (half / "checkpoints").iterdir()) == before
    assert len(entries(half)) == 6


def test_other_data_and_another_target(half: Path) -> None:
    data = str(runs.make_data(half.parent / "other", seed=1))
    with pytest.raises(SettingsError, match="a run on other data or another target"):
        run(half, data=(data,))
    settings = settings_of(half)
    with pytest.raises(SettingsError, match="a run on other data or another target"):
        train(settings, *prepared(settings, runs.target(seed=1)))
    with pytest.raises(SettingsError, match="a run on other data or another target"):
        train(settings, *prepared(settings, mask=runs.MASK - 1))


def test_data_that_does_not_fit(tmp_path: Path) -> None:
    """A mask token that text holds, and documents past the target's context."""
    settings = settings_of(tmp_path / "run")
    with pytest.raises(SettingsError, match="mask_token_id 7 occurs in the data; name a token"):
        prepared(settings, mask=7)
    model = runs.target()
    short = dataclasses.replace(model.config, max_position_embeddings=8)
    with pytest.raises(DataError, match=r"a document has 19 tokens, more than .* context of 8"):
        prepared(settings, dataclasses.replace(model, config=short))


def test_a_damaged_state(half: Path) -> None:
    files = [p for p in (half / "checkpoints" / "4").rglob("*") if p.is_file()]
    os.truncate(max(files, key=lambda p: p.stat().st_size), 10)
    with pytest.raises(
        CheckpointError, match=r"checkpoints/4 is damaged, remove it to go on from the one before"
    ):
        run(half)
    gc.collect()  # which would tell of what Orbax left behind


# A full disk


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[type, str, int], None]]:
    """Lets files grow no larger from the first call of a method on, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def begins(owner: type, name: str, size: int) -> None:
        method = getattr(owner, name)

        def wrapped(*arguments: Any) -> Any:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
            return method(*arguments)

        monkeypatch.setattr(owner, name, wrapped)

    yield begins
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def room_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_a_full_disk_while_saving(
    half: Path,
    unbroken: Path,
    full_disk: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One error, what was saved is intact, and with room the run goes on from there."""
    full_disk(Checkpoints, "save", 20_000)
    with pytest.raises(CheckpointError, match=r"cannot save a state .* intact"):
        run(half, save_every=1)
    assert capfd.readouterr().err == ""
    assert [p.name for p in (half / "checkpoints").glob("[0-9]")] == ["4"]
    room_again(monkeypatch)
    run(half)
    assert entries(half) == entries(unbroken)
    assert same_weights(half, unbroken)


def test_a_full_disk_while_logging(
    half: Path, full_disk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_disk(Log, "write", 300)
    with pytest.raises(DataError, match=r"cannot write .*metrics.jsonl"):
        run(half)
    room_again(monkeypatch)
    run(half)


# What goes wrong while it runs


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    """The batch is kept, and the state before it."""
    settings = settings_of(tmp_path / "run", save_every=1)
    parts, materials = prepared(settings)

    def poisoned(index: int) -> Any:
        features, states = materials.source(index)
        return (features.at[3, 5].set(jnp.nan) if index == 1 else features), states

    broken = dataclasses.replace(materials, source=poisoned)
    with pytest.raises(
        TrainingError, match=r"step \d: the loss is nan.*features of rows \[1\] are not finite"
    ) as caught:
        train(settings, parts, broken)
    step = int(str(caught.value).split(":")[0].removeprefix("step "))
    kept = np.load(tmp_path / "run" / f"failed-batch-{step}.npz")
    assert 1 in kept["rows"]
    for place, index in enumerate(kept["rows"]):
        np.testing.assert_array_equal(kept["tokens"][place], materials.rows[int(index)].tokens)
    assert len(entries(tmp_path / "run")) == step - 1
    if step > 1:
        assert (tmp_path / "run" / "checkpoints" / str(step - 1)).exists()


# What a step computes


def test_accumulated_gradients_are_those_of_all_tokens(tmp_path: Path) -> None:
    """Four rows, one of them nearly without supervision: every element weighs alike."""
    settings = settings_of(tmp_path / "run", clip_norm=1e9)
    parts, materials = prepared(settings)
    state = TrainState.start(parts.trainable, make_optimiser(settings))
    key, indices = jax.random.key(7), [0, 1, 2, 3]
    losses, counts, slopes = [], [], []
    for place, index in enumerate(indices):
        drawn = jax.random.fold_in(jax.random.fold_in(key, 0), place)
        row = materials.row(index)
        if index == 2:
            row = dataclasses.replace(row, loss_mask=row.loss_mask & (jnp.arange(32) < 6))
        metrics, slope = row_gradients(
            settings, parts, state.trainable, row, materials.teacher, drawn
        )
        losses.append(float(metrics.loss))
        counts.append(float(metrics.total.sum()))
        slopes.append(jax.tree.map(lambda x, n=counts[-1]: np.asarray(x, np.float64) / n, slope))
    assert counts[2] < counts[0] / 2
    share = np.asarray(counts) / sum(counts)
    mean = {n: sum(w * s[n] for w, s in zip(share, slopes, strict=True)) for n in slopes[0]}

    rows = dataclasses.replace(materials)
    masked = rows.row
    object.__setattr__(
        rows,
        "row",
        lambda i: dataclasses.replace(
            masked(i), loss_mask=masked(i).loss_mask & (jnp.arange(32) < 6 if i == 2 else True)
        ),
    )
    optimiser = make_optimiser(settings)
    _, metrics, norm = take_step(settings, optimiser, parts, state, rows, indices, key)
    assert float(metrics.loss) == pytest.approx(sum(losses), rel=1e-5)
    assert float(metrics.total.sum()) == sum(counts)
    expected = np.sqrt(sum(np.square(x).sum() for x in mean.values()))
    assert norm == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_offline_features_give_the_same_run(tmp_path: Path, unbroken: Path) -> None:
    """Float32 bit for bit; bfloat16 nearly."""
    settings = settings_of(tmp_path / "run")
    _, materials = prepared(settings)
    assert isinstance(materials.source, Online)
    for dtype in ("float32", "bfloat16"):
        write_features(materials.source, tmp_path / dtype, dtype)
        run(tmp_path / f"run-{dtype}", features=str(tmp_path / dtype))
    assert entries(tmp_path / "run-float32") == entries(unbroken)
    losses = [
        [entry["loss"] for entry in entries(output)]
        for output in (tmp_path / "run-bfloat16", unbroken)
    ]
    assert losses[0] != losses[1]
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-2)


@pytest.mark.parametrize("embedding", ["train", "mask_row"])
def test_no_slot_is_lost_in_bfloat16(tmp_path: Path, embedding: str) -> None:
    """The gradients of hundreds of slots add up in the mask token's row."""
    rng = np.random.default_rng(0)
    writer = Writer(tmp_path / "long", Recipe(runs.TARGET.vocab_size, 1, {}))
    tokens = rng.integers(0, runs.MASK - 1, (2, 200)).astype(np.int32)
    writer.write(0, [Document(one, np.arange(200) >= 3) for one in tokens])
    found = []
    for dtype in ("float32", "bfloat16"):
        settings = settings_of(
            tmp_path / "run", data=(str(tmp_path / "long"),), row_tokens=400, num_depths=8,
            embedding=embedding, dtype=dtype,
        )  # fmt: skip
        parts, materials = prepared(settings)
        state = TrainState.start(parts.trainable, make_optimiser(settings))
        row, key = materials.row(0), jax.random.key(1)
        metrics, slopes = row_gradients(
            settings, parts, state.trainable, row, materials.teacher, key
        )
        assert metrics.total[1:].sum() > 1000
        table = slopes.get("embedding")
        found.append(slopes[MASK_ROW] if table is None else table[runs.MASK])
        trained_head(settings, parts, state, jnp.dtype(dtype))  # rounds the row into the table
    exact, short = found
    assert jnp.linalg.norm(short - exact) < 0.05 * jnp.linalg.norm(exact)


@pytest.mark.slow
def test_bfloat16(tmp_path: Path, unbroken: Path) -> None:
    """Masters stay float32: the run follows the float32 one closely."""
    settings = settings_of(tmp_path / "run", dtype="bfloat16")
    parts, materials = prepared(settings)
    assert {x.dtype for x in parts.frozen.values()} == {jnp.dtype("bfloat16"), jnp.dtype("int32")}
    state = TrainState.start(parts.trainable, make_optimiser(settings))
    assert {x.dtype for x in state.trainable.values()} == {jnp.dtype("float32")}
    train(settings, parts, materials)
    losses = [
        [entry["loss"] for entry in entries(output)] for output in (tmp_path / "run", unbroken)
    ]
    assert losses[0] != losses[1]
    np.testing.assert_allclose(losses[0], losses[1], rtol=5e-2)


def test_eagle_3(tmp_path: Path) -> None:
    """The same loop trains a head without mask slots; its embedding is its target's."""
    changes = {"num_depths": 2, "embedding": "frozen", "step_decay": 0.8}
    head = run(tmp_path / "run", method="eagle-3", **changes)
    losses = [entry["loss"] for entry in entries(tmp_path / "run")]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    drafter = peagle_jax.load_drafter(head)
    assert (drafter.config.mask_token_id, drafter.config.num_depths) == (None, None)
    assert not drafter.config.own_embedding


# Measurements


def test_measurements(tmp_path: Path) -> None:
    """At their steps and at the last; the head that is measured is the one that is saved."""
    model, measured = runs.target(), []

    def length(drafter: LoadedDrafter) -> float | None:
        out = peagle_jax.generate(
            model, PROMPTS, drafter=drafter, max_new_tokens=30, num_speculative_tokens=3
        )
        return out.metrics.acceptance_length

    def measure(head: Drafter) -> dict[str, Any]:
        measured.append(head)
        found = length(LoadedDrafter(head.config, Frozen.of(head), tmp_path))
        return {"acceptance_length": found, "acceptance_per_position": [0.5, None]}

    data = str(runs.make_data(tmp_path / "validation", seed=5, documents=4))
    head = run(
        tmp_path / "run",
        measure,
        embedding="frozen",
        validation=(data,),
        validate_every=4,
        generate_every=5,
        generate_prompts="prompts.jsonl",
    )
    validation = entries(tmp_path / "run", "validation")
    generation = entries(tmp_path / "run", "generation")
    assert [entry["step"] for entry in validation] == [4, 6]
    assert [entry["step"] for entry in generation] == [5, 6]
    assert validation[0]["loss"] != validation[1]["loss"]
    loaded = peagle_jax.load_drafter(head)
    assert not loaded.config.own_embedding
    assert generation[-1]["acceptance_length"] == length(loaded)
    one = peagle_jax.checkpoint.arrays_of(measured[-1])
    for name, array in peagle_jax.checkpoint.arrays_of(loaded.weights.merge()).items():
        np.testing.assert_array_equal(one[name], array)
    np.testing.assert_array_equal(one["embedding"], model.weights.merge().embedding[...])


def test_validation_draws_alike(tmp_path: Path) -> None:
    """The loss on the training rows themselves, of a head that does not move, does not."""
    settings = settings_of(tmp_path / "run", learning_rate=1e-30, validate_every=3)
    run_settings = dataclasses.replace(settings, validation=settings.data)
    train(run_settings, *prepared(run_settings))
    first, second = entries(tmp_path / "run", "validation")
    assert first["loss"] == second["loss"]
    assert first["elements"] == second["elements"]


# What is shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal: steps, time left, loss and tokens per second. Elsewhere nothing."""
    settings = settings_of(tmp_path / "run")
    parts, materials = prepared(settings)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    train(settings, parts, materials, progress=True)
    shown = terminal.getvalue()
    for text in ("6/6", "<00:00", "loss ", "acceptance ", "tok/s"):
        assert text in shown
    other = io.StringIO()
    monkeypatch.setattr(sys, "stderr", other)
    train(
        dataclasses.replace(settings, output=str(tmp_path / "b")), parts, materials, progress=True
    )
    assert other.getvalue() == ""


def test_the_log_survives_damage(tmp_path: Path) -> None:
    """Entries up to the state that a run goes on from; not what a power cut left after them."""
    whole = [json.dumps({"kind": "train", "step": n, "loss": 1.0}) for n in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_bytes("\n".join(whole).encode() + b"\n\x00\xff\n{}\n")
    with Log(tmp_path, 3) as log:
        log.write("train", 4, {"loss": None, "accuracy": [0.5, None]})
    assert [entry["step"] for entry in entries(tmp_path)] == [1, 2, 3, 4]
    with Log(tmp_path, 2):
        pass
    assert [entry["step"] for entry in entries(tmp_path)] == [1, 2]
