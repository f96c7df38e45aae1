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


async def limits_of(session: AsyncSession, tenant_id: str) -> Limits:
    """The tenant's limits."""
    found = await session.scalar(select(TenantRow.limits).where(TenantRow.id == tenant_id))
    return Limits(**(found or {}))


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


async def check_storage(
    session: AsyncSession,
    tenant_id: str,
    now: datetime,
    *,
    pages: int | None = None,
    new_adapters: int | None = None,
) -> None:
    """Return if the tenant is within its limits on storage.

    Args:
        session: The transaction.
        tenant_id: The tenant.
        now: The present moment; uploads that have expired reserve nothing.
        pages: Pages that its next version takes on the device; None is unknown.
        new_adapters: Adapters that are to come besides those it has; None does not count adapters.

    Raises:
        ForbiddenError: Codes quota.adapter_memory, quota.storage, quota.adapters.
    """
    limits = await limits_of(session, tenant_id)
    if pages is not None and limits.adapter_pages is not None and pages > limits.adapter_pages:
        raise ForbiddenError(
            f"The adapter takes {pages} pages on the device, and the tenant's adapters may take "
            f"{limits.adapter_pages} each. Use a smaller rank or fewer target modules.",
            code="quota.adapter_memory",
        )
    most_bytes = limits.stored_bytes
    if most_bytes is not None and await stored_bytes(session, tenant_id, now) > most_bytes:
        raise no_storage()
    if new_adapters is None or limits.adapters is None:
        return
    if await count_adapters(session, tenant_id) + new_adapters > limits.adapters:
        message = f"The tenant may have {limits.adapters} adapters; delete one first."
        raise ForbiddenError(message, code="quota.adapters", param="name")


def no_storage() -> ForbiddenError:
    """The refusal of an upload for which no storage is left."""
    message = "The upload would exceed the bytes that the tenant may store; delete versions or uploads first."
    return ForbiddenError(message, code="quota.storage")
