"""Rates and quotas: the dependency of every route that generates or tokenizes.

It runs before a byte of the body is read. 429 means that the caller has used its limits: those of the key, and those of
the tenant, also for an admin with `?tenant=`. Both come with the identity, and a change of them drops it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, cast

from fastapi import Depends
from starlette.requests import Request

from manylora.registry.db.clock import month_of
from manylora.registry.limits import Limits
from manylora.server.auth.callers import Caller, CallerDependency, TenantQuery
from manylora.server.core_services import CoreServices
from manylora.server.limits.accounts import Holder, LimitedAccount
from manylora.server.limits.reservation import LimitReservation


def reservation_of(request: Request) -> LimitReservation:
    """The request's part of its caller's limits, made at the first call. It ends with the request."""
    state = request.state
    if not hasattr(state, "reservation"):
        state.reservation = reservation = LimitReservation()
        state.ends.callback(reservation.end)
        state.headers.append(reservation.headers)
    return cast(LimitReservation, state.reservation)


async def accounts_of(
    services: CoreServices, caller: Caller, *, with_month: bool = False
) -> list[LimitedAccount]:
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
        limits = (
            identity.tenant_limits
            if is_own
            else await services.tenants.tenant_limits(caller.tenant_id)
        )
        held.append(("tenant", caller.tenant_id, limits))
    if identity.key_id is not None:
        held.append(("key", identity.key_id, identity.key_limits))
    while True:
        now_s = services.clock.monotonic()
        month = month_of(services.clock.now())
        accounts = [
            LimitedAccount(holder, name, services.limits.accounts.of(name, now_s), limits)
            for holder, name, limits in held
        ]
        if not await services.limits.accounts.read_months(
            accounts, month, services.ledger.month_tokens, with_month=with_month
        ):
            return accounts


async def admit(
    services: CoreServices,
    caller: Caller,
    reservation: LimitReservation,
    tokens: int,
    on_refusal: Callable[[str], None],
    *,
    is_counted: bool = True,
) -> None:
    """Count one request of the caller as `LimitReservation.admit` does; raises like `Admitted`."""
    if tokens:  # its usage will have to be recorded
        services.ledger.check()
    accounts = await accounts_of(services, caller)
    await services.limits.accounts.secure(accounts, requests=1, tokens=max(tokens, 1))
    reservation.admit(accounts, services.clock.monotonic, on_refusal, tokens, is_counted=is_counted)


class Admitted(CallerDependency):
    """Dependency: a caller with the scope `infer`, within the limits.

    Args:
        tokens: Least tokens of a request that are billed. Without any, it needs room in the minute all the same.

    Raises:
        RateLimitError: The tenant or the key has reached a limit.
        CapacityError: What is used is not known, and the database cannot answer now; or what will be used cannot be
            recorded.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__("infer")
        self._tokens = tokens

    async def __call__(self, request: Request, tenant: TenantQuery = None) -> Caller:
        """Called by FastAPI for each request. One dependency does all: each costs as much as the rest of a refusal."""
        services: CoreServices = request.app.state.services
        caller = await super().__call__(request, tenant)
        await admit(
            services,
            caller,
            reservation_of(request),
            self._tokens,
            services.metrics.limited,
            is_counted=not request.state.is_probe,
        )
        return caller


admit_generation = Admitted(tokens=1)
TokenizingCaller = Annotated[Caller, Depends(Admitted(tokens=0))]
