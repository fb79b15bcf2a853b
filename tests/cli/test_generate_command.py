"""`peagle-jax generate`: what it prints and where, and one line for every error."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from cli_models import DRAFTER, WORDS, make_target, own_cache
from click.testing import CliRunner, Result
from conftest import GOLDEN

import peagle_jax
from peagle_jax import SamplingParams
from peagle_jax.cli import main
from peagle_jax.convert import to_native

COMMAND = Path(sys.executable).parent / "peagle-jax"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from own_cache(tmp_path / "cache", monkeypatch)


def lines(tmp_path: Path, *rows: Any) -> Path:
    """Writes rows, JSON or already text, to a prompts file."""
    path = tmp_path / "prompts.jsonl"
    text = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    return path


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["generate", *map(str, arguments)])


# What it prints


def test_json(target: Path, tmp_path: Path) -> None:
    """Two prompts of two forms; the same as the Python call."""
    chat = [{"role": "user", "content": "w1 w2"}]
    file = lines(tmp_path, {"prompt": "w7 w8 w9"}, "", {"messages": chat})
    options = ["--target", target, "--drafter", DRAFTER, "--max-new-tokens", 12, "-k", 2, "--json"]
    result = invoke(*options, "--prompts-file", file)
    assert (result.exit_code, result.stderr) == (0, "")
    *answers, last = map(json.loads, result.stdout.splitlines())
    expected = peagle_jax.generate(
        str(target),
        ["w7 w8 w9", chat],
        drafter=str(DRAFTER),
        max_new_tokens=12,
        num_speculative_tokens=2,
    )
    assert answers == [
        {
            "text": c.text,
            "token_ids": c.token_ids,
            "finish_reason": c.finish_reason,
            "stop_reason": None,
            "logprobs": None,
            "acceptance": dataclasses.asdict(c.acceptance),
        }
        for c in expected
    ]
    assert [len(answer["token_ids"]) for answer in answers] == [12, 12]
    assert answers[0]["text"] == " ".join(WORDS[i] for i in answers[0]["token_ids"])
    assert list(last) == ["metrics"]
    metrics = last["metrics"]
    assert set(metrics) == {
        *("num_generated_tokens", "num_rounds", "acceptance_length", "acceptance_per_position"),
        *("seconds", "tokens_per_second", "compile_seconds", "draft_share"),
    }
    assert metrics["num_generated_tokens"] == 24
    assert metrics["num_rounds"] == expected.metrics.num_rounds
    assert metrics["acceptance_length"] == expected.metrics.acceptance_length
    assert metrics["acceptance_per_position"] == expected.metrics.acceptance_per_position

    # The rest runs the program that is compiled by now. Without --json, text and a summary:
    result = invoke(*options[:-1], "--prompts-file", file)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [answer["text"] for answer in answers]
    summary = result.stderr.splitlines()
    assert len(summary) == 1 and summary[0].startswith("24 tokens in ")
    assert f"acceptance length {metrics['acceptance_length']:.2f}" in summary[0]

    # --chat makes messages of text and leaves the rest as it is.
    file = lines(tmp_path, '"w1 w2"', {"token_ids": [1, 4, 5, 2]})
    result = invoke(*options, "--prompts-file", file, "--chat")
    text, ids, _ = map(json.loads, result.stdout.splitlines())
    assert text == ids == answers[1]  # "user w1 w2 assistant"
    file = lines(tmp_path, {"prompt": "w1 w2"}, '"w7 w8 w9"')
    result = invoke(*options, "--prompts-file", file)
    plain, other, _ = map(json.loads, result.stdout.splitlines())
    assert other == answers[0] and plain != answers[1]


def test_a_row_has_settings_of_its_own(target: Path, tmp_path: Path) -> None:
    """Rows override the command line one by one; stops and log-probabilities show."""
    file = lines(
        tmp_path,
        {"prompt": "w7 w8 w9"},
        {"prompt": "w7 w8 w9", "sampling": {"stop": ["w5"], "logprobs": 1}},
        {"prompt": "w7 w8 w9", "sampling": {"logit_bias": {"40": 1e9}, "stop_token_ids": [8]}},
    )
    options = ["--target", target, "--drafter", DRAFTER, "--prompts-file", file, "-k", 2]
    options += ["--max-new-tokens", 12, "--stop-token-id", 77, "--json"]
    result = invoke(*options)
    assert (result.exit_code, result.stderr) == (0, "")
    first, second, third, _ = map(json.loads, result.stdout.splitlines())
    assert (first["token_ids"][-1], first["stop_reason"]) == (77, 77)
    assert (second["token_ids"][-1], second["stop_reason"]) == (8, "w5")
    assert second["text"] == "w8 w8 w8 w8 w8 " and first["text"].startswith(second["text"])
    assert [len(e["top"]) for e in second["logprobs"]] == [1] * len(second["token_ids"])
    assert first["logprobs"] is None
    assert (third["token_ids"], third["stop_reason"]) == ([40] * 12, None)


def test_stream(target: Path, tmp_path: Path) -> None:
    """The text of the plain command as it comes; with --json one object per piece."""
    options = ["--target", target, "--drafter", DRAFTER, "--max-new-tokens", 12, "-k", 2]
    whole = invoke(*options, "--prompt", "w7 w8 w9")
    result = invoke(*options, "--prompt", "w7 w8 w9", "--stream")
    assert (result.exit_code, result.stdout) == (0, whole.stdout)
    assert result.stderr.startswith("12 tokens in ")
    file = lines(tmp_path, {"prompt": "w7 w8 w9"}, {"token_ids": [5]})
    result = invoke(*options, "--prompts-file", file, "--stream", "--json")
    *pieces, last = map(json.loads, result.stdout.splitlines())
    assert len(pieces) > 10 and last["metrics"]["num_generated_tokens"] == 24
    own = [piece for piece in pieces if piece["index"] == 0]
    assert "".join(piece["text"] for piece in own) + "\n" == whole.stdout
    assert own[-1]["completion"]["text"] + "\n" == whole.stdout
    assert not any("completion" in piece for piece in own[:-1])


def test_sampling_flags_are_the_fields_of_sampling_params(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each flag, 0 included: a value that is given is not taken for one that is not."""
    seen: list[SamplingParams] = []

    def generate(target: Any, prompts: Any, **options: Any) -> Any:
        seen.extend(options["sampling"])
        raise ValueError("enough")

    monkeypatch.setattr(peagle_jax, "generate", generate)
    flags = {
        "--temperature": 0.5,
        "--top-k": 4,
        "--top-p": 0.9,
        "--min-p": 0.1,
        "--seed": 0,
        "--repetition-penalty": 1.5,
        "--presence-penalty": 2,
        "--frequency-penalty": -1,
        "--min-new-tokens": 3,
        "--logprobs": 0,
    }
    several = [*("--logit-bias", "7=-1.5", "--logit-bias", "8=2", "--stop", "a", "--stop", "b,c")]
    several += ["--allowed-token-id", 7, "--allowed-token-id", 9, "--bad-token-id", 9]
    several += ["--stop-token-id", 0, "--ignore-eos", "--include-stop-str-in-output"]
    pairs = [part for pair in flags.items() for part in pair]
    invoke("--target", target, "--prompt", "w1", *pairs, *several)
    fields = {name[2:].replace("-", "_"): value for name, value in flags.items()}
    assert seen == [
        SamplingParams(
            **fields,
            logit_bias={7: -1.5, 8: 2.0},
            stop=("a", "b,c"),
            allowed_token_ids=(7, 9),
            bad_token_ids=(9,),
            stop_token_ids=(0,),
            ignore_eos=True,
            include_stop_str_in_output=True,
        )
    ]
    assert {field.name for field in dataclasses.fields(SamplingParams)} == {
        *fields,
        *("logit_bias", "stop", "allowed_token_ids", "bad_token_ids", "stop_token_ids"),
        *("ignore_eos", "include_stop_str_in_output"),
    }


