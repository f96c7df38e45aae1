"""Limits of tenants and keys: their names, and the checks of those on storage. An absent limit does not limit.

The server checks rates, monthly tokens and pinned pages. Limits on storage (`adapters`, `stored_bytes`,
`adapter_pages`) are checked before an upload is read, and again in the transaction that publishes it. A version counts
with the size of its weights, an open upload in pieces with the size that it announced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Literal, get_args

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from manylora.errors import ForbiddenError, InvalidRequestError
from manylora.registry.db.models import AdapterRow, TenantRow, UploadRow, VersionRow
from manylora.registry.names import check_integer


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a tenant or a key; None is no limit."""

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
    """Device pages of all copies of pinned adapters together."""


UNLIMITED = Limits()
WEIGHTS = (0.01, 100.0)
"""Least and largest weight of a tenant."""
TENANT_LIMITS = tuple(field.name for field in fields(Limits))
LimitKind = Literal[
    "requests_per_minute", "concurrent_requests", "tokens_per_minute", "tokens_per_month"
]
LIMIT_KINDS: tuple[LimitKind, ...] = get_args(LimitKind)
KEY_LIMITS = TENANT_LIMITS[:4]
"""Limits that a single key may have, too."""


def checked_limits(limits: Mapping[str, object], names: Sequence[str]) -> dict[str, int]:
    """The limits that are set; null means no limit.

    Raises:
        InvalidRequestError: A name is not among `names`, or a value is no whole number of at least 0.
    """
    checked = {}
    for name, value in limits.items():
        if name not in names:
            raise InvalidRequestError(
                f"limits takes {', '.join(names)}, and nothing else.", param="limits"
            )
        if value is not None:
            checked[name] = check_integer(value, f"limits.{name}")
    return checked


UPLOADING = "uploading"
"""State of an upload in pieces that still reserves storage, until it expires."""


async def storage_left(session: AsyncSession, tenant_id: str, now: datetime) -> int | None:
    """Bytes that the tenant may still store, below 0 when there are too many; None without a limit."""
    limit = await _limit(session, tenant_id, "stored_bytes")
    return None if limit is None else limit - await stored_bytes(session, tenant_id, now)


async def stored_bytes(session: AsyncSession, tenant_id: str, now: datetime) -> int:
    """Bytes that the tenant stores or has reserved."""
    stored = select(func.coalesce(func.sum(VersionRow.size_bytes), 0)).join(AdapterRow)
    reserved = select(func.coalesce(func.sum(UploadRow.size_bytes), 0)).where(
        UploadRow.tenant_id == tenant_id, UploadRow.state == UPLOADING, UploadRow.expires_at > now
    )
    used = await session.scalar(stored.where(AdapterRow.tenant_id == tenant_id))
    return int(used or 0) + int(await session.scalar(reserved) or 0)


async def count_adapters(session: AsyncSession, tenant_id: str) -> int:
    """Adapters of the tenant."""
    owned = select(func.count()).select_from(AdapterRow).where(AdapterRow.tenant_id == tenant_id)
    return int(await session.scalar(owned) or 0)


async def check_storage(session: AsyncSession, tenant_id: str, now: datetime) -> None:
    """Return if what the tenant stores and has reserved is within its limit.

    Raises:
        ForbiddenError: Code quota.storage.
    """
    left = await storage_left(session, tenant_id, now)
    if left is not None and left < 0:
        raise no_storage()


async def check_adapters(session: AsyncSession, tenant_id: str, to_come: int = 0) -> None:
    """Return if the tenant's adapters, with those `to_come`, are within its limit.

    Raises:
        ForbiddenError: Code quota.adapters.
    """
    limit = await _limit(session, tenant_id, "adapters")
    if limit is not None and await count_adapters(session, tenant_id) + to_come > limit:
        message = f"The tenant may have {limit} adapters; delete one first."
        raise ForbiddenError(message, code="quota.adapters", param="name")


async def check_pages(session: AsyncSession, tenant_id: str, pages: int) -> None:
    """Return if one adapter may take `pages` pages on the device.

    Raises:
        ForbiddenError: Code quota.adapter_memory.
    """
    limit = await _limit(session, tenant_id, "adapter_pages")
    if limit is not None and pages > limit:
        raise ForbiddenError(
            f"The adapter takes {pages} pages on the device, and the tenant's adapters may take {limit} each. Use "
            "a smaller rank or fewer target modules.",
            code="quota.adapter_memory",
        )


def no_storage() -> ForbiddenError:
    """The refusal of an upload for which no storage is left."""
    message = "The upload would exceed the bytes that the tenant may store; delete versions or uploads first."
    return ForbiddenError(message, code="quota.storage")


async def _limit(session: AsyncSession, tenant_id: str, name: str) -> int | None:
    limits = await session.scalar(select(TenantRow.limits).where(TenantRow.id == tenant_id))
    return (limits or {}).get(name)
