"""The audit log of all changes; for admins only."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from weft.registry.names import MAX_INTEGER
from weft.server.auth.callers import Admin
from weft.server.services import Wired
from weft.server.tenants.schemas import AuditList, AuditView

router = APIRouter(tags=["audit"])
Limit = Annotated[int, Query(ge=1, le=1000)]
Before = Annotated[int | None, Query(ge=1, le=MAX_INTEGER, description="`next` of the page before.")]


@router.get("/v1/audit")
async def list_audit(
    services: Wired,
    _: Admin,
    tenant: Annotated[str | None, Query(max_length=512, description="Only changes of this tenant's objects.")] = None,
    before: Before = None,
    limit: Limit = 100,
) -> AuditList:
    """List changes of tenants, keys, adapters, aliases and grants, newest first."""
    entries = await services.registry.list_audit(before, limit, tenant)
    more = len(entries) == limit and entries[-1].id > 1
    return AuditList(
        data=[AuditView.model_validate(entry) for entry in entries], next=str(entries[-1].id) if more else None
    )
