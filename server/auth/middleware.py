"""Authentication before a byte of the body is read: pure ASGI, and every path is closed unless listed as public.

It is the innermost of the layers around all routes. Keys and sessions are looked up in the registry.
`manylora.server.auth.callers` decides what a caller may do.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from manylora.config import ServerConfig, is_loopback
from manylora.errors import (
    AuthenticationError,
    ConflictError,
    ForbiddenError,
    InvalidRequestError,
)
from manylora.registry.access.sessions import LINK_PREFIX
from manylora.registry.records import Identity
from manylora.registry.registry import Registry
from manylora.server.auth.browser import check_own_page, session_token
from manylora.server.http.body import MOST_BODIES, MOST_BYTES, BodyBudget
from manylora.server.http.boundary import Boundary
from manylora.server.http.dashboard import OPEN_PATHS
from manylora.server.http.wire import TRUST
from manylora.server.process.drain import Drain
from manylora.server.process.threads import Acting, acting

GIVEN_ONCE = ("host", "cookie", "origin", "sec-fetch-site")
"""Headers by which sessions are checked. Of several, two servers in a row could each read another one."""
SIGN_IN = "/v1/session"
SESSION_CREATE_PATHS = frozenset({SIGN_IN, f"{SIGN_IN}/links"})
"""A POST here takes a key or a link, never a session: a session that could begin another would never end."""
LOCAL_ADMIN = Identity(role="admin")
"""Every caller, where authentication is off."""


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


class AuthMiddleware:
    """Puts the caller's `Identity` into `scope["state"]["identity"]`.

    A long-lived response can authenticate again with `scope["state"]["identify"]`.

    Args:
        app: What lies behind.
        keys: Where keys are looked up; None makes every caller on this machine an admin.
        uses_links: A link that begins a session is used up. A gateway leaves that to the replica, which looks again.
    """

    def __init__(self, app: ASGIApp, keys: Registry | None, *, uses_links: bool = True) -> None:
        self._app = app
        self._registry = keys
        self._uses_links = uses_links

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its caller.

        Raises:
            RequestError: The caller is not known, or a page of another site asks; `Boundary` answers it.
            CapacityError: The database cannot answer.
        """
        if scope["type"] == "http" and not _is_public(scope):
            identify = partial(self._identify, scope, Headers(scope=scope))
            identity = await identify()
            acting.set(Acting(identity.tenant_id or "", identity.tenant_weight))
            state = scope.get("state", {})
            if trust := state.get(TRUST):
                trust()
            scope["state"] = {**state, "identity": identity, "identify": identify}
        if scope["type"] in ("http", "lifespan"):
            await self._app(scope, receive, send)

    async def _identify(self, scope: Scope, headers: Headers) -> Identity:
        for name in GIVEN_ONCE:
            if len(headers.getlist(name)) > 1:
                raise InvalidRequestError(
                    f"The header {name} must be given once.", code="invalid_http", param=name
                )
        if self._registry is None:
            _check_local_browser(headers)
            return LOCAL_ADMIN
        token = session_token(headers)
        begins = scope["method"] == "POST" and scope["path"] in SESSION_CREATE_PATHS
        if token is not None and not begins and not _given(headers):
            check_own_page(scope, headers)
            return await self._registry.key_ring.identify_session(token)
        secret = _bearer(headers)
        if secret.startswith(LINK_PREFIX) and (scope["method"], scope["path"]) == ("POST", SIGN_IN):
            if token is not None:
                await _check_no_session(self._registry, token)
            return await self._registry.sessions.follow_link(secret, uses_up=self._uses_links)
        return await self._registry.key_ring.authenticate(secret)


def _is_public(scope: Scope) -> bool:
    """True if a request needs no key."""
    return scope["method"] in ("GET", "HEAD") and bool(OPEN_PATHS.fullmatch(scope["path"]))


async def _check_no_session(registry: Registry, token: str) -> None:
    """Refuse a link where a session is open: a link of somebody else's would put their session in its place.

    Raises:
        ConflictError: The session of this token is open.
    """
    try:
        await registry.key_ring.identify_session(token)
    except AuthenticationError:
        return
    message = (
        "You are signed in already, so the link was not used. Sign out first, then open it again."
    )
    raise ConflictError(message, code="session.open")


def _given(headers: Headers) -> list[str]:
    """Values of the Authorization header; without one, the keys as Anthropic's clients send them."""
    return headers.getlist("authorization") or [
        f"Bearer {key}" for key in headers.getlist("x-api-key")
    ]


def _bearer(headers: Headers) -> str:
    values = _given(headers)
    if not values:
        message = "No API key was given: send the header 'Authorization: Bearer <key>'."
        raise AuthenticationError(message, code="auth.missing")
    scheme, _, key = values[0].partition(" ")
    key = key.strip()
    if len(values) > 1 or scheme.lower() != "bearer" or not key:
        wanted = "Authorization header must be 'Bearer <key>'"
        if "authorization" not in headers:
            wanted = "x-api-key header must be a key"
        raise AuthenticationError(f"The {wanted}, given once.")
    return key


def _check_local_browser(headers: Headers) -> None:
    """Keep web pages of other sites out of a server without keys: their Origin or Host gives them away."""
    origin = headers.get("origin")
    try:
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        if "." in host:
            ipaddress.ip_address(host)
        is_foreign = origin is not None and not is_loopback(urlsplit(origin).hostname or "")
    except ValueError:  # a name with a dot, or a Host or Origin that no browser of ours writes
        is_foreign = True
    if is_foreign:
        raise ForbiddenError(
            "Authentication is off, so Manylora answers only web pages of this machine."
        )
