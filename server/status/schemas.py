"""Bodies of health and version."""

from __future__ import annotations

from weft.server.http.bodies import View


class HealthView(View):
    """Answer of GET /health and /ready."""

    status: str


class VersionNumberView(View):
    """Answer of GET /version."""

    version: str
