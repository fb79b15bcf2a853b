"""Reading a foreign config key by key, so that none is overlooked.

A key that nobody takes is an error: what a config says and the converter does not know could
change what the model computes.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from peagle_jax.convert.errors import ConvertError, listed


class Keys:
    """The keys of one JSON object that are still to be taken.

    A key whose value is null counts as absent.

    Args:
      values: the object.
      where: file (and place in it) for the messages.
    """

    def __init__(self, values: Any, where: str):
        if not isinstance(values, Mapping):
            raise ConvertError(f"{where} must be a JSON object, got {_shown(values)}")
        self.where = where
        self._left: dict[str, Any] = dict(values)

    def take(self, key: str) -> Any:
        """Takes a key and returns its value of whatever type, None if it is absent."""
        return self._left.pop(key, None)

    def peek(self, key: str) -> Any:
        """Returns a key's value, None if it is absent, without taking it."""
        return self._left.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """Takes an integer; without a default the key must be there.

        Raises:
          ConvertError: it is absent or of another type.
        """
        value = self.integer_or_none(key)
        return self._present(key, default) if value is None else value

    def integer_or_none(self, key: str) -> int | None:
        """Takes an integer or null.

        Raises:
          ConvertError: it is of another type.
        """
        value = self.take(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, value, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Takes a finite number; without a default the key must be there.

        Raises:
          ConvertError: it is absent or of another type.
        """
        value = self.take(key)
        if value is None:
            return self._present(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise self.error(key, value, "a finite number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Takes true or false; without a default the key must be there.

        Raises:
          ConvertError: it is absent or of another type.
        """
        value = self.take(key)
        if value is None:
            return self._present(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def integers(self, key: str) -> tuple[int, ...] | None:
        """Takes a list of integers, a single one, or null.

        Raises:
          ConvertError: it is of another type.
        """
        value = self.take(key)
        if value is None:
            return None
        every = value if isinstance(value, list) else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) for v in every):
            raise self.error(key, value, "an integer or a list of integers")
        return tuple(every)

    def only(self, key: str, *allowed: Any) -> None:
        """Takes a key that may be absent but else must hold one of `allowed`.

        Raises:
          ConvertError: it holds something else.
        """
        value = self.take(key)
        if value is not None and not any(type(value) is type(a) and value == a for a in allowed):
            raise self.error(key, value, " or ".join(map(_shown, allowed)) or "absent")

    def ignore(self, keys: Iterable[str]) -> None:
        """Takes keys that have no influence on what the model computes."""
        for key in keys:
            self._left.pop(key, None)

    def nested(self, key: str) -> "Keys":
        """Takes an object (empty where the key is absent) to be read in its turn.

        Raises:
          ConvertError: it is no object.
        """
        value = self.take(key)
        return Keys({} if value is None else value, f"{self.where}: {key}")

    def done(self) -> None:
        """Checks that every key was taken.

        Raises:
          ConvertError: some were not; it names them and their values.
        """
        if self._left:
            left = listed(f"{key} = {_shown(value)}" for key, value in sorted(self._left.items()))
            raise ConvertError(f"{self.where}: keys that this release does not know: {left}")

    def error(self, key: str, value: Any, expected: str) -> ConvertError:
        """Returns the error about a key's value."""
        return ConvertError(f"{self.where}: {key} is {_shown(value)}, supported is {expected}")

    def _present[T](self, key: str, value: T | None) -> T:
        if value is None:
            raise ConvertError(f"{self.where}: {key} is missing")
        return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
