"""Refusals of a gateway before it reads a body, which it must have to choose a replica.

Requests of a caller that no replica has answered yet count against its limit `concurrent_requests` here; replicas
count the others. Before a long body is read, a replica says whether the caller's limits let
a request in at all, in the words that the client then gets.
"""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from manylora.registry.limits import Limits
from manylora.registry.records import Identity
from manylora.server.admission.rates import reservation_of
from manylora.server.cluster.forwarding import BROKEN, Forwarding, url_of, whole
from manylora.server.cluster.links import Links
from manylora.server.cluster.router import Target
from manylora.server.cluster.wire import PROBE
from manylora.server.http.body import content_length
from manylora.server.limits.accounts import Accounts, Holder, LimitedAccount
from manylora.server.process.drain import Exchange

LONG_BYTES = 16 * 1024
"""A body of more bytes is read only after a replica said that its request may come in."""


class BeforeBody:
    """Decides by a request's head. Thread: the event loop's.

    Args:
        links: The replicas, and what chooses among them.
        forwarding: Makes headers for them.
    """

    def __init__(self, links: Links, forwarding: Forwarding) -> None:
        self._links = links
        self._forwarding = forwarding
        self.num_refused = 0
        """Requests beyond the limit `concurrent_requests` of their tenant or key."""
        self._accounts = Accounts()
        """Requests that no replica has answered yet, by tenant and key."""

    def count(self, request: Request, tenant_id: str | None, tenant_limits: Limits) -> None:
        """Count a request until its reservation ends, which is when a replica answers.

        Raises:
            RateLimitError: As many are on their way as the tenant or the key may have.
        """
        identity: Identity = request.state.identity
        now_s = time.monotonic()
        held: list[tuple[Holder, str | None, Limits]] = [
            ("tenant", tenant_id, tenant_limits),
            ("key", identity.key_id, identity.key_limits),
        ]
        accounts = [
            LimitedAccount(
                holder,
                name,
                self._accounts.of(name, now_s),
                Limits(concurrent_requests=limits.concurrent_requests),
            )
            for holder, name, limits in held
            if name is not None
        ]
        reservation_of(request).admit(accounts, time.monotonic, self._refused, 0)

    async def refusal(self, request: Request, exchange: Exchange) -> Response | None:
        """A replica's refusal of a request whose body is long; None where it is to be read."""
        length = content_length(request)
        if (length or 0) <= LONG_BYTES and "transfer-encoding" not in request.headers:
            return None
        tenant = request.state.identity.tenant or ""
        # The same for all requests of a tenant: what a replica holds of its limits is there.
        order = self._links.router.order(
            Target(adapter=None, units=0.0, tenant=tenant, affinity=tenant.encode())
        )
        if not order:
            return None
        url = url_of(order[0], request)
        headers = [*self._forwarding.headers_for_replica(request), (PROBE, "1")]
        try:
            with exchange.running(), self._links.using(order[0].name, exchange.lose):
                async with self._links.session.post(
                    url, headers=headers, allow_redirects=False
                ) as answer:
                    body = await answer.read()
        except BROKEN:
            self._links.router.failed(order[0].name)
            return None
        return whole(answer, body) if 400 <= answer.status < 500 else None

    def _refused(self, _limit: str) -> None:
        self.num_refused += 1
