"""`peagle-jax chat`: through a terminal and through a pipe."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from cli_models import DRAFTER, make_target, own_cache
from click.testing import CliRunner, Result

import peagle_jax
from peagle_jax.cli import main
from peagle_jax.cli.chat import HELP

COMMAND = Path(sys.executable).parent / "peagle-jax"
STATUS = re.compile(
    r"\[(\d+) tokens, [\d.]+ tok/s, acceptance length [\d.]+, (stop|length)\]", re.ASCII
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from own_cache(tmp_path / "cache", monkeypatch)


def invoke(typed: str, *arguments: Any) -> Result:
    return CliRunner().invoke(main, ["chat", *map(str, arguments)], input=typed)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompts that reach the library."""
    prompts: list[list[int]] = []
    stream = peagle_jax.stream

    def watched(target: Any, given: Any, **options: Any) -> Any:
        prompts.append(given[0])
        return stream(target, given, **options)

    monkeypatch.setattr(peagle_jax, "stream", watched)
    return prompts


def test_turns_through_a_pipe(target: Path, asked: list[list[int]]) -> None:
    """Each turn is asked with all before it, until a reset; blank lines ask nothing."""
    options = ["--target", target, "--drafter", DRAFTER, "-k", 2, "--max-new-tokens", 6]
    typed = "w7 w8\n\n w9 \n/what\n/reset\nw7 w8\n/exit\nw1\n"
    result = invoke(typed, *options, "--system", "w50")
    assert result.exit_code == 0, result.stderr
    first, second, third = result.stdout.splitlines()
    assert first == third and len(first.split()) == 6
    statuses = [line for line in result.stderr.splitlines() if STATUS.fullmatch(line)]
    assert len(statuses) == 3 and "> " not in result.stdout
    assert "No such command: /what" in result.stderr and "New chat." in result.stderr
    turns = [
        [{"role": "system", "content": "w50"}, {"role": "user", "content": "w7 w8"}],
        [{"role": "assistant", "content": first}, {"role": "user", "content": "w9"}],
    ]
    loaded, head = peagle_jax.load_target(target), peagle_jax.load_drafter(DRAFTER)
    for chat, answer, ids in (
        (turns[0], first, asked[1]),  # the first call only checks
        (turns[0] + turns[1], second, asked[2]),
    ):
        [expected] = peagle_jax.generate(
            loaded, [chat], drafter=head, max_new_tokens=6, num_speculative_tokens=2
        )
        assert (expected.prompt_token_ids, expected.text) == (ids, answer)
    assert asked[3] == asked[1] and len(asked) == 4


def test_a_message_that_does_not_fit_is_not_kept(target: Path, asked: list[list[int]]) -> None:
    typed = f"w7\n{'w1 ' * 250}\nw8\n"
    result = invoke(typed, "--target", target, "--max-new-tokens", 4)
    assert result.exit_code == 0
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert "the chat has 259 tokens, more than the target's context of 256" in errors[0]
    assert "/reset" in errors[0]
    assert len(result.stdout.splitlines()) == 2
    assert asked[2][: len(asked[1])] == asked[1]  # w7 is remembered
    assert len(asked[2]) == len(asked[1]) + 4 + 3  # its answer, user, w8, assistant


def test_ctrl_c_ends_the_answer_and_keeps_it(
    target: Path, asked: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = peagle_jax.stream

    def interrupted(*arguments: Any, **options: Any) -> Any:
        for count, piece in enumerate(stream(*arguments, **options)):
            if count == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield piece

    monkeypatch.setattr(peagle_jax, "stream", interrupted)
    before = signal.getsignal(signal.SIGINT)
    result = invoke("w7 w8\nw9\n", "--target", target, "--max-new-tokens", 6)
    assert result.exit_code == 0
    first, second = result.stdout.splitlines()
    assert len(first.split()) == len(second.split()) == 4  # the first piece has two tokens
    assert result.stderr.splitlines() == ["[interrupted]"] * 2
    assert len(asked[1]) == len(asked[0]) + 4 + 3
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "./nowhere"], "./nowhere: no such folder"),
        (["--max-new-tokens", 0], "max_new_tokens must be an integer of at least 1"),
        (["--drafter", DRAFTER, "-k", 99], "num_speculative_tokens 99 is more than"),
        (["--temperature", -1], "temperature must be a number"),
        (["--bad-token-id", 96], "bad_token_ids"),
    ],
)
def test_errors_come_before_the_first_message(
    arguments: list[Any], message: str, target: Path
) -> None:
    result = invoke("w1\n", "--target", target, *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ") and message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_target_without_a_template(tmp_path: Path) -> None:
    result = invoke("w1\n", "--target", make_target(tmp_path, template=None))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: the target has no chat template")


class Terminal:
    """The command in a pseudo-terminal."""

    def __init__(self, *arguments: Any):
        self._end, inner = pty.openpty()
        self.seen = ""
        # A session's leader gets the terminal that it opens as the one that Ctrl-C comes from.
        script = 'exec "$0" chat "$@" <>"$TERMINAL" >&0 2>&0'
        self.process = subprocess.Popen(
            ["sh", "-c", script, COMMAND, *map(str, arguments)],
            env={**os.environ, "TERMINAL": os.ttyname(inner)},
            start_new_session=True,
        )
        self.read_until(HELP[:20])
        os.close(inner)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def read_until(self, pattern: str, seconds: float = 120) -> str:
        """Returns what came up to the end of the match, and forgets it."""
        deadline = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen)):
            ready, _, _ = select.select([self._end], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} did not come; there is {self.seen!r}"
            try:
                new = os.read(self._end, 4096)
            except OSError:  # the other end was closed
                new = b""
            assert new, f"it ended before {pattern!r}; there is {self.seen!r}"
            self.seen += new.decode()
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text


def test_in_a_terminal(target: Path) -> None:
    """Prompt, edited line, Ctrl-C at the prompt and in an answer, Ctrl-D."""
    options = ["--target", target, "--drafter", DRAFTER, "--max-new-tokens", 200, "-k", 2]
    with Terminal(*options) as terminal:
        terminal.read_until("> $")
        terminal.type("w1 half a line")
        terminal.read_until("a line$")
        time.sleep(0.3)  # Python notices Ctrl-C while it waits for a key, not while it shows one
        terminal.type("\x03")
        terminal.read_until("> $")
        terminal.type("w7 w8\n")
        time.sleep(0.3)  # it is compiling now, for seconds
        terminal.type("\x03")
        assert len(re.findall(r"\bw\d+\b", terminal.read_until(r"\[interrupted\]"))) < 20
        terminal.read_until("> $")
        terminal.type("w9\x7f8\n")  # backspace
        typed, answer, _ = terminal.read_until(STATUS.pattern).splitlines()
        assert re.sub(r".\x08(\x1b\[K| \x08)", "", typed) == "w8"
        assert len(answer.split()) == 200
        terminal.read_until("> $")
        terminal.type("\x04")
        assert terminal.process.wait(timeout=60) == 0
