"""Decides, after authentication, what a caller may do and for which tenant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Query
from starlette.requests import Request

from manylora.errors import AuthenticationError, ForbiddenError, InvalidRequestError
from manylora.registry.names import no_such
from manylora.registry.records import Identity, Scope
from manylora.server.core_services import CoreServices

DEFAULT_TENANT = "default"
"""Whose all requests are that name no tenant while authentication is off."""
EVERY_TENANT = "*"
"""Stands for all tenants; no tenant can have this name."""
TenantQuery = Annotated[str | None, Query(description="For admins: the tenant to act for.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller, and the tenant it acts for."""

    identity: Identity
    tenant_id: str | None
    """None only for an admin who named no tenant."""
    tenant: str | None
    weight: float = 1.0
    """The tenant's weight in the engine."""

    @property
    def is_admin(self) -> bool:
        """True if the admin key was used."""
        return self.identity.role == "admin"

    @property
    def actor(self) -> str:
        """Name for the audit log."""
        return self.identity.key_id or self.identity.role


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCaller(Caller):
    """A caller that acts for a tenant."""

    tenant_id: str
    tenant: str


def identity_of(request: Request) -> Identity:
    """The caller's identity.

    Raises:
        AuthenticationError: The request did not pass authentication.
    """
    identity = getattr(request.state, "identity", None)
    if not isinstance(identity, Identity):
        raise AuthenticationError("No API key was given.")
    return identity


async def require_admin(request: Request) -> Identity:
    """The caller, if an admin. Async, because FastAPI would run a plain function in a thread.

    Raises:
        ForbiddenError: A tenant's key was used.
    """
    identity = identity_of(request)
    if identity.role != "admin":
        raise ForbiddenError("Only the admin key may call this route.")
    return identity


class CallerDependency:
    """Dependency: the caller and its tenant, which an admin chooses with `?tenant=`.

    Args:
        scope: What the key must be allowed; None takes any key.

    Raises:
        ForbiddenError: The key lacks `scope`.
        NotFoundError: `?tenant=` names no tenant, or not the caller's own.
    """

    def __init__(self, scope: Scope | None = None) -> None:
        self._scope = scope

    async def __call__(self, request: Request, tenant: TenantQuery = None) -> Caller:
        """Called by FastAPI for each request."""
        identity = identity_of(request)
        if identity.role == "admin":
            return await for_tenant(request.app.state.services, identity, tenant)
        if tenant not in (None, identity.tenant):
            raise no_such("tenant", tenant or "", param="tenant")
        if self._scope not in (None, *identity.scopes):
            raise ForbiddenError(f"The API key lacks the scope {self._scope}.")
        return Caller(
            identity=identity,
            tenant_id=identity.tenant_id,
            tenant=identity.tenant,
            weight=identity.tenant_weight,
        )


class ActingForTenant(CallerDependency):
    """Like `CallerDependency`, where a tenant is needed.

    Raises:
        InvalidRequestError: An admin named no tenant.
    """

    async def __call__(self, request: Request, tenant: TenantQuery = None) -> TenantCaller:
        """Called by FastAPI for each request."""
        return bound(await super().__call__(request, tenant))


class ActingForEvery(CallerDependency):
    """Like `CallerDependency`; an admin who names no tenant, or `*`, acts for all of them."""

    async def __call__(self, request: Request, tenant: TenantQuery = None) -> Caller:
        """Called by FastAPI for each request."""
        identity = identity_of(request)
        if identity.role == "admin" and tenant == EVERY_TENANT:
            return Caller(identity=identity, tenant_id=None, tenant=None)
        return await super().__call__(request, tenant)


async def for_tenant(services: CoreServices, admin: Identity, tenant: str | None) -> Caller:
    """An admin acting for the tenant of this name, or for the default one.

    Raises:
        NotFoundError: There is no such tenant.
    """
    chosen = (
        services.default_tenant if tenant is None else await services.tenants.get_tenant(tenant)
    )
    if chosen is None:
        return Caller(identity=admin, tenant_id=None, tenant=None)
    return Caller(identity=admin, tenant_id=chosen.id, tenant=chosen.name, weight=chosen.weight)


def bound(caller: Caller) -> TenantCaller:
    """The caller, if acting for a tenant.

    Raises:
        InvalidRequestError: An admin named no tenant.
    """
    if caller.tenant_id is None or caller.tenant is None:
        raise InvalidRequestError(
            "With the admin key, name the tenant: ?tenant=NAME.", param="tenant"
        )
    return TenantCaller(
        identity=caller.identity,
        tenant_id=caller.tenant_id,
        tenant=caller.tenant,
        weight=caller.weight,
    )


Admin = Annotated[Identity, Depends(require_admin)]
AnyCaller = Annotated[Caller, Depends(CallerDependency())]
UploadCaller = Annotated[Caller, Depends(CallerDependency("adapters"))]
UsageCaller = Annotated[Caller, Depends(CallerDependency("usage"))]
InferTenant = Annotated[TenantCaller, Depends(ActingForTenant("infer"))]
AnyTenantReader = Annotated[Caller, Depends(ActingForEvery())]
TenantReader = Annotated[TenantCaller, Depends(ActingForTenant())]
TenantWriter = Annotated[TenantCaller, Depends(ActingForTenant("adapters"))]
