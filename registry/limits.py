"""Limits of tenants and of single keys: their names, and what may be stored under them.

A limit that is absent does not limit. Who holds to them stands elsewhere: rates and quotas in the server's admission,
counts and sizes where adapters are taken in and pinned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from weft.errors import InvalidRequestError
from weft.registry.names import check_integer


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a tenant, or a key, may have at most; None is no limit."""

    requests_per_minute: int | None = None
    """Requests that generate or tokenize, in any minute."""
    tokens_per_minute: int | None = None
    """Prompt and generated tokens, in any minute."""
    concurrent_requests: int | None = None
    """Such requests at the same time."""
    tokens_per_month: int | None = None
    """Billed tokens of a calendar month in UTC."""
    adapters: int | None = None
    stored_bytes: int | None = None
    """Bytes of all adapter versions."""
    adapter_pages: int | None = None
    """Device pages of one adapter version."""
    pinned_pages: int | None = None
    """Device pages of all pinned adapters together."""

    @classmethod
    def of(cls, stored: Mapping[str, object]) -> Limits:
        """The limits of a row."""
        return cls(**known_limits(stored))


UNLIMITED = Limits()
WEIGHTS = (0.01, 100.0)
"""Least and largest weight of a tenant."""
TENANT_LIMITS = tuple(field.name for field in fields(Limits))
KEY_LIMITS = TENANT_LIMITS[:4]
"""What a single key can be held to."""


def known_limits(stored: Mapping[str, object]) -> dict[str, int]:
    """What counts of a row: an older Weft stored any name and number, and held nobody to them."""
    return {name: value for name, value in stored.items() if name in TENANT_LIMITS and isinstance(value, int)}


def checked_limits(limits: Mapping[str, object], names: Sequence[str]) -> dict[str, int]:
    """The limits that are set; null means none.

    Raises:
        InvalidRequestError: A name is not among `names`, or a value is no whole number of at least 0.
    """
    checked = {}
    for name, value in limits.items():
        if name not in names:
            raise InvalidRequestError(f"limits takes {', '.join(names)}, and nothing else.", param="limits")
        if value is not None:
            checked[name] = check_integer(value, f"limits.{name}")
    return checked
