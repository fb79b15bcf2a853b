"""Every field of `TrainSettings` as a flag, beside the TOML file that holds them."""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from peagle_jax.training.settings import SettingsError, TrainSettings

Command = Callable[..., Any]


def settings_options(command: Command) -> Command:
    """Adds `--config` and the settings' flags; the command gets one argument, `settings`."""

    @functools.wraps(command)
    def with_settings(config: Path | None, **options: Any) -> Any:
        names = [field.name for field in dataclasses.fields(TrainSettings)]
        given = {name: options.pop(name) for name in names}
        given = {name: value for name, value in given.items() if value not in (None, ())}
        try:
            settings = TrainSettings.read(config, given)
        except SettingsError as error:
            raise click.ClickException(str(error)) from error
        return command(**options, settings=settings)

    described = _descriptions()
    kinds = get_type_hints(TrainSettings)
    wrapped: Command = with_settings
    for field in reversed(dataclasses.fields(TrainSettings)):
        wrapped = _flag(field, kinds[field.name], described[field.name])(wrapped)
    return click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="TOML file of settings; flags go before it.",
    )(wrapped)


def _flag(field: dataclasses.Field[Any], kind: Any, text: str) -> Command:
    name = f"--{field.name.replace('_', '-')}"
    if field.default not in (dataclasses.MISSING, None, ()):
        text += f" [default: {field.default}]"
    options = get_args(kind)
    if kind is bool:
        return click.option(f"{name}/--no-{name[2:]}", default=None, help=text)
    if get_origin(kind) is Literal:
        return click.option(name, type=click.Choice(options), help=text)
    sequences = [option for option in (kind, *options) if get_origin(option) is tuple]
    if sequences:
        (element, _) = get_args(sequences[0])
        return click.option(name, field.name, type=element, multiple=True, help=f"{text} Repeat.")
    plain = next(option for option in (*options, kind) if option is not type(None))
    return click.option(name, type=plain, help=text)


def _descriptions() -> dict[str, str]:
    """Returns what the class's docstring says of each field."""
    _, _, attributes = (TrainSettings.__doc__ or "").partition("Attributes:\n")
    found = re.findall(r"^ {6}(\w+): (.*(?:\n {8}.*)*)", attributes, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text[:1].upper() + text[1:]) for name, text in found}
