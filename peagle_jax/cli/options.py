"""Options that commands share: models, drafting, sampling."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click
import jax

import peagle_jax
from peagle_jax.load import LoadedDrafter, LoadedTarget, cache_folder

Command = Callable[..., Any]


class _TokenBias(click.ParamType):
    """`ID=VALUE`."""

    name = "ID=VALUE"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        token, _, bias = str(value).partition("=")
        try:
            return int(token), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not a token id and a number, as in 42=-1.5", param, ctx)


_MODELS = (
    click.option("--target", required=True, help="Folder or Hugging Face hub id of the target."),
    click.option("--drafter", help="Folder or hub id of the drafter; without it, plain decoding."),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "bfloat16"]),
        help="Of weights and activations. [default: float32 on CPU, else as stored]",
    ),
)
_DRAFTING = (
    click.option(
        "--num-speculative-tokens",
        "-k",
        type=int,
        help="Drafts per round. [default: 5, or fewer if the head was trained for fewer]",
    ),
    click.option(
        "--drafting",
        type=click.Choice(["auto", "parallel", "autoregressive"]),
        default="auto",
        show_default=True,
        help="All drafts in one pass (P-EAGLE), or one after the other (EAGLE-3).",
    ),
    click.option(
        "--draft-sampling",
        type=click.Choice(["greedy", "sample"]),
        default="greedy",
        show_default=True,
        help="Draft what is most likely, or draw drafts of sampled answers.",
    ),
)
# Named as the fields of SamplingParams.
_SAMPLING = (
    click.option("--temperature", type=float, help="0 is greedy. [default: 0]"),
    click.option("--top-k", type=int, help="Keep the k most likely tokens. [default: all]"),
    click.option("--top-p", type=float, help="Keep tokens of this probability. [default: 1]"),
    click.option(
        "--min-p", type=float, help="Drop tokens below this share of the likeliest. [default: 0]"
    ),
    click.option(
        "--repetition-penalty", type=float, help="Of tokens in prompt or answer. [default: 1]"
    ),
    click.option("--presence-penalty", type=float, help="Of tokens in the answer. [default: 0]"),
    click.option(
        "--frequency-penalty", type=float, help="For each time in the answer. [default: 0]"
    ),
    click.option(
        "--logit-bias", type=_TokenBias(), multiple=True, help="Add to a logit. Repeatable."
    ),
    click.option(
        "--allowed-token-id",
        "allowed_token_ids",
        type=int,
        multiple=True,
        help="Generate no other tokens. Repeatable.",
    ),
    click.option(
        "--bad-token-id",
        "bad_token_ids",
        type=int,
        multiple=True,
        help="Never generate it. Repeatable.",
    ),
    click.option("--min-new-tokens", type=int, help="No EOS or stop token before. [default: 0]"),
    click.option("--seed", type=int, help="Of the random numbers. [default: drawn; of `data`, 0]"),
    click.option("--stop", multiple=True, help="Text that ends the answer. Repeatable."),
    click.option("--include-stop-str-in-output", is_flag=True, help="Do not cut it off."),
    click.option(
        "--stop-token-id",
        "stop_token_ids",
        type=int,
        multiple=True,
        help="Token that ends the answer. Repeatable.",
    ),
    click.option("--ignore-eos", is_flag=True, help="EOS tokens do not end the answer."),
)


def model_options(command: Command) -> Command:
    """Adds `--target`, `--drafter`, `--dtype` and how to draft."""
    return _with((*_MODELS, *_DRAFTING), command)


def sampling_options(command: Command) -> Command:
    """Adds the fields of `SamplingParams`; the command gets them as one argument, `sampling`."""

    @functools.wraps(command)
    def with_params(**options: Any) -> Any:
        given = {
            name: options.pop(name)
            for name in [field.name for field in dataclasses.fields(peagle_jax.SamplingParams)]
            if name in options
        }
        # What was not given is None, False or empty; 0 was given.
        for name, value in list(given.items()):
            if value is None or value is False or value == ():
                del given[name]
        if "logit_bias" in given:
            given["logit_bias"] = dict(given["logit_bias"])
        return command(**options, sampling=sampling_params(given))

    return _with(_SAMPLING, with_params)


def sampling_params(
    given: Mapping[str, Any], base: peagle_jax.SamplingParams | None = None
) -> peagle_jax.SamplingParams:
    """Returns `base` with what was given in place of its fields.

    Raises:
      ClickException: a name is unknown or a value out of range.
    """
    names = {field.name for field in dataclasses.fields(peagle_jax.SamplingParams)}
    if unknown := sorted(set(given) - names):
        raise click.ClickException(
            f"unknown sampling parameter {unknown[0]!r}; there are {', '.join(sorted(names))}"
        )
    try:
        return dataclasses.replace(base or peagle_jax.SamplingParams(), **given)
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def load_models(
    target: str, drafter: str | None, dtype: str | None
) -> tuple[LoadedTarget, LoadedDrafter | None]:
    """Loads what `model_options` names, and keeps programs that are compiled from now on.

    The persistent compilation cache makes a second run start faster.
    """
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    model = peagle_jax.load_target(target, dtype=dtype)
    if drafter is None:
        return model, None
    layers = model.config.num_layers
    return model, peagle_jax.load_drafter(drafter, dtype=dtype, target_layers=layers)


@contextlib.contextmanager
def user_errors(*more: type[Exception]) -> Iterator[None]:
    """Shows errors that the user can mend, `ValueError` and others named, as one message."""
    errors: tuple[type[Exception], ...] = (ValueError, *more)
    try:
        yield
    except errors as error:
        raise click.ClickException(str(error)) from error


def _with(options: tuple[Command, ...], command: Command) -> Command:
    for option in reversed(options):  # as stacked decorators apply
        command = option(command)
    return command
