"""The one exception of the converter."""

from collections.abc import Iterable


class ConvertError(ValueError):
    """A checkpoint cannot be converted; the message names the file, key or tensor."""


def listed(problems: Iterable[str], most: int = 20) -> str:
    """Joins problems into one line, cutting a long list but saying how much was cut."""
    every = list(problems)
    shown = "; ".join(every[:most])
    return shown if len(every) <= most else f"{shown}; and {len(every) - most} more"
