"""Browser sessions: how the cookie is set, and which pages may use it.

Pages of other sites or ports cannot use it, because the browser tells where a request comes from.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Literal

from fastapi import APIRouter, Request, Response
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import Scope

from manylora.errors import CapacityError, ForbiddenError, InvalidRequestError
from manylora.registry.records import Credential
from manylora.registry.registry import Registry
from manylora.server.auth.callers import AnyCaller, Caller
from manylora.server.http.bodies import Moment, View, iso
from manylora.server.services import Wired

COOKIE = "manylora_session"
OWN_SITES = frozenset({"same-origin", "none"})
"""Values of Sec-Fetch-Site that our own pages, and the address bar, have."""
SAFE_METHODS = frozenset({"GET", "HEAD"})


def cookie_name(headers: Headers) -> str:
    """The cookie's name with the port: browsers share cookies among ports, and two servers must not overwrite one."""
    port = re.search(r":([0-9]{1,5})$", headers.get("host", ""))
    return f"{COOKIE}_{port[1]}" if port else COOKIE


def session_token(headers: Headers) -> str | None:
    """The token that the browser sent."""
    return cookie_parser(headers.get("cookie", "")).get(cookie_name(headers)) or None


def check_own_page(scope: Scope, headers: Headers) -> None:
    """Refuse requests that a page of another site made the browser send.

    Raises:
        ForbiddenError: It was another site's page, or the browser does not say.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        is_own = site in OWN_SITES
    else:  # sent over TLS and to this machine only; else changes carry their origin
        origin = headers.get("origin")
        is_own = (
            scope["method"] in SAFE_METHODS
            if origin is None
            else _host_of(origin) == headers.get("host", "")
        )
    if not is_own:
        raise ForbiddenError(
            "A session serves Manylora's own pages only: send an API key.",
            code="session.foreign_page",
        )


def _host_of(origin: str) -> str | None:
    return origin.partition("://")[2] or None


router = APIRouter(tags=["session"])


class SessionView(View):
    """A browser's session; its cookie is in the header."""

    object: Literal["session"] = "session"
    role: Literal["admin", "tenant"]
    tenant: str | None
    expires_at: Moment


class LinkView(View):
    """A link that begins a session, once."""

    object: Literal["session.link"] = "session.link"
    link: str
    expires_at: Moment


@router.post("/v1/session", status_code=201)
async def begin_session(
    request: Request, response: Response, services: Wired, caller: AnyCaller
) -> SessionView:
    """Begin a browser's session with the key, or the link, of the Authorization header; the cookie ends in 12 hours."""
    token, ends = await services.registry.sessions.begin_session(_credential(caller))
    _set_cookie(request, response, token, ends)
    return SessionView(
        role=caller.identity.role, tenant=caller.identity.tenant, expires_at=iso(ends)
    )


@router.delete("/v1/session", status_code=204, response_class=Response)
async def end_session(request: Request, response: Response, services: Wired, _: AnyCaller) -> None:
    """End the browser's session, everywhere and at once."""
    token = session_token(request.headers)
    if token is not None:
        await services.registry.sessions.end_session(token)
    _set_cookie(request, response, "", None)


def _set_cookie(request: Request, response: Response, token: str, ends: datetime | None) -> None:
    """Set the session's cookie, or delete it where `ends` is None."""
    protocols = (request.url.scheme, request.headers.get("x-forwarded-proto"))
    response.set_cookie(
        cookie_name(request.headers),
        token,
        max_age=0 if ends is None else None,
        expires=ends,
        secure="https" in protocols,
        httponly=True,
        samesite="strict",
    )


@router.post("/v1/session/links", status_code=201)
async def make_link(services: Wired, caller: AnyCaller) -> LinkView:
    """Make a link that begins a session like this key's, once, within ten minutes: put it behind `/#link=`."""
    token, ends = await services.registry.sessions.begin_session(_credential(caller), "link")
    return LinkView(link=token, expires_at=iso(ends))


def _credential(caller: Caller) -> Credential:
    credential = caller.identity.credential
    if credential is None:
        raise InvalidRequestError(
            "Authentication is off: there is nothing to sign in to.", code="auth.off"
        )
    return credential


async def sign_in_fragment(registry: Registry, admin_key: str) -> str:
    """End of the dashboard's address that signs the admin in once; empty while the database is away."""
    try:
        admin = (await registry.key_ring.authenticate(admin_key)).credential
        link, _ = await registry.sessions.begin_session(admin, "link") if admin else ("", None)
    except CapacityError:  # it stops no server
        return ""
    return f"#link={link}"
