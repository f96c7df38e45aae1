"""The beginning and the end of a request's life: its id, the answer while shutting down, and the last catch.

All that a request takes, its part of the memory for bodies first, goes onto one stack in `scope["state"]["ends"]`,
which is closed before the client sees the end of the answer. What is in `scope["state"]["headers"]` makes headers of
the answer.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from manylora.errors import ManyloraError
from manylora.server.errors import answer, error_response
from manylora.server.http.body import BodyBudget, HeldBody
from manylora.server.http.route_facts import PUBLIC_PATHS
from manylora.server.process.drain import Drain

log = structlog.get_logger("manylora.server")
OPEN_WHILE_DRAINING = PUBLIC_PATHS | {"/metrics"}
_DEFAULTS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
"""Answers to a browser's session must not stay in its cache or in a proxy's."""
MakeHeaders = Callable[[], Mapping[str, str]]
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


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
        body = HeldBody(self._bodies)
        ends = AsyncExitStack()
        ends.callback(body.end)
        made: list[MakeHeaders] = []
        scope["state"] = {
            "hop": None,
            "is_probe": False,
            **scope.get("state", {}),
            "request_id": request_id,
            "body": body,
            "ends": ends,
            "headers": made,
        }
        has_started = False

        async def send_and_end(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                if message["status"] >= 400:
                    await ends.aclose()
                self._answered(message["status"])
                self._add_headers(MutableHeaders(scope=message), request_id, made)
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
        self, headers: MutableHeaders, request_id: str, made: Sequence[MakeHeaders]
    ) -> None:
        headers["x-request-id"] = request_id
        for name, value in _DEFAULTS.items():
            headers.setdefault(name, value)
        if self._drain.is_draining:
            headers["connection"] = "close"
        for make in made:
            headers.update(make())


def request_id_of(headers: Headers) -> str:
    """The client's `x-request-id` if it is short and plain, else a fresh one. It is echoed, never relied on."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
