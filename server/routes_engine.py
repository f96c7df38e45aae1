"""What the engine is doing; for admins only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse

from weft.errors import CapacityError
from weft.server import sse
from weft.server.access import Admin
from weft.server.services import Services, Wired

router = APIRouter(tags=["engine"])
POLL_S = 0.5
KEEP_ALIVE = b": keep-alive\n\n"
_ANY: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"schema": {"type": "object"}}}}}


@router.get("/v1/engine", response_class=Response, responses=_ANY)
async def get_engine(services: Wired, _: Admin) -> Response:
    """Show the last steps, adapters per step, pages by kind and resident adapters with their names."""
    return Response(orjson.dumps(await _snapshot(services)), media_type="application/json")


@router.get(
    "/v1/engine/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def stream_engine(services: Wired, _: Admin) -> StreamingResponse:
    """Send a snapshot whenever the engine has moved on."""
    return StreamingResponse(_events(services), headers=sse.HEADERS)


async def _snapshot(services: Services) -> dict[str, Any]:
    status = asdict(await services.engine_status())
    names = await services.registry.version_names(resident["digest"] for resident in status["residents"])
    for resident in status["residents"]:
        resident["adapters"] = names.get(resident["digest"], ())
    return {
        "object": "engine",
        "model": services.served_name,
        "ready": asdict(services.engine.ready or services.ready),
        "http_requests": services.drain.num_running,
        "slots": services.config.adapter.slots,
        "usage_lag_s": services.registry.usage.lag_s(),
        **status,
    }


async def _events(services: Services) -> AsyncIterator[bytes]:
    shown = ("", -1)
    while not services.drain.is_draining:
        try:
            snapshot = await _snapshot(services)
        except CapacityError as error:
            yield sse.error_event(error)
        else:
            newest = (snapshot["boot_id"], snapshot["seq"])
            yield KEEP_ALIVE if newest == shown else sse.event(snapshot)
            shown = newest
        await asyncio.sleep(POLL_S)
