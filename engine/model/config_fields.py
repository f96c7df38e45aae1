"""Typed reading of a `config.json`. It remembers the keys that were read, so that no key is silently ignored."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from manylora.errors import ConfigError

T = TypeVar("T")
MAX_INTEGER = 1 << 31
"""Largest whole number that a config may have; every size of a model is far smaller."""
MIN_NUMBER = 1e-30
MAX_NUMBER = 1e15
HARMLESS_PREFIXES = ("_", "unsloth")
"""Keys with these prefixes are notes of tools."""

MAX_SHOWN = 200
"""Largest number of characters of a key or value in a message."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def shown(value: object) -> str:
    """A value of a file for a message: one line, cut if it is long."""
    return _SHORT.repr(value)[:MAX_SHOWN]


class ConfigFields:
    """The keys of one JSON object.

    Args:
        given: The object as the file has it. A null counts as absent.
        defaults: Values for absent keys.
        prefix: Text before key names in messages, for a nested object.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        *,
        prefix: str = "",
    ) -> None:
        self._given = given
        self._defaults = defaults or {}
        self._prefix = prefix
        self._read: set[str] = set()

    def integer(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MAX_INTEGER
    ) -> int:
        """A whole number within these bounds; without a default the key is required."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            bounds = f">= {minimum}" if maximum == MAX_INTEGER else f"from {minimum} to {maximum}"
            raise self.error(key, f"expected a whole number {bounds}, got {shown(value)}")
        return value

    def optional_integer(self, key: str) -> int | None:
        """A whole number of at least 1; None if the file has null. An absent key takes the architecture's default."""
        self._read.add(key)
        if key in self._given and self._given[key] is None:
            return None
        return self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0; without a default the key is required."""
        value = self._get(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not MIN_NUMBER <= value <= MAX_NUMBER
        ):
            raise self.error(
                key, f"expected a number above 0 and up to {MAX_NUMBER:g}, got {shown(value)}"
            )
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A number above 0; None if absent."""
        self._read.add(key)
        return None if self._given.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, got {shown(value)}")
        return value

    def text(self, key: str) -> str | None:
        """A string; None if absent."""
        return self._optional(key, str, "a string")

    def texts(self, key: str) -> list[str] | None:
        """A list of strings; None if absent."""
        value = self._optional(key, list, "a list of strings")
        if not all(isinstance(item, str) for item in value or []):
            raise self.error(key, f"expected a list of strings, got {shown(value)}")
        return value

    def nested(self, key: str) -> dict[str, Any]:
        """A JSON object; empty if absent."""
        return self._optional(key, dict, "an object") or {}

    def pair(self, key: str) -> tuple[int, int] | None:
        """Two whole numbers of at least 1; None if absent."""
        match self._optional(key, list, "two whole numbers"):
            case None:
                return None
            case [int(first), int(second)] if (
                1 <= min(first, second) <= max(first, second) <= MAX_INTEGER
            ):
                return first, second
        raise self.error(key, f"expected two whole numbers >= 1, got {shown(self._given[key])}")

    def within(self, key: str) -> ConfigFields:
        """Fields of a nested object; an absent object has none."""
        return ConfigFields(self.nested(key), prefix=f"{self._prefix}{key}.")

    def choice(self, key: str, served: Collection[T], default: T | None = None) -> T:
        """One of the values that are served; without a default the key is required."""
        value: T = self._get(key, default)
        if not any(value == each and type(value) is type(each) for each in served):
            raise self.error(
                key, f"{shown(value)} is not served; served are {', '.join(map(str, served))}"
            )
        return value

    def require(self, key: str, expected: object, *, default: object) -> None:
        """Refuse every value but the one that is served."""
        value = self._get(key, default)
        if value != expected:
            raise self.error(key, f"only {shown(expected)} is served, got {shown(value)}")

    def refuse_unread(self, without_effect: Collection[str]) -> None:
        """Refuse keys that were not read, unless they are known to have no effect or are switched off.

        Raises:
            ConfigError: A key might change the result; the message names it.
        """
        for key in sorted(set(self._given) - self._read - set(without_effect)):
            if self._given.get(key) and not key.startswith(HARMLESS_PREFIXES):
                raise self.error(
                    key,
                    f"not understood (value {shown(self._given[key])}); if it does not change the result, remove it "
                    "from config.json",
                )

    def error(self, key: str, problem: str) -> ConfigError:
        """An error about one key."""
        name = (self._prefix + key)[:MAX_SHOWN]
        return ConfigError(f"{name}: {problem}", param=name)

    def _get(self, key: str, default: object) -> Any:  # noqa: ANN401 - JSON
        self._read.add(key)
        value = self._given.get(key)
        if value is None:
            value = self._defaults.get(key, default)
        if value is None:
            raise self.error(key, "missing in config.json")
        return value

    def _optional(self, key: str, kind: type[T], expected: str) -> T | None:
        self._read.add(key)
        value = self._given.get(key)
        if value is not None and not isinstance(value, kind):
            raise self.error(key, f"expected {expected}, got {shown(value)}")
        return value
