"""Tenants, their keys, and the audit log of all changes, for admins only; and which tenants may call another's adapter.

Owners name other tenants by id, so names cannot be guessed.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from manylora.errors import NotFoundError
from manylora.registry.db.models import GrantRow
from manylora.registry.names import MAX_INTEGER
from manylora.server.auth.admission import accounts_of
from manylora.server.auth.callers import Admin, AnyCaller, TenantCaller, TenantReader, TenantWriter
from manylora.server.http.bodies import HeldView, NamedView
from manylora.server.http.openapi import takes
from manylora.server.services import Services, Wired
from manylora.server.tenants import schemas

router = APIRouter(tags=["tenants"])
audit_router = APIRouter(tags=["audit"])
grants_router = APIRouter(tags=["grants"])
Version = Annotated[int | None, Query(ge=1, lt=1 << 31)]
Limit = Annotated[int, Query(ge=1, le=1000)]
Before = Annotated[
    int | None, Query(ge=1, le=MAX_INTEGER, description="`next` of the page before.")
]


@router.post("/v1/tenants", status_code=201, openapi_extra=takes(schemas.TenantBody))
async def create_tenant(request: Request, services: Wired, _: Admin) -> schemas.TenantView:
    """Make a tenant. Limits that the body does not name come from the settings `tenant_defaults.*`."""
    body = await services.bodies.json(request, schemas.TenantBody)
    limits = {**asdict(services.config.tenant_defaults), **body.limits}
    tenant = await services.registry.tenants.create_tenant(body.name, limits, body.weight)
    return schemas.TenantView.model_validate(tenant)


@router.get("/v1/tenants")
async def list_tenants(
    services: Wired, _: Admin, after: str | None = None, limit: Limit = 100
) -> schemas.TenantList:
    """List tenants by name."""
    return schemas.TenantList.model_validate(
        await services.registry.tenants.list_tenants(after, limit)
    )


@router.get("/v1/tenants/{name}")
async def get_tenant(name: str, services: Wired, _: Admin) -> schemas.TenantView:
    """Show one tenant."""
    return schemas.TenantView.model_validate(await services.registry.tenants.get_tenant(name))


@router.patch("/v1/tenants/{name}", openapi_extra=takes(schemas.TenantPatchBody))
async def update_tenant(
    name: str, request: Request, services: Wired, _: Admin
) -> schemas.TenantView:
    """Replace a tenant's limits, its weight, or both; in force at once."""
    body = await services.bodies.json(request, schemas.TenantPatchBody)
    tenant = await services.registry.tenants.update_tenant(name, body.limits, body.weight)
    return schemas.TenantView.model_validate(tenant)


@router.delete("/v1/tenants/{name}", status_code=204, response_class=Response)
async def delete_tenant(name: str, services: Wired, _: Admin) -> None:
    """Delete a tenant with its keys and adapters; its usage stays."""
    await services.versions.garbage.remove(await services.registry.tenants.delete_tenant(name))


@router.post("/v1/tenants/{name}/keys", status_code=201, openapi_extra=takes(schemas.KeyBody))
async def create_key(name: str, request: Request, services: Wired, _: Admin) -> schemas.NewKeyView:
    """Make a key. The secret is shown this once."""
    body = await services.bodies.json(request, schemas.KeyBody)
    key, secret = await services.registry.keys.create_key(name, **body.model_dump())
    return schemas.NewKeyView(**schemas.KeyView.model_validate(key).model_dump(), key=secret)


@router.get("/v1/tenants/{name}/keys")
async def list_keys(name: str, services: Wired, _: Admin) -> schemas.KeyList:
    """List a tenant's keys that are not revoked."""
    keys = await services.registry.keys.list_keys(name)
    return schemas.KeyList.model_validate({"data": keys, "next": None})


@router.patch("/v1/keys/{key_id}", openapi_extra=takes(schemas.KeyPatchBody))
async def update_key(key_id: str, request: Request, services: Wired, _: Admin) -> schemas.KeyView:
    """Change a key's name, limits, scopes or end; the secret stays, and the change is in force at once."""
    body = await services.bodies.json(request, schemas.KeyPatchBody)
    return schemas.KeyView.model_validate(
        await services.registry.keys.update_key(key_id, **body.model_dump())
    )


@router.post("/v1/keys/{key_id}/rotate", status_code=201, openapi_extra=takes(schemas.RotateBody))
async def rotate_key(
    key_id: str, request: Request, services: Wired, _: Admin
) -> schemas.NewKeyView:
    """Give a key a new secret; the old secret stops working at once, or after `grace_s` seconds."""
    body = await services.bodies.json(request, schemas.RotateBody)
    key, secret = await services.registry.keys.rotate_key(key_id, body.grace_s)
    return schemas.NewKeyView(**schemas.KeyView.model_validate(key).model_dump(), key=secret)


