"""JSON lines of prompts, each with settings of its own if it has any."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from peagle_jax import SamplingParams
from peagle_jax.cli.options import sampling_params

PROMPT_KEYS = ("prompt", "messages", "token_ids")


@dataclasses.dataclass(frozen=True)
class Row:
    """A prompt in any form, and how it is to be answered."""

    prompt: Any
    sampling: SamplingParams

    def chat(self) -> Any:
        """Returns text as a chat message, and other forms as they are."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return self.prompt


def read_rows(path: Path, sampling: SamplingParams) -> list[Row]:
    """Reads a prompts file.

    Args:
      path: the file.
      sampling: settings that rows may override one by one.

    Raises:
      ClickException: naming the line.
    """
    rows = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(_row(line, sampling))
        except click.ClickException as error:
            raise click.ClickException(f"{path}, line {number}: {error.message}") from error
    if not rows:
        raise click.ClickException(f"{path} holds no prompt")
    return rows


def _row(line: str, sampling: SamplingParams) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise click.ClickException(f"no JSON ({error})") from error
    if isinstance(row, str):
        return Row(row, sampling)
    keys = row if isinstance(row, dict) else {}
    named = [key for key in PROMPT_KEYS if key in keys]
    if len(named) != 1:
        raise click.ClickException(
            "expected a string, or an object with exactly one of prompt, messages, token_ids"
        )
    own = keys.get("sampling", {})
    if not isinstance(own, dict):
        raise click.ClickException(f"sampling must be an object, got {own!r}")
    if isinstance(bias := own.get("logit_bias"), dict):  # JSON has no other keys than strings
        own = {**own, "logit_bias": {_token_id(key): value for key, value in bias.items()}}
    return Row(row[named[0]], sampling_params(own, sampling))


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise click.ClickException(f"logit_bias: {key!r} is no token id") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"cannot read {path}: {error}") from error
