"""What needs no key: is it alive, is it ready, which version is it. And the metrics, which do."""

from __future__ import annotations

from fastapi import APIRouter, Response

import weft
from weft.errors import EngineUnavailableError
from weft.server.auth.callers import Admin
from weft.server.services import Services, Wired
from weft.server.status import metrics
from weft.server.status.schemas import HealthView, VersionNumberView

router = APIRouter(tags=["health"])


@router.get("/health")
async def health() -> HealthView:
    """Answer as long as the process does."""
    return HealthView(status="ok")


@router.get("/ready")
async def ready(services: Wired) -> HealthView:
    """Answer 200 when requests are taken, else 503 with the reason."""
    services.drain.check()
    if services.engine.ready is None:
        raise EngineUnavailableError("The engine is starting; try again in a moment.", code="engine_starting")
    await services.registry.check()
    return HealthView(status="ready")


@router.get("/version")
async def version() -> VersionNumberView:
    """Tell Weft's version."""
    return VersionNumberView(version=weft.__version__)


for _path, _answer in (("/health", health), ("/ready", ready), ("/version", version)):
    router.add_api_route(_path, _answer, methods=["HEAD"], include_in_schema=False)  # load balancers ask so


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def get_metrics(services: Wired, _: Admin) -> Response:
    """Metrics for Prometheus."""
    return await metrics_response(services)


async def metrics_response(services: Services) -> Response:
    """The metrics as they are now; without the engine's while it is away."""
    try:
        status = await services.engine_status()
    except EngineUnavailableError:
        status = None
    return Response(
        services.metrics.render(status, services.registry.usage.lag_s()), headers={"content-type": metrics.CONTENT_TYPE}
    )
