r"""Matches module paths with the keys of `rank_pattern` and `alpha_pattern` as PEFT does, in time linear in the path.

PEFT runs `re.match(rf"(.*\.)?({key})$", path)`: a key is a regular expression, at the end of a path and after a dot.
Python's engine never ends for some keys; `linear_regex` matches them without it.

A key is literal if it means the same when it is read letter by letter, although a dot in it stands for any character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from manylora.adapters.base_shape import MODULE_PATHS
from manylora.adapters.checkpoint.findings import refuse, refuse_unsupported
from manylora.adapters.checkpoint.linear_regex import (
    InvalidRegexError,
    UnsupportedRegexError,
    path_matcher,
)
from manylora.strict_json import named, shown

MAX_KEY_LENGTH = 1024
MAX_GROUPS = 100
MAX_LITERAL = 256
"""Largest length of a literal key."""
_LITERAL = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*")
_DIGIT = "#"
_LAYERS = ("layers.", "model.layers.", "language_model.layers.", "model.language_model.layers.")
_HEADS = ("", *_LAYERS, "language_model.model.layers.")

Matcher = Callable[[str], bool]


class ModulePatterns:
    """Keys of a pattern in its order; the first that matches a path counts.

    Args:
        matchers: Result of `matcher` for each key.
    """

    def __init__(self, matchers: Mapping[str, Matcher | None]) -> None:
        self._places = {key: place for place, key in enumerate(matchers)}
        self._regexes = {key: matches for key, matches in matchers.items() if matches is not None}
        self._found: dict[str, str | None] = {}

    @property
    def are_literal(self) -> bool:
        """True if each key is a path or the end of one, letter by letter."""
        return not self._regexes and not any(key.startswith("^") for key in self._places)

    def first(self, path: str) -> str | None:
        """The key that counts for a module."""
        if path not in self._found:
            self._found[path] = min(
                self._matching(path), key=self._places.__getitem__, default=None
            )
        return self._found[path]

    def unused(self, paths: Sequence[str]) -> list[str]:
        """Keys that match none of these modules."""
        literal = {ending for path in paths for ending in _endings(path)}
        return [
            key
            for key in self._places
            if (
                not any(map(self._regexes[key], paths))
                if key in self._regexes
                else key not in literal
            )
        ]

    def _matching(self, path: str) -> list[str]:
        literal = [
            key for key in _endings(path) if key in self._places and key not in self._regexes
        ]
        before = min((self._places[key] for key in literal), default=len(self._places))
        found = next(
            (
                key
                for key, is_in in self._regexes.items()
                if self._places[key] < before and is_in(path)
            ),
            None,
        )
        return literal if found is None else [found]


def matcher(pattern: str, key: str) -> Matcher | None:
    """Make a function that tells if a path matches a key; None if the key is literal, a path or the end of one.

    Args:
        pattern: Field with the key, `rank_pattern` or `alpha_pattern`.
        key: The key.

    Raises:
        AdapterFormatError: PEFT cannot use the key either (config.pattern_invalid).
        AdapterIncompatibleError: It might not be matched in linear time, or is too large (config.pattern_unsupported).
    """
    if is_literal_path(key.removeprefix("^")):
        return None
    param = named(f"{pattern}[{key}]")
    described = f"{pattern} has the key {shown(key)}; it is "
    simpler = "Name the modules in a simpler way."
    if len(key) > MAX_KEY_LENGTH or key.count("(") > MAX_GROUPS:
        described += (
            f"longer than {MAX_KEY_LENGTH} characters, or has more than {MAX_GROUPS} groups."
        )
        refuse_unsupported("config.pattern_unsupported", described, param, simpler)
    try:
        return path_matcher(rf"(.*\.)?({key})$")
    except InvalidRegexError as error:
        hint = "PEFT cannot load it either: correct the key."
        refuse("config.pattern_invalid", f"{described}{error}.", param, hint)
    except UnsupportedRegexError as error:
        refuse_unsupported("config.pattern_unsupported", f"{described}{error}.", param, simpler)


def _endings(path: str) -> list[str]:
    """Literal keys that match a path."""
    parts = path.split(".")
    return [f"^{path}", *(".".join(parts[start:]) for start in range(len(parts)))]


def is_literal_path(key: str) -> bool:
    """True if the key names modules by letters, digits, underscores and dots alone, and does so in PEFT too."""
    return (
        len(key) <= MAX_LITERAL and _LITERAL.fullmatch(key) is not None and not _is_ambiguous(key)
    )


def _is_ambiguous(key: str) -> bool:
    return "." in key and any(_matches_by_a_dot(key, ending) for ending in _path_endings(len(key)))


def _matches_by_a_dot(key: str, ending: str) -> bool:
    by_a_dot = False
    for ours, theirs in zip(key, ending, strict=True):
        if ours == "." and theirs != ".":
            by_a_dot = True
        elif ours != theirs and not (theirs == _DIGIT and ours.isdigit()):
            return False
    return by_a_dot


@lru_cache(maxsize=MAX_LITERAL)
def _path_endings(length: int) -> tuple[str, ...]:
    """Endings of this length of all module paths, at a dot; `#` is a digit of the layer number."""
    endings = []
    for path in MODULE_PATHS:
        for head in _HEADS:
            digits = length - len(head) - 1 - len(path)
            if digits >= 1:
                endings.append(f"{head}{_DIGIT * digits}.{path}")
        endings += [path, path.rsplit(".", 1)[1]]
    return tuple(ending for ending in endings if len(ending) == length)