def test_options_reach_the_library(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def generate(target: Any, prompts: Any, **options: Any) -> Any:
        calls.append({"target": target, "prompts": prompts, **options})
        raise ValueError("enough")

    monkeypatch.setattr(peagle_jax, "generate", generate)
    invoke("--target", target, "--prompt", "w1")
    invoke(
        *("--target", target, "--drafter", DRAFTER, "--prompt", "w1", "--chat", "--exact"),
        *("--max-new-tokens", 7, "--num-speculative-tokens", 3, "--batch-size", 2),
        *("--dtype", "bfloat16", "--drafting", "parallel", "--draft-sampling", "sample"),
        *("--profile", "--temperature", "0.5"),
    )
    plain, full = calls
    assert plain.pop("target").config == full["target"].config
    assert plain == {
        "prompts": ["w1"],
        "drafter": None,
        "max_new_tokens": 256,
        "num_speculative_tokens": None,
        "exact": False,
        "batch_size": 8,
        "progress": False,
        "profile": False,
        "sampling": [SamplingParams()],
        "drafting": "auto",
        "draft_sampling": "greedy",
    }
    for loaded in (full.pop("target"), full.pop("drafter")):
        dtypes = {str(a.dtype) for a in jax.tree.leaves(loaded.weights)}
        assert dtypes - {"int32"} == {"bfloat16"}
    assert full == {
        "prompts": [[{"role": "user", "content": "w1"}]],
        "max_new_tokens": 7,
        "num_speculative_tokens": 3,
        "exact": True,
        "batch_size": 2,
        "progress": False,
        "profile": True,
        "sampling": [SamplingParams(temperature=0.5)],
        "drafting": "parallel",
        "draft_sampling": "sample",
    }


def test_help_lists_every_option() -> None:
    for flag in ("--help", "-h"):
        result = invoke(flag)
        assert (result.exit_code, result.stderr) == (0, "")
        for option in (
            *("--target", "--drafter", "--prompt", "--prompts-file", "--chat"),
            *("--max-new-tokens", "--num-speculative-tokens", "--json", "--stream", "--stop"),
            *("--temperature", "--logit-bias", "--draft-sampling", "--profile"),
        ):
            assert f" {option} " in result.stdout
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0 and "generate" in result.stdout
    assert "0.1.0" in CliRunner().invoke(main, ["--version"]).stdout


# The installed command


def run(*arguments: Any, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [str(COMMAND), "generate", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_the_installed_command_compiles_once(tmp_path: Path, cache: Path) -> None:
    """A Hugging Face folder without a tokenizer; the second run finds everything in the cache."""
    file = lines(tmp_path, {"token_ids": [5, 60, 33]}, {"token_ids": [9]})
    options = ["--target", GOLDEN / "targets" / "llama_gqa", "--prompts-file", file]
    options += ["--max-new-tokens", "5", "--json"]
    first = run(*options, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    *answers, last = map(json.loads, first.stdout.splitlines())
    assert [(a["text"], len(a["token_ids"]), a["finish_reason"]) for a in answers] == [
        (None, 5, "length"),
        (None, 5, "length"),
    ]
    assert list(last) == ["metrics"]
    assert (last["metrics"]["num_generated_tokens"], last["metrics"]["num_rounds"]) == (10, 8)

    made = {p: p.stat().st_mtime_ns for p in cache.rglob("*") if not p.name.endswith("-atime")}
    programs = [p.name for p in made if p.name.endswith("-cache")]
    assert sum(name.startswith("jit_generate_tokens-") for name in programs) == 1
    second = run(*options, cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert list(map(json.loads, second.stdout.splitlines()))[:2] == answers
    again = {p: p.stat().st_mtime_ns for p in cache.rglob("*") if not p.name.endswith("-atime")}
    assert again == made


def test_the_installed_command_fails_in_one_line(tmp_path: Path) -> None:
    failed = run("--target", "./nowhere", "--prompt", "Hi", cwd=tmp_path)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr == "Error: ./nowhere: no such folder\n"


# Errors


def assert_one_error(result: Result, code: int) -> str:
    """Returns the error's text."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout) == (code, "")
    found = result.stderr.splitlines()
    if code == 2:  # click shows how the command is used first
        assert found[0].startswith("Usage: ") and found[1].startswith("Try ")
        found = found[3:]
    assert len(found) == 1 and found[0].startswith("Error: ")
    return found[0].removeprefix("Error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "x"], "give either --prompt or --prompts-file"),
        (["--target", "x", "--prompt", "a", "--prompts-file", __file__], "give either --prompt or"),
        (["--prompt", "a"], "Missing option '--target'"),
        (["--target", "x", "--prompts-file", "no-file"], "'no-file' does not exist"),
        (["--target", "x", "--prompts-file", "."], "'.' is a directory"),
        (["--target", "x", "--prompt", "a", "--max-new-tokens", "few"], "'few' is not a valid int"),
        (["--target", "x", "--prompt", "a", "--dtype", "float16"], "'float16' is not one of"),
        (["--target", "x", "--prompt", "a", "--speed", "9"], "No such option"),
        (["--target", "x", "--prompt", "a", "--logit-bias", "7"], "'7' is not a token id and a"),
        (["--target", "x", "--prompt", "a", "--drafting", "tree"], "'tree' is not one of"),
        (["--target", "x", "--prompt", "a", "--stream", "--exact"], "--stream goes with neither"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str) -> None:
    assert message in assert_one_error(invoke(*arguments), 2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'prompt': 'a'}", "no JSON"),
        ('{"prompt": "a"', "no JSON"),
        ("Hello", "no JSON"),
        ('{"text": "a"}', "exactly one of prompt, messages, token_ids"),
        ('{"prompt": "a", "token_ids": [1]}', "exactly one of prompt, messages, token_ids"),
        ("{}", "exactly one of prompt, messages, token_ids"),
        ("[1, 2]", "exactly one of prompt, messages, token_ids"),
        ('["prompt"]', "exactly one of prompt, messages, token_ids"),
        ('{"prompt": "a", "sampling": {"heat": 1}}', "unknown sampling parameter 'heat'; there"),
        ('{"prompt": "a", "sampling": {"top_p": 0}}', "top_p must be a number, above 0"),
        ('{"prompt": "a", "sampling": {"stop": "a"}}', "stop must be a list of strings"),
        ('{"prompt": "a", "sampling": [1]}', "sampling must be an object, got [1]"),
        ('{"prompt": "a", "sampling": {"logit_bias": {"a": 1}}}', "'a' is no token id"),
    ],
)
def test_a_wrong_line_of_the_prompts_file_is_named(line: str, message: str, tmp_path: Path) -> None:
    file = lines(tmp_path, '"first"', "", line, '"last"')
    error = assert_one_error(invoke("--target", "x", "--prompts-file", file), 1)
    assert error.startswith(f"{file}, line 3: ") and message in error


@pytest.mark.parametrize("rows", [[], ["", "  ", "\t"]])
def test_a_file_without_prompts(rows: list[str], tmp_path: Path) -> None:
    file = lines(tmp_path, *rows)
    error = assert_one_error(invoke("--target", "x", "--prompts-file", file), 1)
    assert error == f"{file} holds no prompt"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "prompt 0: it is empty"),
        (["--prompt", "w1 " * 256], "256 tokens leave no room in the target's context of 256"),
        (["--max-new-tokens", "-5"], "max_new_tokens must be an integer of at least 1, got -5"),
        (["--max-new-tokens", "0"], "max_new_tokens must be an integer of at least 1, got 0"),
        (["--batch-size", "0"], "batch_size must be an integer of at least 1, got 0"),
        (["-k", "0"], "num_speculative_tokens must be an integer of at least 1, got 0"),
        (["-k", "6"], "num_speculative_tokens 6 is more than the drafter allows: it was trained"),
        (["--target", "./no/where"], "./no/where: no such folder"),
        (["--drafter", "./no/where"], "./no/where: no such folder"),
        (["--drafter", str(GOLDEN)], "golden has no config.json"),
        (["--target", str(DRAFTER)], "holds a drafter, not a target"),
        (
            ["--drafter", str(GOLDEN / "targets" / "llama_gqa")],
            "llama_gqa holds no P-EAGLE or EAGLE-3 head",
        ),
    ],
)
def test_wrong_input(arguments: list[str], message: str, target: Path) -> None:
    """Later options take the place of the good ones before them."""
    good = ["--target", target, "--drafter", DRAFTER, "--prompt", "w1"]
    assert message in assert_one_error(invoke(*good, *arguments), 1)


def test_wrong_sampling_is_found_before_the_models_are_loaded() -> None:
    for flag, value, message in (
        ("--top-p", 0, "top_p must be a number, above 0"),
        ("--temperature", -1, "temperature must be a number, at least 0"),
        ("--stop", "", "must be a string of at least one character"),
        ("--seed", -1, "seed must be an integer in 0.."),
        ("--repetition-penalty", 0, "repetition_penalty must be a number"),
    ):
        error = assert_one_error(invoke("--target", "x", "--prompt", "a", flag, value), 1)
        assert message in error


def test_several_streams_need_json(tmp_path: Path) -> None:
    file = lines(tmp_path, '"a"', '"b"')
    result = invoke("--target", "x", "--prompts-file", file, "--stream")
    assert "--stream of several prompts needs --json" in assert_one_error(result, 2)


def test_a_wrong_prompt_of_a_file_is_named(target: Path, tmp_path: Path) -> None:
    file = lines(tmp_path, {"prompt": "w1"}, {"prompt": 5})
    error = assert_one_error(invoke("--target", target, "--prompts-file", file), 1)
    assert error.startswith("prompt 1: int is no prompt")
    file = lines(tmp_path, {"token_ids": [1]}, {"token_ids": [1, 96]})
    error = assert_one_error(invoke("--target", target, "--prompts-file", file), 1)
    assert error == "prompt 1: token id 96 is outside the vocabulary of 96"


def test_a_drafter_of_another_target(target: Path, tmp_path: Path) -> None:
    other = tmp_path / "native"
    to_native(DRAFTER, other, progress=False)
    header = json.loads((other / "config.json").read_text())
    header["config"]["aux_boundaries"] = [1, 2, 9]
    (other / "config.json").write_text(json.dumps(header))
    arguments = ["--target", target, "--drafter", other, "--prompt", "w1"]
    error = assert_one_error(invoke(*arguments), 1)
    assert "boundaries (1, 2, 9)" in error and "do not belong together" in error


@pytest.mark.parametrize("line", ["5", "null", "true"])
def test_a_line_that_is_neither_text_nor_object(line: str, tmp_path: Path) -> None:
    file = lines(tmp_path, '"first"', line)
    error = assert_one_error(invoke("--target", "x", "--prompts-file", file), 1)
    assert error.startswith(f"{file}, line 2: ")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'"caf\xe9"\n')
    error = assert_one_error(invoke("--target", "x", "--prompts-file", file), 1)
    assert str(file) in error


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_other_line_separators_are_text(separator: str, target: Path, tmp_path: Path) -> None:
    """JSON lines end at a line feed; json.dumps(ensure_ascii=False) leaves these as they are."""
    file = lines(tmp_path, f'"w1{separator}w2"')
    arguments = ["--target", target, "--prompts-file", file, "--max-new-tokens", "0"]
    assert assert_one_error(invoke(*arguments), 1).startswith("max_new_tokens must be")
