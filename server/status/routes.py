"""Routes without a key: alive, ready, version; and for admins: metrics, the engine's state and its live feed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import asdict, fields
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

import manylora
from manylora.errors import (
    AuthenticationError,
    CapacityError,
    EngineUnavailableError,
    NotFoundError,
)
from manylora.registry.records import Identity
from manylora.server.auth.callers import Admin
from manylora.server.http import sse
from manylora.server.http.bodies import View
from manylora.server.http.openapi import OBJECT, TEXT, sends
from manylora.server.services import Services, Wired
from manylora.server.telemetry import metrics

ValueT = TypeVar("ValueT")
router = APIRouter(tags=["engine"])
health_router = APIRouter(tags=["health"])
Named = Annotated[
    str | None, Query(alias="server", description="The replica that a gateway is to ask, by name.")
]
ADMIN = "(admin)"
"""Name shown for requests of an admin without a tenant; no tenant can have it."""


@router.get("/v1/engine", response_class=Response, responses=sends("application/json", OBJECT))
async def get_engine(services: Wired, _: Admin, named: Named = None) -> Response:
    """Show the last steps, adapters per step, pages by kind and place, resident adapters and tenants by name."""
    _check_name(services, named)
    return Response(orjson.dumps(await _snapshot(services)), media_type="application/json")


@router.get(
    "/v1/engine/events",
    response_class=StreamingResponse,
    responses=sends("text/event-stream", TEXT),
)
async def stream_engine(
    request: Request, services: Wired, _: Admin, named: Named = None
) -> StreamingResponse:
    """Send a snapshot whenever the engine has moved on, at most twice a second; `engine_error` while it is away."""
    _check_name(services, named)
    events = services.engine_feed.events(
        lambda: _snapshot(services), lambda: services.drain.is_draining
    )
    return sse.ClosingResponse(_while_known(events, request.state.identify), headers=sse.HEADERS)


def _check_name(services: Services, named: str | None) -> None:
    if named not in (None, services.server_name):
        raise NotFoundError(
            f"This server is {services.server_name}; GET /v1/servers of a gateway lists all.",
            param="server",
        )


async def _while_known(
    events: AsyncGenerator[bytes, None], identify: Callable[[], Awaitable[Identity]]
) -> AsyncGenerator[bytes, None]:
    """The events, until the listener's key or session is no longer valid."""
    async with aclosing(events):
        async for event in events:
            with suppress(CapacityError):  # a listener stays while the database is away
                try:
                    await identify()
                except AuthenticationError:
                    return
            yield event


async def _snapshot(services: Services) -> dict[str, Any]:
    status = await services.engine_status(is_detailed=True)
    admission = services.limits.gate.snapshot()
    batches = status.batches
    digests = {
        *(batches.adapters if batches else ()),
        *(resident.digest for resident in status.residents),
    }
    names = await services.registry.adapters.version_names(digests)
    tenants = {*status.tenants, *status.service_tokens, *admission}
    tenant_names = {"": ADMIN, **await services.registry.tenants.tenant_names(tenants)}
    return {
        "object": "engine",
        "model": services.served_name,
        "role": services.config.server.role,
        "server": services.server_name,
        "ready": services.engine.ready or services.ready,
        "http_requests": services.drain.num_running,
        "slots": services.ready.memory.slots,
        "usage_lag_s": services.registry.usage.lag_s(),
        # Far cheaper than `asdict`, and orjson writes dataclasses.
        **{field.name: getattr(status, field.name) for field in fields(status)},
        "tenants": _by_name(status.tenants, tenant_names),
        "service_tokens": _by_name(status.service_tokens, tenant_names),
        "admission": _by_name(admission, tenant_names),
        "residents": [{**asdict(r), "adapters": names.get(r.digest, ())} for r in status.residents],
        "batches": batches
        and {
            "adapters": [
                {"digest": digest, "adapters": names.get(digest, ())} for digest in batches.adapters
            ],
            "steps": batches.steps,
        },
    }


def _by_name(by_id: Mapping[str, ValueT], names: Mapping[str, str]) -> dict[str, ValueT]:
    """Values by tenant name instead of id; a deleted tenant keeps its id."""
    return {names.get(tenant_id, tenant_id): value for tenant_id, value in by_id.items()}


class HealthView(View):
    """Answer of GET /health and /ready."""

    status: str


class VersionNumberView(View):
    """Answer of GET /version."""

    version: str


@health_router.get("/health")
async def health() -> HealthView:
    """Answer as long as the process does."""
    return HealthView(status="ok")


@health_router.get("/ready")
async def ready(services: Wired) -> HealthView:
    """Answer 200 when requests are taken, else 503 with the reason. While the engine is paused they are, and wait."""
    await check_ready(services)
    return HealthView(status="paused" if services.engine.is_paused else "ready")


@health_router.get("/version")
async def version() -> VersionNumberView:
    """Tell Manylora's version."""
    return VersionNumberView(version=manylora.__version__)


for _path, _answer in (("/health", health), ("/ready", ready), ("/version", version)):
    health_router.add_api_route(
        _path, _answer, methods=["HEAD"], include_in_schema=False
    )  # load balancers ask so


@health_router.get(
    "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}}
)
async def get_metrics(services: Wired, _: Admin) -> Response:
    """Metrics for Prometheus."""
    return await metrics_response(services)


async def check_ready(services: Services) -> None:
    """Return if requests are taken.

    Raises:
        CapacityError: They are not, and why; its code is one of `metrics.NOT_READY`.
    """
    services.drain.check(or_near=True)
    if services.engine.ready is None:
        raise EngineUnavailableError(
            "The engine is starting; try again in a moment.", code="engine_starting"
        )
    await services.registry.check()


async def why_not_ready(services: Services) -> str | None:
    """The code of what `check_ready` raises; None if it returns."""
    try:
        await check_ready(services)
    except CapacityError as error:
        return error.code
    return None


async def metrics_response(services: Services) -> Response:
    """The metrics as they are now; without the engine's while it is away."""
    try:
        status = await services.engine_status()
    except EngineUnavailableError:
        status = None
    page = services.metrics.render(
        status, services.registry.usage.lag_s(), await why_not_ready(services)
    )
    return Response(page, headers={"content-type": metrics.CONTENT_TYPE})
