"""Turns of tenants at the event loop, so that none waits behind all requests of another.

Checking and planning a request that generates takes half a millisecond. When the streams of a busy tenant end together,
hundreds of its next requests arrive at once: `Arrivals` lets a few of them in per round of the loop.

A request that generates nothing has one of a few places from its authentication until its answer begins, but not while
its body comes (`ManagementTurns`). What takes longer than usual waits for something that has turns of its own (a child
process, storage, the database, the engine), so it goes on without a place.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Set
from contextlib import ExitStack

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manylora.errors import RateLimitError
from manylora.server.process.fair_semaphore import FairSemaphore
from manylora.server.process.threads import Acting, acting

REQUESTS_A_ROUND = 4
"""Requests that generate, per round of the event loop."""
PLACES = 2
"""Requests that generate nothing, at the same time; twice as many while a tenant has more than its share."""
LONGEST_S = 1.0
"""Seconds for which such a request holds a place at most."""
MOST_OPEN = 128
"""Such requests of a tenant that wait, or are not answered yet."""
AGAIN_S = 1.0
"""Retry-After in seconds of those that are refused."""
CODE = "limit.management"


class Arrivals:
    """Lets in requests that generate, tenants in turns. Thread: one event loop."""

    def __init__(self) -> None:
        self._room = REQUESTS_A_ROUND
        """Requests that may still come in this round; each takes its place with it to the next round."""
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}
        """Waiting requests by tenant; the first tenant is the next one."""

    async def turn(self, tenant: str) -> None:
        """Wait for the turn of this request; returns at once unless others arrived in the same round."""
        loop = asyncio.get_running_loop()
        if self._room:  # then nobody waits
            self._enter(loop)
            return
        waiter: asyncio.Future[None] = loop.create_future()
        self._lines.setdefault(tenant, deque()).append(waiter)
        await waiter

    def _enter(self, loop: asyncio.AbstractEventLoop) -> None:
        self._room -= 1
        loop.call_soon(self._leave_round, loop)

    def _leave_round(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give a place of the last round to the next request."""
        self._room += 1
        while self._room and self._lines:
            tenant, line = next(iter(self._lines.items()))
            del self._lines[tenant]
            waiter = line.popleft()
            if line:
                self._lines[tenant] = line
            if not waiter.done():  # its client is still there
                waiter.set_result(None)
                self._enter(loop)


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
        turn = ManagementTurn(self._places, tenant)
        scope["state"] = {**scope["state"], "turn": turn}
        with ExitStack() as until_answered:
            self._open[tenant.tenant] += 1
            until_answered.callback(self._leave, tenant.tenant)

            async def send_in_turn(message: Message) -> None:
                if message["type"] == "http.response.start":
                    turn.leave()
                    until_answered.close()
                await send(message)

            try:
                await turn.take()
                await self._app(scope, receive, send_in_turn)
            finally:
                turn.leave()

    def _leave(self, tenant: str) -> None:
        self._open[tenant] -= 1
        if not self._open[tenant]:
            del self._open[tenant]


class ManagementTurn:
    """One request's place. Its owner must call `leave` at the end, whatever happens.

    Args:
        places: Where it is one of.
        tenant: Whose request it is.
    """

    def __init__(self, places: FairSemaphore, tenant: Acting) -> None:
        self._places = places
        self._tenant = tenant
        self._held = ExitStack()

    async def take(self) -> None:
        """Wait for a place, and hold it for `LONGEST_S` seconds at most."""
        self._held.callback(await self._places.take(*self._tenant))
        timer = asyncio.get_running_loop().call_later(LONGEST_S, self.leave)
        self._held.callback(timer.cancel)

    def leave(self) -> None:
        """Give the place back, if it is held."""
        self._held.close()


def _too_many() -> RateLimitError:
    message = (
        f"{MOST_OPEN} requests of this tenant that generate nothing wait for their answers already."
    )
    return RateLimitError(
        f"{message} Try again in {AGAIN_S:g} s.", retry_after_s=AGAIN_S, code=CODE
    )
