"""`peagle-jax chat`: talk to a target in the terminal."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import click

import peagle_jax
from peagle_jax import SamplingParams
from peagle_jax.cli.options import load_models, model_options, sampling_options
from peagle_jax.load import LoadedDrafter, LoadedTarget
from peagle_jax.prompts import PromptError, encode_prompts

HELP = "/reset begins a new chat, /exit or Ctrl-D leaves, Ctrl-C stops an answer."


@click.command()
@model_options
@click.option("--system", help="Text of the system message.")
@click.option(
    "--max-new-tokens", type=int, default=1024, show_default=True, help="Of one answer, at most."
)
@sampling_options
def chat(
    target: str,
    drafter: str | None,
    dtype: str | None,
    system: str | None,
    max_new_tokens: int,
    sampling: SamplingParams,
    **drafting: Any,
) -> None:
    """Talk to a target, with or without a drafter, through its chat template.

    Every line is a message. /reset begins a new chat, /exit or Ctrl-D leaves, and Ctrl-C stops an
    answer. Answers go to standard output, everything else to standard error.
    """
    try:
        model, head = load_models(target, drafter, dtype)
        session = Session(
            model,
            head,
            system,
            {"sampling": sampling, "max_new_tokens": max_new_tokens, **drafting},
        )
        session.check()
    except ValueError as error:  # every error that the user can mend
        raise click.ClickException(str(error)) from error
    interactive = sys.stdin.isatty()
    if interactive:
        _edit_lines()
        click.echo(HELP, err=True)
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            break
        except KeyboardInterrupt:
            click.echo(f"\n{HELP}", err=True)
            continue
        except UnicodeDecodeError as error:
            raise click.ClickException(f"standard input is not UTF-8: {error}") from error
        if line == "/exit":
            break
        if line == "/reset":
            session.reset()
            click.echo("New chat.", err=True)
        elif line.startswith("/"):
            click.echo(f"No such command: {line.split()[0]}. {HELP}", err=True)
        elif line:
            session.answer(line)
    if interactive:
        click.echo(err=True)


class Session:
    """A chat so far.

    Attributes:
      messages: all that was said and answered.
    """

    messages: list[dict[str, str]]

    def __init__(
        self,
        target: LoadedTarget,
        drafter: LoadedDrafter | None,
        system: str | None,
        options: dict[str, Any],
    ):
        self._target, self._drafter, self._options = target, drafter, options
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Forgets all but the system message."""
        self.messages = [*self._system]

    def check(self) -> None:
        """Finds what is wrong with models and settings before the first message.

        Raises:
          ValueError: naming it.
        """
        tokenizer = self._target.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise PromptError("the target has no chat template, without which there is no chat")
        self._encoded("Hi")
        self._pieces([0])

    def answer(self, text: str) -> None:
        """Answers a message as it comes, and keeps both; what cannot be answered is not kept."""
        try:
            pieces = self._pieces(self._encoded(text))
        except ValueError as error:
            click.echo(f"Error: {error}", err=True)
            return
        answer, last = "", None
        with _interrupts() as interrupted:
            for last in pieces:
                answer += last.text or ""
                click.echo(last.text, nl=False)
                if interrupted.is_set():
                    break
        click.echo()
        said = {"role": "user", "content": text}
        self.messages += [said, {"role": "assistant", "content": answer}]
        click.echo(click.style(_status(last), dim=True), err=True)

    def _encoded(self, text: str) -> list[int]:
        messages = [*self.messages, {"role": "user", "content": text}]
        config = self._target.config
        [ids] = encode_prompts([messages], self._target.tokenizer, config.vocab_size)
        if len(ids) >= config.max_position_embeddings:
            raise PromptError(
                f"with this message the chat has {len(ids)} tokens, more than the target's context "
                f"of {config.max_position_embeddings} has room for; the message was not added: "
                "send a shorter one, or begin a new chat with /reset"
            )
        return ids

    def _pieces(self, ids: list[int]) -> Iterator[peagle_jax.Piece]:
        return peagle_jax.stream(self._target, [ids], drafter=self._drafter, **self._options)


def _status(piece: peagle_jax.Piece | None) -> str:
    """Returns the line below an answer, given its last piece."""
    if piece is None or piece.completion is None or piece.metrics is None:
        return "[interrupted]"
    metrics = piece.metrics
    parts = [f"{metrics.num_generated_tokens} tokens", f"{metrics.tokens_per_second:.1f} tok/s"]
    if metrics.acceptance_per_position:
        parts.append(f"acceptance length {metrics.acceptance_length:.2f}")
    return f"[{', '.join(parts)}, {piece.completion.finish_reason}]"


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Turns Ctrl-C into an event, so that no program on the device is left half-way.

    The second one is a KeyboardInterrupt.
    """
    event = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        del number, frame
        event.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def _edit_lines() -> None:
    """Has `input` edit lines and remember them, where Python has readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (importing it is all)
