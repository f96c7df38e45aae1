r"""Patterns of JSON strings in a form that llguidance reads exactly.

Answers can write a control character only as `\b`, `\f`, `\n`, `\r` or `\t`. llguidance drops all others from a
pattern. If a class has all control characters, llguidance adds the quote and the backslash to it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_PIECE = re.compile(
    r"\\(?:[xuU]\{(?P<braced>[0-9A-Fa-f]+)\}|x(?P<x>[0-9A-Fa-f]{2})|u(?P<u>[0-9A-Fa-f]{4})|U(?P<U>[0-9A-Fa-f]{8})"
    r"|[pP](?:\{[^}]*\}|.)|.)|\[:\^?[a-z]+:\]|.",
    re.DOTALL,
)
WITHOUT_ESCAPE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Control characters whose only escape is `\\u`."""
_WITHOUT_LAST = r"&&[^\x1f]]"
_NAMED = {r"\a": "\a", r"\v": "\v"}


class ControlCharacterError(ValueError):
    """A pattern asks for a control character that answers cannot have."""


def held_pattern(pattern: str) -> str:
    """Rewrite the classes of a pattern so that llguidance allows exactly their characters.

    Raises:
        ControlCharacterError: The pattern asks for a control character that answers cannot have.
    """
    written: list[str] = []
    opened: list[re.Match[str]] = []
    depth = 0
    for piece in _PIECE.finditer(pattern):
        text = piece.group()
        if not depth and text != "[":
            if _is_control(piece):
                raise ControlCharacterError(pattern)
            written.append(_without_last(text) if text[:2] in (r"\p", r"\P") else text)
            continue
        before = [each.group() for each in opened[-2:]]
        is_first = before[-1:] == ["["] or before == ["[", "^"]
        opened.append(piece)
        depth += (text == "[") - (text == "]" and not is_first)
        if not depth:
            written.append(_held_class(opened))
            opened = []
    return "".join(written) + "".join(piece.group() for piece in opened)


def _held_class(pieces: Sequence[re.Match[str]]) -> str:
    text = "".join(piece.group() for piece in pieces)
    if text.endswith(_WITHOUT_LAST):  # written here before
        held_pattern(text[1:].removesuffix(_WITHOUT_LAST))
        return text
    if any(map(_is_control, pieces)):
        others = [each for each in pieces[1:-1] if not _is_control(each) and each.group() != "-"]
        if not others or "[" in text[1:] or re.search(r"&&|--|~~", text):
            raise ControlCharacterError(text)
    elif re.fullmatch(r"\[[^\^\\\[][^\\\[]*", text):
        return text
    return _without_last(text)


def _without_last(text: str) -> str:
    """A class without the last control character, so that it never has all of them."""
    return f"[{text}{_WITHOUT_LAST}"


def _is_control(piece: re.Match[str]) -> bool:
    digits = piece["braced"] or piece["x"] or piece["u"] or piece["U"]
    character = _NAMED.get(piece.group(), piece.group())
    if digits is not None:
        character = chr(min(int(digits, 16), 0x10FFFF))
    return WITHOUT_ESCAPE.fullmatch(character) is not None
