"""Regular expressions of Python, written again for the regex engine of pydantic, which never backtracks.

Python's own engine never ends for some expressions. Here Python's parser reads an expression, and it is written again
from what the parser found. It is meant for module paths, which are ASCII letters, digits, underscores and dots, so a
set of characters is written as those of these that it has.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from string import ascii_letters, digits
from typing import Any

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


class InvalidRegexError(ValueError):
    """Python cannot read the expression either."""


class UnsupportedRegexError(ValueError):
    """The expression cannot be matched in linear time, or is too large."""


Token = tuple[Any, Any]
"""Part of an expression as Python's parser gives it: its kind and its operands."""


def path_matcher(expression: str) -> Callable[[str], bool]:
    """Make a function that tells if the beginning of a module path matches an expression, in linear time.

    Raises:
        InvalidRegexError, UnsupportedRegexError: The expression is refused; the message says what it is.
    """
    from pydantic_core import (
        SchemaError,
        SchemaValidator,
        core_schema,
    )  # the engine starts without it

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parsed = sre_parser.parse(expression)
    except (re.error, OverflowError) as error:
        raise InvalidRegexError(
            f"no regular expression of Python: {getattr(error, 'msg', error)}"
        ) from None
    schema = core_schema.str_schema(
        pattern=f"^(?:{_written(parsed, False)})", regex_engine="rust-regex"
    )
    try:
        return SchemaValidator(schema).isinstance_python
    except SchemaError:
        raise UnsupportedRegexError("too large a regular expression") from None


def _written(tokens: Iterable[Token], ignores_case: bool) -> str:
    return "".join(_write(token, ignores_case) for token in tokens)


def _write(token: Token, ignores_case: bool) -> str:
    kind, value = token
    if kind in _NOT_LINEAR:
        raise UnsupportedRegexError(f"{_NOT_LINEAR[kind]}, which takes more than linear time")
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
            raise UnsupportedRegexError(f"a regular expression of more than {MAX_REPEATS} repeats")
        return f"(?:{_written(tokens, ignores_case)}){{{least},{'' if most is sre.MAXREPEAT else most}}}"
    if kind is sre.NOT_LITERAL:
        return _character_class([(sre.NEGATE, None), (sre.LITERAL, value)], ignores_case)
    return _character_class(value if kind is sre.IN else [token], ignores_case)


def _character_class(members: Sequence[Token], ignores_case: bool) -> str:
    if ignores_case and any(
        kind is not sre.CATEGORY and _largest(value) > _LAST_ASCII for kind, value in members
    ):
        raise UnsupportedRegexError(
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
