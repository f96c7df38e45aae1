"""Grants: other tenants that may call an adapter. Owners name them by id, so names cannot be guessed."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from weft.errors import NotFoundError
from weft.registry.records import Grant
from weft.server.auth.callers import TenantCaller, TenantReader, TenantWriter
from weft.server.http.json_body import json_body
from weft.server.http.openapi import takes
from weft.server.services import Services, Wired
from weft.server.tenants.schemas import GrantBody, GrantList, GrantView

router = APIRouter(tags=["grants"])
Version = Annotated[int | None, Query(ge=1, lt=1 << 31)]


@router.get("/v1/adapters/{name}/grants")
async def list_grants(name: str, services: Wired, caller: TenantReader) -> GrantList:
    """List the other tenants that may call an adapter."""
    grants = await services.registry.grants.list_grants(caller.tenant_id, name)
    return GrantList(data=[_view(name, grant) for grant in grants], next=None)


@router.post(
    "/v1/adapters/{name}/grants",
    status_code=201,
    openapi_extra=takes(GrantBody),
    responses={200: {"model": GrantView, "description": "It was granted already."}},
)
async def grant_adapter(
    name: str, request: Request, response: Response, services: Wired, caller: TenantWriter
) -> GrantView:
    """Let another tenant call an adapter as `tenant/name`, or one version of it as `tenant/name@version`."""
    body = await json_body(request, GrantBody, services.config.server.max_body_bytes, services.pace)
    grantee = await _tenant_id(services, caller, body.tenant)
    grant, is_new = await services.registry.grants.grant_adapter(
        caller.tenant_id, name, grantee, body.version, actor=caller.actor
    )
    response.status_code = 201 if is_new else 200
    return _view(name, grant)


@router.delete("/v1/adapters/{name}/grants/{grantee}", status_code=204)
async def withdraw_grant(
    name: str, grantee: str, services: Wired, caller: TenantWriter, version: Version = None
) -> Response:
    """Take a grant back: new requests of the other tenant are refused at once, running ones finish."""
    other = await _tenant_id(services, caller, grantee)
    await services.registry.grants.withdraw_grant(caller.tenant_id, name, other, version, actor=caller.actor)
    return Response(status_code=204)


def _view(adapter: str, grant: Grant) -> GrantView:
    return GrantView.model_validate({"adapter": adapter, **asdict(grant)})


async def _tenant_id(services: Services, caller: TenantCaller, named: str) -> str:
    """A tenant's id as it stands; admins may give its name instead."""
    if named.startswith("ten_"):
        return named
    if not caller.is_admin:
        message = "Name the other tenant by its id (ten_...), which its keys see in GET /v1/me."
        raise NotFoundError(message, param="tenant")
    return (await services.registry.tenants.get_tenant(named)).id
