r"""Matches module paths with the keys of `rank_pattern` and `alpha_pattern` as PEFT does, in time linear in the path.

PEFT runs `re.match(rf"(.*\.)?({key})$", path)`, which never ends for some keys. Here Python's parser reads that
expression, and it is written again for the regex engine of pydantic, which never backtracks. Module paths are ASCII
letters, digits, underscores and dots, so a set of characters is written as those of these that it has.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from string import ascii_letters, digits
from typing import Any

from manylora.adapters.checkpoint.peft_fields import is_literal_path

MAX_KEY_LENGTH = 1024
MAX_GROUPS = 100
MAX_REPEATS = 1000
_ALPHABET = ascii_letters + digits + "_."
_LAST_ASCII = 127
_NOTHING = "[a&&b]"
_ANCHORS = {
    sre.AT_BEGINNING: "^",
    sre.AT_BEGINNING_STRING: "^",
    sre.AT_END: "$",
    sre.AT_END_STRING: "$",
    sre.AT_BOUNDARY: r"(?-u:\b)",
    sre.AT_NON_BOUNDARY: r"(?-u:\B)",
}
_CATEGORIES = {
    sre.CATEGORY_DIGIT: digits,
    sre.CATEGORY_NOT_DIGIT: ascii_letters + "_.",
    sre.CATEGORY_WORD: ascii_letters + digits + "_",
    sre.CATEGORY_NOT_WORD: ".",
    sre.CATEGORY_SPACE: "",
    sre.CATEGORY_NOT_SPACE: _ALPHABET,
}
_NOT_LINEAR = {
    sre.GROUPREF: "a regular expression with a reference back",
    sre.GROUPREF_EXISTS: "a regular expression with a condition on a group",
    sre.ASSERT: "a regular expression that looks ahead or behind",
    sre.ASSERT_NOT: "a regular expression that looks ahead or behind",
    sre.ATOMIC_GROUP: "a regular expression with an atomic group",
    sre.POSSESSIVE_REPEAT: "a regular expression with a possessive repeat",
}


class InvalidKeyError(ValueError):
    """PEFT cannot use the key either."""


class UnsupportedKeyError(ValueError):
    """The key cannot be matched in linear time, or is too large."""


Matcher = Callable[[str], bool]
Token = tuple[Any, Any]
"""Part of an expression as Python's parser gives it: its kind and its operands."""


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


def matcher(key: str) -> Matcher | None:
    """Make a function that tells if a path matches the key; None if the key is literal, a path or the end of one.

    Raises:
        InvalidKeyError, UnsupportedKeyError: The key is refused; the message does not name the key itself.
    """
    if is_literal_path(key.removeprefix("^")):
        return None
    from pydantic_core import (
        SchemaError,
        SchemaValidator,
        core_schema,
    )  # the engine starts without it

    if len(key) > MAX_KEY_LENGTH or key.count("(") > MAX_GROUPS:
        raise UnsupportedKeyError(
            f"longer than {MAX_KEY_LENGTH} characters, or has more than {MAX_GROUPS} groups"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = sre_parser.parse(rf"(.*\.)?({key})$")
    except (re.error, OverflowError) as error:
        raise InvalidKeyError(
            f"no regular expression of Python: {getattr(error, 'msg', error)}"
        ) from None
    schema = core_schema.str_schema(
        pattern=f"^(?:{_written(parsed, False)})", regex_engine="rust-regex"
    )
    try:
        return SchemaValidator(schema).isinstance_python
    except SchemaError:
        raise UnsupportedKeyError("too large a regular expression") from None


def _endings(path: str) -> list[str]:
    """Literal keys that match a path."""
    parts = path.split(".")
    return [f"^{path}", *(".".join(parts[start:]) for start in range(len(parts)))]


def _written(tokens: Iterable[Token], ignores_case: bool) -> str:
    return "".join(_write(token, ignores_case) for token in tokens)


def _write(token: Token, ignores_case: bool) -> str:
    kind, value = token
    if kind in _NOT_LINEAR:
        raise UnsupportedKeyError(f"{_NOT_LINEAR[kind]}, which takes more than linear time")
    if kind is sre.AT:
        return _ANCHORS[value]
    if kind is sre.BRANCH:
        return f"(?:{'|'.join(_written(branch, ignores_case) for branch in value[1])})"
    if kind is sre.SUBPATTERN:
        _, added, removed, tokens = value
        return (
            f"(?:{_written(tokens, bool((ignores_case or added & re.I) and not removed & re.I))})"
        )
    if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        least, most, tokens = value
        if max(least, 0 if most is sre.MAXREPEAT else most) > MAX_REPEATS:
            raise UnsupportedKeyError(f"a regular expression of more than {MAX_REPEATS} repeats")
        return f"(?:{_written(tokens, ignores_case)}){{{least},{'' if most is sre.MAXREPEAT else most}}}"
    if kind is sre.NOT_LITERAL:
        return _character_class([(sre.NEGATE, None), (sre.LITERAL, value)], ignores_case)
    return _character_class(value if kind is sre.IN else [token], ignores_case)


def _character_class(members: Sequence[Token], ignores_case: bool) -> str:
    if ignores_case and any(
        kind is not sre.CATEGORY and _largest(value) > _LAST_ASCII for kind, value in members
    ):
        raise UnsupportedKeyError(
            "a regular expression with letters outside ASCII whose case is ignored"
        )
    negated = members[0][0] is sre.NEGATE
    found = [
        character
        for character in _ALPHABET
        if negated
        != any(
            _has(member, spelled)
            for member in members[negated:]
            for spelled in ({character.lower(), character.upper()} if ignores_case else {character})
        )
    ]
    return f"[{''.join(found)}]" if found else _NOTHING


def _largest(value: tuple[int, int] | int | None) -> int:
    return max(value, default=0) if isinstance(value, tuple) else value or 0


def _has(member: Token, character: str) -> bool:
    kind, value = member
    if kind is sre.CATEGORY:
        return character in _CATEGORIES[value]
    if kind is sre.RANGE:
        return bool(value[0] <= ord(character) <= value[1])
    return kind is sre.ANY or ord(character) == value
