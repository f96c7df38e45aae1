"""How a request names an adapter: `name`, `name@3`, `name@prod`, `name@sha256:...`, each also as `tenant/name`.

A text that is no selector names nothing: it is answered like an unknown name, so that nobody learns which is which.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from weft.errors import NotFoundError
from weft.registry.names import is_name

DEFAULT_ALIAS = "default"

_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """A parsed selector; exactly one of version, alias and digest is set."""

    tenant: str | None
    """Name of the owner; None means the caller."""
    name: str
    version: int | None = None
    alias: str | None = None
    digest: str | None = None


def model_not_found(text: str) -> NotFoundError:
    """The one answer to a model that is unknown, malformed, or not for this caller."""
    shown = text.encode("ascii", "backslashreplace").decode()[:200]
    return NotFoundError(
        f"The model `{shown}` does not exist or you may not use it.", code="model_not_found", param="model"
    )


def parse_selector(text: str) -> Selector:
    """Take a selector apart.

    Raises:
        NotFoundError: `text` cannot name an adapter; code model_not_found.
    """
    path, at, pin = text.partition("@")
    owner, slash, rest = path.partition("/")
    tenant, name = (owner, rest) if slash else (None, path)
    if not is_name(name) or (tenant is not None and not is_name(tenant)):
        raise model_not_found(text)
    if not at:
        return Selector(tenant=tenant, name=name, alias=DEFAULT_ALIAS)
    if _VERSION.fullmatch(pin):
        return Selector(tenant=tenant, name=name, version=int(pin))
    if _DIGEST.fullmatch(pin):
        return Selector(tenant=tenant, name=name, digest=pin)
    if is_name(pin) and not pin.isdigit():
        return Selector(tenant=tenant, name=name, alias=pin)
    raise model_not_found(text)
