"""Puts the routes together into the app. The caller opens and closes the services."""

from __future__ import annotations

from functools import cache, partial

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware import Middleware

from manylora.server import apis, errors
from manylora.server.adapters import push as routes_push
from manylora.server.adapters import routes as routes_adapters
from manylora.server.auth import browser as routes_session
from manylora.server.auth.middleware import outer_layers
from manylora.server.batches import routes as routes_batches
from manylora.server.generation import models, tokens
from manylora.server.http.boundary import OPEN_WHILE_DRAINING
from manylora.server.http.dashboard import add_dashboard
from manylora.server.http.openapi import openapi_page
from manylora.server.limits.turns import ManagementTurns
from manylora.server.services import Services
from manylora.server.status import routes as routes_status
from manylora.server.tenants import routes as routes_tenants
from manylora.server.usage import routes as routes_usage

LIMITED_ROUTERS = (*map(apis.router_of, apis.GENERATING), tokens.router)
"""Routes that count against the limits of their caller."""
ROUTERS = (
    *LIMITED_ROUTERS,
    routes_batches.router,
    models.router,
    routes_adapters.router,
    routes_push.router,
    routes_tenants.grants_router,
    routes_tenants.router,
    routes_tenants.audit_router,
    routes_session.router,
    routes_usage.router,
    routes_status.router,
    *map(apis.router_of, apis.CONTROLLING),
    routes_status.health_router,
)


def create_app(services: Services) -> FastAPI:
    """The API: CORS outermost, then request ids and the last catch, authentication, turns, and the routes."""
    turns = Middleware(ManagementTurns, exempt=_exempt(), refused=services.metrics.refused)
    app = FastAPI(
        title="Manylora",
        summary="Many LoRA adapters over one base model.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=[
            *outer_layers(
                services.config.server, services.registry, services.drain, services.metrics.answered
            ),
            turns,
        ],
        # Not by include_router: it takes every route apart a second time, which the first requests would wait for.
        routes=[route for router in ROUTERS for route in router.routes],
    )
    app.state.services = services
    add_dashboard(app)
    errors.install(app)
    app.openapi = cache(partial(openapi_page, app))  # type: ignore[method-assign]
    return app


def _exempt() -> frozenset[str]:
    """Paths without turns: they have limits of their own, or tell how the server is."""
    limited = {
        route.path
        for router in LIMITED_ROUTERS
        for route in router.routes
        if isinstance(route, APIRoute)
    }
    return OPEN_WHILE_DRAINING | limited
