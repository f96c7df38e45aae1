"""Rates and quotas: the dependency of every route that generates or tokenizes.

It runs before a byte of the body is read. 429 means that the caller has used its limits: those of the key, and those of
the tenant, also for an admin with `?tenant=`. Both come with the identity, and a change of them drops it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, cast

from fastapi import Depends
from starlette.requests import Request

from weft.registry.limits import Limits
from weft.server.auth.callers import Caller, CallerDependency, TenantQuery
from weft.server.limits.reservation import Holder, LimitReservation, Share
from weft.server.limits.windows import month_after, month_of
from weft.server.services import Services, services_of


def reservation_of(request: Request) -> LimitReservation:
    """The request's part of its caller's limits. `Boundary` makes it, and ends it with the request."""
    return cast(LimitReservation, request.state.reservation)


async def shares_of(services: Services, caller: Caller, *, with_month: bool = False) -> list[Share]:
    """The accounts of tenant and key, with their limits.

    Args:
        services: Accounts, ledger and clocks.
        caller: The caller and its tenant.
        with_month: Read the sum of the month even if it has no limit.

    Raises:
        CapacityError: The month's sum is not known, and the database cannot answer now.
    """
    identity = caller.identity
    held: list[tuple[Holder, str, Limits]] = []
    if caller.tenant_id is not None:
        is_own = identity.tenant_id == caller.tenant_id
        limits = identity.tenant_limits if is_own else await services.registry.tenants.tenant_limits(caller.tenant_id)
        held.append(("tenant", caller.tenant_id, limits))
    if identity.key_id is not None:
        held.append(("key", identity.key_id, identity.key_limits))
    while True:
        now_s, month = services.monotonic(), month_of(services.now())
        shares = [Share(holder, name, services.accounts.of(name, now_s), limits) for holder, name, limits in held]
        unread = [
            share
            for share in shares
            if share.account.month != month and (with_month or share.limits.tokens_per_month is not None)
        ]
        if not unread:
            return shares
        for share in unread:
            await _read_month(services, share, month)


async def _read_month(services: Services, share: Share, month: datetime) -> None:
    """Read the month's sum from the ledger; requests that end meanwhile count once."""
    account = share.account
    async with account.reading:
        if account.month == month:
            return
        account.arrived = {}
        try:
            of_holder = {f"{share.holder}_id": share.holder_id}
            tokens = await services.registry.usage.tokens(of_holder, month, month_after(month), account.arrived)
            account.month_tokens = tokens + sum(count for ended, count in account.arrived.values() if ended == month)
            account.month = month
        finally:
            account.arrived = None


class Admitted(CallerDependency):
    """Dependency: a caller with the scope `infer`, within the limits.

    Args:
        tokens: Least tokens of a request.

    Raises:
        RateLimitError: The tenant or the key has reached a limit.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__("infer")
        self._tokens = tokens

    async def __call__(self, request: Request, tenant: TenantQuery = None) -> Caller:
        """Called by FastAPI for each request. One dependency does all: each costs as much as the rest of a refusal."""
        services, caller = services_of(request), await super().__call__(request, tenant)
        shares = await shares_of(services, caller)
        reservation_of(request).admit(shares, services.monotonic, services.metrics.limited, self._tokens)
        return caller


admit_generation = Admitted(tokens=1)
GeneratingCaller = Annotated[Caller, Depends(admit_generation)]
TokenizingCaller = Annotated[Caller, Depends(Admitted(tokens=0))]
