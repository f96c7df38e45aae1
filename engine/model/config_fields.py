"""Typed reading of a `config.json` that remembers which keys were read, so that none is silently ignored."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from manylora.errors import ConfigError

T = TypeVar("T")
HARMLESS_PREFIXES = ("_", "unsloth")
"""Keys with these prefixes are notes of tools."""


class ConfigFields:
    """The keys of one JSON object.

    Args:
        given: The object as the file has it; a null counts as absent.
        defaults: Values for absent keys.
        prefix: Written before key names in messages, for a nested object.
    """

    def __init__(
        self, given: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, *, prefix: str = ""
    ) -> None:
        self._given = given
        self._defaults = defaults or {}
        self._prefix = prefix
        self._read: set[str] = set()

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number of at least `minimum`; without a default the key is required."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(key, f"expected a whole number >= {minimum}, got {value!r}")
        return value

    def optional_integer(self, key: str) -> int | None:
        """A whole number of at least 1, or None where the file says null; absent takes the architecture's default."""
        self._read.add(key)
        if key in self._given and self._given[key] is None:
            return None
        return self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; without a default the key is required."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            raise self.error(key, f"expected a number above 0, got {value!r}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number above 0, or None where absent."""
        self._read.add(key)
        return None if self._given.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, got {value!r}")
        return value

    def text(self, key: str) -> str | None:
        """A string, or None where absent."""
        return self._optional(key, str, "a string")

    def texts(self, key: str) -> list[str] | None:
        """A list of strings, or None where absent."""
        value = self._optional(key, list, "a list of strings")
        if not all(isinstance(item, str) for item in value or []):
            raise self.error(key, f"expected a list of strings, got {value!r}")
        return value

    def nested(self, key: str) -> dict[str, Any]:
        """A JSON object, empty where absent."""
        return self._optional(key, dict, "an object") or {}

    def pair(self, key: str) -> tuple[int, int] | None:
        """Two whole numbers of at least 1, or None where absent."""
        match self._optional(key, list, "two whole numbers"):
            case None:
                return None
            case [int(first), int(second)] if min(first, second) >= 1:
                return first, second
        raise self.error(key, f"expected two whole numbers >= 1, got {self._given[key]!r}")

    def within(self, key: str) -> ConfigFields:
        """The fields of a nested object, which has none where it is absent."""
        return ConfigFields(self.nested(key), prefix=f"{self._prefix}{key}.")

    def choice(self, key: str, served: Collection[T], default: T | None = None) -> T:
        """One of the values that are served; without a default the key is required."""
        value: T = self._get(key, default)
        if value not in served:
            raise self.error(key, f"{value!r} is not served; served are {', '.join(map(str, served))}")
        return value

    def require(self, key: str, expected: object, *, default: object) -> None:
        """Refuse any value but the one that is served."""
        value = self._get(key, default)
        if value != expected:
            raise self.error(key, f"only {expected!r} is served, got {value!r}")

    def refuse_unread(self, without_effect: Collection[str]) -> None:
        """Refuse keys that were not read, unless they are known to be without effect or are switched off.

        Raises:
            ConfigError: A key might change the result; the message names it.
        """
        for key in sorted(set(self._given) - self._read - set(without_effect)):
            if self._given.get(key) and not key.startswith(HARMLESS_PREFIXES):
                raise self.error(
                    key,
                    f"not understood (value {self._given[key]!r}); if it does not change the result, remove it "
                    "from config.json",
                )

    def error(self, key: str, problem: str) -> ConfigError:
        """An error about one key."""
        return ConfigError(f"{self._prefix}{key}: {problem}", param=f"{self._prefix}{key}")

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
            raise self.error(key, f"expected {expected}, got {value!r}")
        return value
