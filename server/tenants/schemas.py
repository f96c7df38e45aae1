"""Bodies of tenants, keys, sessions, grants and the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    Field,
    WithJsonSchema,
    model_validator,
)

from manylora.errors import InvalidRequestError
from manylora.registry.limits import KEY_LIMITS, TENANT_LIMITS, WEIGHTS
from manylora.server.http.bodies import (
    INT64,
    Body,
    HeldView,
    Listing,
    Moment,
    NamedView,
    Scope,
    View,
)


class TenantView(View):
    """A tenant."""

    id: str
    object: Literal["tenant"] = "tenant"
    name: str
    limits: dict[str, int]
    weight: float
    """Its share of the engine is this weight over the sum of those of all tenants with requests."""
    created_at: Moment


class TenantList(Listing[TenantView]):
    """A page of tenants."""


class KeyView(View):
    """A key, without its secret."""

    id: str
    object: Literal["key"] = "key"
    tenant: str
    name: str | None
    prefix: str
    scopes: list[str]
    limits: dict[str, int]
    expires_at: Moment | None
    created_at: Moment


class NewKeyView(KeyView):
    """A key with its secret, shown this once."""

    key: str


class KeyList(Listing[KeyView]):
    """A tenant's keys."""


class MeView(View):
    """The caller, its limits and how much of them is used."""

    object: Literal["me"] = "me"
    role: Literal["admin", "tenant"]
    tenant: NamedView | None
    key: KeyView | None
    """None for the admin key."""
    limits: HeldView
    """The limits that are set."""
    used: HeldView
    """Used of each rate or quota now; tokens include what running requests reserve."""


class GrantView(View):
    """Another tenant may call an adapter."""

    object: Literal["grant"] = "grant"
    adapter: str
    tenant: str
    """Name of the grantee."""
    tenant_id: str
    version: int | None
    """Null means every version."""
    created_at: Moment


class GrantList(Listing[GrantView]):
    """An adapter's grants."""


class AuditView(View):
    """One change of what exists."""

    id: Annotated[str, BeforeValidator(str)]
    object: Literal["audit.entry"] = "audit.entry"
    at: Moment
    actor: str
    """A key's id, or `admin`."""
    action: str
    tenant: str
    target: str
    detail: dict[str, Any]


class AuditList(Listing[AuditView]):
    """A page of the audit log, newest first."""


def _limits_schema(names: Sequence[str]) -> dict[str, Any]:
    limit = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": INT64 - 1}, {"type": "null"}]}
    return {
        "type": "object",
        "properties": dict.fromkeys(names, limit),
        "additionalProperties": False,
    }


# The registry checks their content.
Weight = Annotated[float, Field(ge=WEIGHTS[0], le=WEIGHTS[1])]


TenantLimits = Annotated[dict[str, Any], WithJsonSchema(_limits_schema(TENANT_LIMITS))]


KeyLimits = Annotated[dict[str, Any], WithJsonSchema(_limits_schema(KEY_LIMITS))]


def _in_utc(moment: datetime | None) -> datetime | None:
    try:
        return moment and moment.astimezone(UTC)
    except OverflowError as error:
        message = "expires_at must lie before the year 10000 in UTC."
        raise InvalidRequestError(message, param="expires_at") from error


class KeyFields(Body):
    """Fields of a key besides its tenant."""

    name: str | None = Field(None, max_length=512)
    limits: KeyLimits | None = None
    scopes: list[Scope] | None = Field(None, min_length=1, max_length=3)
    expires_at: Annotated[AwareDatetime | None, Field(strict=False), AfterValidator(_in_utc)] = None
    """ISO-8601 with an offset."""


class TenantBody(Body):
    """Body of POST /v1/tenants."""

    name: str = Field(max_length=512)
    limits: TenantLimits = Field(default_factory=dict)
    """Limits that are not named come from the settings `tenant_defaults.*`; null is no limit."""
    weight: Weight = 1.0
    """Its share of the engine is this weight over the sum of those of all tenants with requests."""


class TenantPatchBody(Body):
    """Body of PATCH /v1/tenants/{name}."""

    limits: TenantLimits | None = None
    """All limits: those not named are removed. Null changes none."""
    weight: Weight | None = None
    """Null does not change it."""

    @model_validator(mode="after")
    def _says_something(self) -> TenantPatchBody:
        if self.limits is None and self.weight is None:
            raise InvalidRequestError("Give limits, weight or both.", param="limits")
        return self


class KeyBody(KeyFields):
    """Body of POST /v1/tenants/{name}/keys; without scopes it has all, without `expires_at` it never expires."""


class KeyPatchBody(KeyFields):
    """Body of PATCH /v1/keys/{id}: what is given changes; `limits` replaces all of the key's."""


class GrantBody(Body):
    """Body of POST /v1/adapters/{name}/grants."""

    tenant: str = Field(min_length=1, max_length=512)
    """The other tenant's id; admins may give its name."""
    version: int | None = Field(None, ge=1, lt=1 << 31)
    """None grants every version, future ones too."""


class RotateBody(Body):
    """Body of POST /v1/keys/{id}/rotate."""

    grace_s: int = Field(0, ge=0, le=30 * 86_400)
    """Seconds for which the old secret still works."""
