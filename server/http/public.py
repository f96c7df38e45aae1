"""What is answered without a key: a few paths, and the dashboard's files."""

from __future__ import annotations

from starlette.types import Scope

from weft.server.http.dashboard import is_dashboard

PUBLIC_PATHS = frozenset({"/health", "/ready", "/version", "/openapi.json"})
"""Answered without a key, to GET and HEAD."""


def is_public(scope: Scope) -> bool:
    """Whether a request needs no key."""
    return (scope["path"] in PUBLIC_PATHS and scope["method"] in ("GET", "HEAD")) or is_dashboard(scope)
