"""Who a key belongs to, and how much of its limits is taken."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter

from weft.server.adapters.pins import pinned_pages
from weft.server.auth.callers import AnyCaller
from weft.server.limits.admission import shares_of
from weft.server.responses import HeldView, KeyView, MeView, NamedView
from weft.server.services import Wired

router = APIRouter(tags=["tenants"])


@router.get("/v1/me")
async def show_caller(services: Wired, caller: AnyCaller) -> MeView:
    """Show whose key this is, its limits and what counts against them now."""
    limits: dict[str, dict[str, int]] = {"tenant": {}, "key": {}}
    used: dict[str, dict[str, int]] = {"tenant": {}, "key": {}}
    for share in await shares_of(services, caller, with_month=True):
        limits[share.holder] = {name: value for name, value in asdict(share.limits).items() if value is not None}
        used[share.holder] = share.account.used(services.monotonic())
    if caller.tenant_id is not None:
        pages = await pinned_pages(services, caller.tenant_id)
        used["tenant"] |= {**await services.registry.stored(caller.tenant_id), "pinned_pages": pages}
    key_id, tenant_id, tenant = caller.identity.key_id, caller.tenant_id, caller.tenant
    return MeView(
        role=caller.identity.role,
        tenant=NamedView(id=tenant_id, name=tenant) if tenant_id is not None and tenant is not None else None,
        key=KeyView.model_validate(await services.registry.get_key(key_id)) if key_id is not None else None,
        limits=HeldView(**limits),
        used=HeldView(**used),
    )