@router.delete("/v1/keys/{key_id}", status_code=204, response_class=Response)
async def revoke_key(key_id: str, services: Wired, _: Admin) -> None:
    """Revoke a key; it stops working at once."""
    await services.registry.keys.revoke_key(key_id)


@router.get("/v1/me")
async def show_caller(services: Wired, caller: AnyCaller) -> schemas.MeView:
    """Show the key's tenant, its limits and how much of them is used now."""
    accounts = await accounts_of(services, caller, with_month=True)
    now_s = services.clock.monotonic()
    limits = {
        each.holder: {
            name: value for name, value in asdict(each.limits).items() if value is not None
        }
        for each in accounts
    }
    used = {each.holder: each.used(now_s) for each in accounts}
    if caller.tenant_id is not None:
        pages = await services.versions.pins.pinned_pages(caller.tenant_id)
        used["tenant"] |= {
            **await services.registry.tenants.stored(caller.tenant_id),
            "pinned_pages": pages,
        }
    key = None
    if (key_id := caller.identity.key_id) is not None:
        key = schemas.KeyView.model_validate(await services.registry.keys.get_key(key_id))
    tenant = None
    if caller.tenant_id is not None and caller.tenant is not None:
        tenant = NamedView(id=caller.tenant_id, name=caller.tenant)
    return schemas.MeView(
        role=caller.identity.role,
        tenant=tenant,
        key=key,
        limits=HeldView(tenant=limits.get("tenant", {}), key=limits.get("key", {})),
        used=HeldView(tenant=used.get("tenant", {}), key=used.get("key", {})),
    )


@audit_router.get("/v1/audit")
async def list_audit(
    services: Wired,
    _: Admin,
    tenant: Annotated[
        str | None, Query(max_length=512, description="Only changes of this tenant's objects.")
    ] = None,
    before: Before = None,
    limit: Limit = 100,
) -> schemas.AuditList:
    """List changes of tenants, keys, adapters, aliases and grants, newest first."""
    entries = await services.registry.list_audit(before, limit, tenant)
    more = len(entries) == limit and entries[-1].id > 1
    return schemas.AuditList.model_validate(
        {"data": entries, "next": str(entries[-1].id) if more else None}
    )


@grants_router.get("/v1/adapters/{name}/grants")
async def list_grants(name: str, services: Wired, caller: TenantReader) -> schemas.GrantList:
    """List the other tenants that may call an adapter."""
    grants = await services.registry.grants.list_grants(caller.tenant_id, name)
    return schemas.GrantList(data=[_view(name, grant) for grant in grants], next=None)


@grants_router.post(
    "/v1/adapters/{name}/grants",
    status_code=201,
    openapi_extra=takes(schemas.GrantBody),
    responses={200: {"model": schemas.GrantView, "description": "It was granted already."}},
)
async def grant_adapter(
    name: str, request: Request, response: Response, services: Wired, caller: TenantWriter
) -> schemas.GrantView:
    """Let another tenant call an adapter as `tenant/name`, or one version of it as `tenant/name@version`."""
    body = await services.bodies.json(request, schemas.GrantBody)
    grantee = await _tenant_id(services, caller, body.tenant)
    grant, is_new = await services.registry.grants.grant_adapter(
        caller.tenant_id, name, grantee, body.version, actor=caller.actor
    )
    response.status_code = 201 if is_new else 200
    return _view(name, grant)


@grants_router.delete(
    "/v1/adapters/{name}/grants/{grantee}", status_code=204, response_class=Response
)
async def withdraw_grant(
    name: str, grantee: str, services: Wired, caller: TenantWriter, version: Version = None
) -> None:
    """Take a grant back: new requests of the other tenant are refused at once, running ones finish."""
    other = await _tenant_id(services, caller, grantee)
    await services.registry.grants.withdraw_grant(
        caller.tenant_id, name, other, version, actor=caller.actor
    )


def _view(adapter: str, grant: GrantRow) -> schemas.GrantView:
    shown = {name: getattr(grant, name) for name in ("tenant", "tenant_id", "created_at")}
    return schemas.GrantView.model_validate(
        {"adapter": adapter, "version": grant.version or None, **shown}
    )


async def _tenant_id(services: Services, caller: TenantCaller, named: str) -> str:
    """A tenant's id as it stands; admins may give its name instead."""
    if named.startswith("ten_"):
        return named
    if not caller.is_admin:
        message = "Name the other tenant by its id (ten_...), which its keys see in GET /v1/me."
        raise NotFoundError(message, param="tenant")
    return (await services.registry.tenants.get_tenant(named)).id
