"""Errors of grammars in Manylora's words. Messages of llguidance name its own parts and quote our grammar."""

from __future__ import annotations

import re
from collections.abc import Sequence

TOO_COMPLEX = (
    "it takes too long to read. Use fewer properties, alternatives and allOf, and simpler patterns"
)
_Texts = Sequence[tuple[str, str]]
"""Regular expressions for messages of llguidance, each with its meaning. The first match counts."""

_OF_PATTERNS: _Texts = (
    (r"look-?around", "look-ahead and look-behind are not taken in regular expressions"),
    (r"back-?references", "back references are not taken in regular expressions"),
    (
        r"unclosed group|unopened group",
        "a regular expression in it has a parenthesis without its other half",
    ),
    (r"unclosed character class", "a regular expression in it has a bracket that is not closed"),
    (
        r"repetition|decimal literal",
        "a regular expression in it repeats nothing, or not as {least,most} says",
    ),
    (
        r"class range",
        "a regular expression in it has a range of characters that ends before it begins",
    ),
    (
        r"Unicode property|Unicode class",
        "a regular expression in it names a class of characters that is not known",
    ),
    (
        r"escape sequence|incomplete escape",
        "a regular expression in it has a backslash before what needs none",
    ),
    (
        r"regex parse error|invalid regex|[Rr]egex.*(error|failed)",
        "it has a regular expression that is none",
    ),
)
_OF_SIZE = (
    r"takes too long|panic|fuel|too (large|many|complex|big|deep)|limit|exceed|stack|TooComplex|MaxTokens|overflow",
    TOO_COMPLEX,
)
_OF_SCHEMAS: _Texts = (
    (
        r"circular references",
        "a $ref leads back to itself and has other keywords beside it. Move them into an object",
    ),
    (r"not disjoint", "two of patternProperties may match one name. Make them exclude each other"),
    (r"min/maxProperties", "counts of properties work only where all of properties are required"),
    (
        r"minLength.*maxLength|minItems.*maxItems|greater than",
        "a minimum in it is above its maximum",
    ),
    (r"Regex is empty", "no string fits its pattern, format and lengths together"),
    (r"[Uu]nsatisfiable|NoExtension", "no value fits it"),
    *_OF_PATTERNS,
    _OF_SIZE,
)
_OF_GRAMMARS: _Texts = (
    *_OF_PATTERNS,
    (r"NoExtension", "no text fits it"),
    (r'unknown name: "(\w{1,40})"', r"\1 is used, but no rule or terminal has this name"),
    (r'duplicate \w+: "(\w{1,40})"', r"\1 is defined twice"),
    (r'circular reference in token "(\w{1,40})"', r"the terminal \1 leads back to itself"),
    (r"no start rule|Empty grammar", "it has no rule named start"),
    (r"only supported for tokens", "& and ~ join terminals only, whose names are in capitals"),
    (r"range end must be", "a repetition in it ends before it begins"),
    (r"special token|[Tt]oken range", "it names a token that this model does not have"),
    (r"unknown grammar", "it names another grammar with @, and there is none"),
    (r"%\w+", "a line in it that begins with % is not as it must be"),
    _OF_SIZE,
)
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\)")


def schema_problem(raw: str) -> str:
    """Translate a message of llguidance about a schema."""
    return _translated(raw, _OF_SCHEMAS) or "answers cannot be held to it"


def grammar_problem(raw: str, *, has_lines: bool = True) -> str:
    """Translate a message of llguidance about a client's grammar or pattern.

    Args:
        raw: The message.
        has_lines: True if the client wrote the lines that the message counts.
    """
    problem = _translated(raw, _OF_GRAMMARS) or "it cannot be read"
    place = _PLACE.match(raw) if has_lines else None
    return problem if place is None else f"line {place[1]}, column {place[2]}: {problem}"


def _translated(raw: str, texts: _Texts) -> str | None:
    head = raw.partition("\n   1 |")[0].partition("\n<state>")[0].partition("<backtrace>")[0]
    for pattern, meaning in texts:
        if (found := re.search(pattern, head)) is not None:
            return found.expand(meaning)
    return None
