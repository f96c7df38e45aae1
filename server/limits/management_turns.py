"""Turns of requests that generate nothing: tenants share a few places by weight, so that one in loops delays no others.

Such a request has a place from its authentication until its answer begins, but not while its body comes. What takes
longer than usual waits for something that has turns of its own (a child process, storage, the database, the engine),
so it goes on without a place.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Set

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manylora.errors import RateLimitError
from manylora.server.process.fair_semaphore import FairSemaphore
from manylora.server.process.threads import Acting, acting

PLACES = 2
"""Requests at the same time, which share one event loop; twice as many while a tenant has more than its share."""
LONGEST_S = 1.0
"""Seconds for which a place is held at most."""
MOST_OPEN = 128
"""Requests of a tenant that wait, or are not answered yet."""
AGAIN_S = 1.0
"""Retry-After in seconds of what is refused."""
CODE = "limit.management"


class ManagementTurns:
    """ASGI middleware behind authentication; requests without a caller pass.

    Args:
        app: What lies behind.
        exempt: Paths that have limits of their own, or must always answer.
        refused: Called with the error code and the tenant's name, None for admins, of a request that is refused.
    """

    def __init__(
        self, app: ASGIApp, exempt: Set[str], refused: Callable[[str, str | None], None]
    ) -> None:
        self._app = app
        self._exempt = exempt
        self._refused = refused
        self._places = FairSemaphore(PLACES, spare=PLACES)
        self._open: Counter[str] = Counter()
        """Requests that are not answered yet, by tenant."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on in its turn.

        Raises:
            RateLimitError: The tenant has too many requests open.
        """
        if (
            scope["type"] != "http"
            or scope["path"] in self._exempt
            or "identity" not in scope["state"]
        ):
            await self._app(scope, receive, send)
            return
        tenant = acting.get()
        if self._open[tenant.tenant] >= MOST_OPEN:
            self._refused(CODE, scope["state"]["identity"].tenant)
            raise _too_many()
        self._open[tenant.tenant] += 1
        turn = ManagementTurn(self._places, tenant, lambda: self._leave(tenant.tenant))
        scope["state"] = {**scope["state"], "turn": turn}

        async def send_in_turn(message: Message) -> None:
            if message["type"] == "http.response.start":
                turn.end()
            await send(message)

        try:
            await turn.take()
            await self._app(scope, receive, send_in_turn)
        finally:
            turn.end()

    def _leave(self, tenant: str) -> None:
        self._open[tenant] -= 1
        if not self._open[tenant]:
            del self._open[tenant]


class ManagementTurn:
    """One request's place. Its owner must call `end`, whatever happens.

    Args:
        places: Where it is one of.
        tenant: Whose request it is.
        at_end: Called once, at the end.
    """

    def __init__(self, places: FairSemaphore, tenant: Acting, at_end: Callable[[], None]) -> None:
        self._places = places
        self._tenant = tenant
        self._at_end: Callable[[], None] | None = at_end
        self._give_back: Callable[[], None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def take(self) -> None:
        """Wait for a place, and hold it for `LONGEST_S` seconds at most."""
        self._give_back = await self._places.take(*self._tenant)
        self._timer = asyncio.get_running_loop().call_later(LONGEST_S, self.leave)

    def leave(self) -> None:
        """Give the place back, if it is held."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._give_back is not None:
            give_back, self._give_back = self._give_back, None
            give_back()

    def end(self) -> None:
        """Give the place back; the request is not open any more. Later calls do nothing."""
        self.leave()
        if self._at_end is not None:
            at_end, self._at_end = self._at_end, None
            at_end()


def _too_many() -> RateLimitError:
    message = (
        f"{MOST_OPEN} requests of this tenant that generate nothing wait for their answers already."
    )
    return RateLimitError(
        f"{message} Try again in {AGAIN_S:g} s.", retry_after_s=AGAIN_S, code=CODE
    )
