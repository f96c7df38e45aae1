"""JSON from strangers. Documents that two readers could understand differently, or that take long to read, are refused.

Knows nothing of the meaning of a document; callers give each refusal their own code. `loads` refuses everything itself.
`parse` leaves numbers out of range and lone surrogates to its callers, which name the field.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

import orjson

MAX_DEPTH = 128
"""Largest depth of nested arrays and objects. Writers of JSON fail at some hundreds."""
MAX_INT = 1 << 53
"""Largest integer that every JSON reader keeps exactly."""
MAX_SHOWN = 96
"""Largest number of characters of a value in a message."""
_REASONS = {
    "surrogate": "a lone surrogate",
    "UTF-8": "bytes that are not UTF-8, or a byte order mark",
    "infinity": "a number out of range",
    "end of data": "an early end",
    "control character": "a control character in a string",
}
"""Our reason for a refusal of orjson, by orjson's words."""
_BEYOND = 10**20
_LONGEST_INT = 20
_LONGEST_FLOAT = 400
STRING = re.compile(rb'"(?:[^"\\]|\\.)*+\\?(?:"|\Z)', re.DOTALL)
"""Pattern of a string. It also matches a string without an end: to fail at each of many quotes would be quadratic."""
_BRACKET = re.compile(rb"[][{}]")


class JsonRefusedError(ValueError):
    """The document is not acceptable JSON."""


class TooDeepError(JsonRefusedError):
    """Arrays and objects are nested too deeply."""


class DuplicateKeyError(JsonRefusedError):
    """An object has two entries with one name."""


def check_depth(raw: bytes, max_depth: int) -> None:
    """Refuse more than `max_depth` open brackets at once, without parsing.

    Raises:
        TooDeepError: The document is nested more deeply.
    """
    depth = 0
    for bracket in _BRACKET.finditer(STRING.sub(b"", raw)):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > max_depth:
            raise TooDeepError(f"nested more than {max_depth} levels deep")


def loads(raw: bytes | str) -> Any:  # noqa: ANN401 - whatever the document holds
    """Parse JSON in UTF-8 without a byte order mark.

    Duplicate keys, NaN and Infinity, numbers beyond a float's range, lone surrogates, more than `MAX_DEPTH` levels, and
    text after the document are refused. Integers keep all their digits.

    Raises:
        JsonRefusedError: It is no such document; TooDeepError and DuplicateKeyError for these two cases.
    """
    try:
        found = orjson.loads(raw)  # orjson checks Unicode and numbers, but not duplicate keys
        _check_levels(found)
        return json.loads(raw, object_pairs_hook=_unique)
    except RecursionError:
        raise TooDeepError(f"nested more than {MAX_DEPTH} levels deep") from None
    except orjson.JSONDecodeError as error:
        if "depth" in error.msg:
            raise TooDeepError(f"nested more than {MAX_DEPTH} levels deep") from None
        reason = next(
            (ours for theirs, ours in _REASONS.items() if theirs in error.msg), "unexpected text"
        )
        raise JsonRefusedError(f"{reason} at character {error.pos}") from None


def _check_levels(value: object) -> None:
    level = [value]
    depth = 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise TooDeepError(f"nested more than {MAX_DEPTH} levels deep")
        level = [
            child for each in level for child in (each.values() if isinstance(each, dict) else each)
        ]


def parse(raw: bytes, max_depth: int) -> object:
    """Parse UTF-8 JSON without a byte order mark.

    NaN, Infinity and too long or too large numbers become non-finite floats, integers of more than 20 digits become
    plus or minus 10**20. Callers that check ranges refuse them by name.

    Args:
        raw: The document. The caller bounds its size.
        max_depth: Largest number of open brackets at once.

    Raises:
        JsonRefusedError: It is not JSON; TooDeepError and DuplicateKeyError for these two cases.
    """
    check_depth(raw, max_depth)
    try:
        text = raw.decode("utf-8")
        return json.loads(
            text,
            object_pairs_hook=_unique,
            parse_int=_bounded_int,
            parse_float=_bounded_float,
            parse_constant=float,
        )
    except UnicodeDecodeError:
        raise JsonRefusedError("not UTF-8") from None
    except json.JSONDecodeError as error:
        reason = "an early end" if error.pos >= len(error.doc.rstrip()) else "unexpected text"
        raise JsonRefusedError(f"{reason} at character {error.pos}") from None


def shown(value: object) -> str:
    """A value from a stranger as printable ASCII of bounded length, for messages."""
    text = ascii(value)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def named(text: str) -> str:
    """A name from a stranger: unchanged if it is short and printable, otherwise as `shown` prints it."""
    return text if len(text) <= MAX_SHOWN and text.isascii() and text.isprintable() else shown(text)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise DuplicateKeyError(f"{shown(repeated)} is there twice")
    return entries


def _bounded_int(digits: str) -> int:
    if len(digits) <= _LONGEST_INT:
        return int(digits)
    return -_BEYOND if digits.startswith("-") else _BEYOND


def _bounded_float(digits: str) -> float:
    return float(digits) if len(digits) <= _LONGEST_FLOAT else math.nan
