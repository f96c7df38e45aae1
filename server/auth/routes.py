"""Signing in to the dashboard: a session begins with a key, or with a link that works once."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from weft.errors import InvalidRequestError
from weft.registry.records import Credential
from weft.server.auth.browser import session_cookie, session_token
from weft.server.auth.callers import AnyCaller, Caller
from weft.server.responses import LinkView, SessionView, iso
from weft.server.services import Wired

router = APIRouter(tags=["session"])


@router.post("/v1/session", status_code=201)
async def begin_session(request: Request, response: Response, services: Wired, caller: AnyCaller) -> SessionView:
    """Begin a browser's session with the key, or the link, of the Authorization header; the cookie ends in 12 hours."""
    token, ends = await services.registry.begin_session(_credential(caller))
    response.headers["set-cookie"] = session_cookie(request.scope, request.headers, token, ends)
    return SessionView(role=caller.identity.role, tenant=caller.identity.tenant, expires_at=iso(ends))


@router.delete("/v1/session", status_code=204)
async def end_session(request: Request, services: Wired, _: AnyCaller) -> Response:
    """End the browser's session, everywhere and at once."""
    token = session_token(request.headers)
    if token is not None:
        await services.registry.end_session(token)
    cookie = session_cookie(request.scope, request.headers, "", None)
    return Response(status_code=204, headers={"set-cookie": cookie})


@router.post("/v1/session/links", status_code=201)
async def make_link(services: Wired, caller: AnyCaller) -> LinkView:
    """Make a link that begins a session like this key's, once, within ten minutes: put it behind `/#link=`."""
    token, ends = await services.registry.begin_session(_credential(caller), "link")
    return LinkView(link=token, expires_at=iso(ends))


def _credential(caller: Caller) -> Credential:
    credential = caller.identity.credential
    if credential is None:
        raise InvalidRequestError("Authentication is off: there is nothing to sign in to.", code="auth.off")
    return credential
