"""Who is calling, decided before a byte of the body is read: pure ASGI, everything closed unless listed as public.

Knows keys only through the registry. What a caller may do is decided in `weft.server.access`.
"""

from __future__ import annotations

import ipaddress
from typing import Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.config import is_loopback
from weft.errors import AuthenticationError, ForbiddenError, WeftError
from weft.registry.records import SCOPES, Identity
from weft.server.errors import error_response

PUBLIC_PATHS = frozenset({"/health", "/ready", "/version", "/openapi.json"})
"""Answered without a key, to GET and HEAD."""
MAX_KEY_LENGTH = 512
LOCAL_ADMIN = Identity(role="admin", tenant_id=None, tenant=None, key_id=None, scopes=SCOPES)
"""Everybody, where authentication is off."""


class KeyStore(Protocol):
    """What authentication needs of the registry."""

    async def authenticate(self, secret: str) -> Identity:
        """Who holds this key; raises AuthenticationError."""
        ...


class AuthMiddleware:
    """Puts the caller's `Identity` into `scope["state"]["identity"]`, or answers 401.

    Args:
        app: What lies behind.
        keys: Where keys are looked up; None lets everybody on this machine in as admin.
    """

    def __init__(self, app: ASGIApp, keys: KeyStore | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its caller, or answer 401."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        if scope["path"] not in PUBLIC_PATHS or scope["method"] not in ("GET", "HEAD"):
            try:
                identity = await self._identify(Headers(scope=scope))
            except WeftError as error:
                await error_response(error)(scope, receive, send)
                return
            scope["state"] = {**scope.get("state", {}), "identity": identity}
        await self._app(scope, receive, send)

    async def _identify(self, headers: Headers) -> Identity:
        if self._keys is None:
            _check_local_browser(headers)
            return LOCAL_ADMIN
        return await self._keys.authenticate(_bearer(headers))


def _bearer(headers: Headers) -> str:
    values = headers.getlist("authorization")
    if not values:
        raise AuthenticationError(
            "No API key was given: send the header 'Authorization: Bearer <key>'.", code="auth.missing"
        )
    scheme, _, key = values[0].partition(" ")
    key = key.strip()
    if len(values) > 1 or scheme.lower() != "bearer" or not key:
        raise AuthenticationError("The Authorization header must be 'Bearer <key>', given once.")
    if len(key) > MAX_KEY_LENGTH:
        raise AuthenticationError("The API key is not valid.")
    return key


def _check_local_browser(headers: Headers) -> None:
    """Keep web pages of other sites out of a server without keys: their Origin or Host gives them away."""
    origin = headers.get("origin")
    try:
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        is_foreign = origin is not None and not is_loopback(urlsplit(origin).hostname or "")
    except ValueError:  # no browser of ours writes such a Host or Origin
        host, is_foreign = "", True
    if is_foreign or ("." in host and not _is_address(host)):
        raise ForbiddenError("Without authentication, Weft answers only pages of this machine.")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
