"""Names and texts: checks of those that can be stored, and names of adapters taken apart.

The checks refuse what a database could not take: PostgreSQL takes no NUL in a text, and drivers take no integers of
more than 64 bits. A request names an adapter as `name`, `name@3`, `name@prod` or `name@sha256:...`, each also as
`tenant/name`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from manylora.errors import InvalidRequestError, NotFoundError

DEFAULT_ALIAS = "default"
EVERY_VERSION = 0
"""Version of a grant for all versions."""
MAX_INTEGER = (1 << 63) - 1
MAX_DESCRIPTION = 4096
MAX_VERSION = (1 << 31) - 1

NAME_RULE = (
    "be 1 to 63 lower-case letters, digits, dots, underscores or hyphens, start and end with a letter or digit, and "
    "not contain two dots in a row"
)
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,61}[a-z0-9])?")
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def is_name(text: str) -> bool:
    """Return true if `text` can name a tenant, an adapter or an alias."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def check_name(text: str, param: str) -> str:
    """Return `text` if it can be a name.

    Raises:
        InvalidRequestError: It cannot; the message states the rule.
    """
    if not isinstance(text, str) or not is_name(text):
        raise InvalidRequestError(f"{param} must {NAME_RULE}.", param=param)
    return text


def check_alias(text: str) -> str:
    """Return `text` if it can be an alias: a name that cannot be taken for a version number.

    Raises:
        InvalidRequestError: It cannot.
    """
    check_name(text, "aliases")
    if text.isdigit():
        raise InvalidRequestError(
            "An alias must not be a number: those are versions.", param="aliases"
        )
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
        raise InvalidRequestError(
            f"{param} must be text of at most {max_length} characters.", param=param
        )
    if _UNSTORABLE.search(text):
        raise InvalidRequestError(
            f"{param} must not contain NUL or unpaired surrogates.", param=param
        )
    return text


def storable(text: str, max_length: int) -> str:
    """`text`, cut to `max_length`, without the characters that no database stores."""
    return _UNSTORABLE.sub("\ufffd", text[:max_length])


def check_integer(value: object, param: str, low: int = 0, high: int = MAX_INTEGER) -> int:
    """Return `value` if it is an integer (and no bool) within the bounds.

    Raises:
        InvalidRequestError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(f"{param} must be an integer from {low} to {high}.", param=param)
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """A parsed model name."""

    tenant: str | None
    """The owner's name; None: the caller's own adapter."""
    name: str
    by: Literal["version", "alias", "digest"] = "alias"
    """Way to choose the version."""
    value: str | int = DEFAULT_ALIAS


def model_not_found(text: str) -> NotFoundError:
    """The one error for a model that is unknown, malformed or not for this caller: it does not say which."""
    message = f"The model `{shown(text)}` does not exist or you may not use it."
    return NotFoundError(message, code="model_not_found", param="model")


def parse_selector(text: str) -> Selector:
    """Parse a model name.

    Raises:
        NotFoundError: `text` cannot name an adapter; code model_not_found.
    """
    path, at, pin = text.partition("@")
    owner, slash, rest = path.partition("/")
    tenant, name = (owner, rest) if slash else (None, path)
    if not is_name(name) or (tenant is not None and not is_name(tenant)):
        raise model_not_found(text)
    if _VERSION.fullmatch(pin):
        return Selector(tenant=tenant, name=name, by="version", value=int(pin))
    if _DIGEST.fullmatch(pin):
        return Selector(tenant=tenant, name=name, by="digest", value=pin)
    alias = pin if at else DEFAULT_ALIAS
    if is_name(alias) and not alias.isdigit():
        return Selector(tenant=tenant, name=name, value=alias)
    raise model_not_found(text)
