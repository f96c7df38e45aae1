"""The outermost ASGI layers: CORS, request ids, the answer while shutting down, the last catch, and authentication.

A request's life begins and ends here. All that it takes, its part of its caller's limits and of the memory for bodies
first, goes onto one stack in `scope["state"]["ends"]`, which is closed before the client sees the end of the answer.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manylora.config import ServerConfig
from manylora.errors import ManyloraError
from manylora.registry.registry import Registry
from manylora.server.auth.middleware import AuthMiddleware
from manylora.server.errors import answer, error_response
from manylora.server.http.body import MOST_BODIES, MOST_BYTES, BodyBudget, HeldBody
from manylora.server.http.route_facts import PUBLIC_PATHS
from manylora.server.limits.reservation import LimitReservation
from manylora.server.process.drain import Drain

log = structlog.get_logger("manylora.server")
OPEN_WHILE_DRAINING = PUBLIC_PATHS | {"/metrics"}
_DEFAULTS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
"""Answers to a browser's session must not stay in its cache or in a proxy's."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


def outer_layers(
    config: ServerConfig, registry: Registry, drain: Drain, answered: Callable[[int], None]
) -> list[Middleware]:
    """Layers around the routes of every role, outermost first: CORS, then `Boundary`, then authentication."""
    keys = registry if config.auth == "on" else None
    bodies = BodyBudget(max(MOST_BYTES, MOST_BODIES * config.max_body_bytes))
    layers = [
        Middleware(Boundary, drain=drain, answered=answered, bodies=bodies),
        Middleware(AuthMiddleware, keys=keys, uses_links=config.role != "gateway"),
    ]
    if origins := config.allowed_origins:
        # Without credentials, so no cookie: a page of another origin needs a key of its own.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
        layers.insert(0, cors)
    return layers


class Boundary:
    """Pure ASGI; nothing but lifespan and HTTP passes."""

    def __init__(
        self, app: ASGIApp, drain: Drain, answered: Callable[[int], None], bodies: BodyBudget
    ) -> None:
        self._app = app
        self._drain = drain
        self._bodies = bodies
        self._answered = answered
        """Called with the status of each answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and answer also where that fails."""
        if scope["type"] == "http":
            await self._answer(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(Headers(scope=scope))
        reservation = LimitReservation()
        body = HeldBody(self._bodies)
        ends = AsyncExitStack()
        ends.callback(body.end)
        ends.callback(reservation.end)
        scope["state"] = {
            **scope.get("state", {}),
            "request_id": request_id,
            "reservation": reservation,
            "body": body,
            "ends": ends,
        }
        has_started = False

        async def send_and_end(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                if message["status"] >= 400:
                    await ends.aclose()
                self._answered(message["status"])
                self._add_headers(MutableHeaders(scope=message), request_id, reservation)
            elif not message.get("more_body", False):
                await ends.aclose()  # before the client sees the end and sends its next request
            await send(message)

        async with ends:
            await self._pass_on(scope, receive, send_and_end, lambda: has_started)

    async def _pass_on(
        self, scope: Scope, receive: Receive, send: Send, has_started: Callable[[], bool]
    ) -> None:
        path = scope["path"]
        try:
            if path not in OPEN_WHILE_DRAINING:
                self._drain.check()
            await self._app(scope, receive, send)
        except ClientDisconnect:
            return  # the client is gone
        except Exception as error:
            shown = error if isinstance(error, ManyloraError) else ManyloraError(str(error))
            if answer(shown)[0] == 500:
                request_id = scope["state"]["request_id"]
                log.exception("internal_error", request_id=request_id, path=path[:512])
            if has_started():
                raise
            await error_response(shown, path)(scope, receive, send)

    def _add_headers(
        self, headers: MutableHeaders, request_id: str, reservation: LimitReservation
    ) -> None:
        headers["x-request-id"] = request_id
        for name, value in _DEFAULTS.items():
            headers.setdefault(name, value)
        if self._drain.is_draining:
            headers["connection"] = "close"
        headers.update(reservation.headers())


def request_id_of(headers: Headers) -> str:
    """The client's `x-request-id` if it is short and plain, else a fresh one. It is echoed, never relied on."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
