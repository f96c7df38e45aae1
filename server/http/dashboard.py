"""Answers without a key: the dashboard's files, and a few paths.

The dashboard is one page for every path of it, and modules, styles and pictures below /static.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from manylora.server.http.route_facts import PUBLIC_PATHS

STATIC = Path(__file__).resolve().parents[1] / "static"
PAGES = (
    "/",
    "/usage",
    "/adapters",
    "/adapters/{name}",
    "/live",
    "/playground",
    "/tenants",
    "/tenants/{name}",
    "/account",
    "/audit",
)
"""Paths of the one page. Its script reads from the address what to show."""
HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",  # browsers ask each time; an unchanged file is not sent again
}
OPEN_PATHS = re.compile(
    "|".join(
        [*(re.sub(r"\{\w+\}", "[^/]+", page) for page in PAGES), *map(re.escape, PUBLIC_PATHS)]
    )
    + "|/static/.+|/favicon\\.ico"
)
"""Paths that are answered without a key, to GET and HEAD."""


class DashboardFiles(StaticFiles):
    """Files with the headers that keep a page to this server."""

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        """The file, or 304 if the ETag matches."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(HEADERS)
        return response


def add_dashboard(app: FastAPI) -> None:
    """Serve the dashboard from this app."""
    files = DashboardFiles(directory=STATIC)

    async def send(name: str, request: Request) -> Response:
        return await files.get_response(name, request.scope)

    for path in PAGES:
        app.add_route(path, partial(send, "index.html"), include_in_schema=False)
    # Browsers ask for it, whatever the page says.
    app.add_route("/favicon.ico", partial(send, "manylora.svg"), include_in_schema=False)
    app.mount("/static", files)
