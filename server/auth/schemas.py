"""Bodies of browser sessions."""

from __future__ import annotations

from typing import Literal

from weft.server.http.bodies import Moment, View


class SessionView(View):
    """A browser's session; its cookie is in the header."""

    object: Literal["session"] = "session"
    role: Literal["admin", "tenant"]
    tenant: str | None
    expires_at: Moment


class LinkView(View):
    """What begins a session once."""

    object: Literal["session.link"] = "session.link"
    link: str
    expires_at: Moment
