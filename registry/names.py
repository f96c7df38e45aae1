"""What may be stored: the checks at the registry's edge.

SQLite would keep text that PostgreSQL refuses, and the driver breaks on integers that need more than 64 bits; so
what a database could choke on is refused here, as the caller's mistake.
"""

from __future__ import annotations

import re

from weft.errors import InvalidRequestError, NotFoundError

MAX_INTEGER = (1 << 63) - 1
MAX_DESCRIPTION = 4096

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?")
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def is_name(text: str) -> bool:
    """Whether `text` can name a tenant, an adapter or an alias."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def check_name(text: str, param: str) -> str:
    """Return `text` if it can be a name.

    Raises:
        InvalidRequestError: It cannot; the message states the rule.
    """
    if not isinstance(text, str) or not is_name(text):
        raise InvalidRequestError(
            f"{param} must be 1 to 63 lower-case letters, digits, dots, underscores or hyphens, "
            "start and end with a letter or digit, and not contain two dots in a row.",
            param=param,
        )
    return text


def check_alias(text: str) -> str:
    """Return `text` if it can be an alias: a name that cannot be taken for a version number.

    Raises:
        InvalidRequestError: It cannot.
    """
    check_name(text, "aliases")
    if text.isdigit():
        raise InvalidRequestError("An alias must not be a number: those are versions.", param="aliases")
    return text


def no_such(kind: str, name: str, param: str | None = None) -> NotFoundError:
    """The error for a name or id that does not exist; the message repeats it."""
    return NotFoundError(f"There is no {kind} `{shown(name)}`.", param=param)


def shown(text: str) -> str:
    """`text` as a message may repeat it: printable ASCII of at most 200 characters."""
    return text.encode("unicode_escape").decode()[:200]


def check_text(text: str, param: str, max_length: int) -> str:
    """Return `text` if every database stores it.

    Raises:
        InvalidRequestError: It is no text, is too long, or holds a NUL or half a surrogate pair.
    """
    if not isinstance(text, str) or len(text) > max_length:
        raise InvalidRequestError(f"{param} must be text of at most {max_length} characters.", param=param)
    if _UNSTORABLE.search(text):
        raise InvalidRequestError(f"{param} must not contain NUL or unpaired surrogates.", param=param)
    return text


def storable(text: str, max_length: int) -> str:
    """`text` with what no database stores replaced, and cut to `max_length`."""
    return _UNSTORABLE.sub("\ufffd", text[:max_length])


def check_integer(value: object, param: str, low: int = 0, high: int = MAX_INTEGER) -> int:
    """Return `value` if it is an integer (and no bool) within the bounds.

    Raises:
        InvalidRequestError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(f"{param} must be an integer from {low} to {high}.", param=param)
    return value
