"""What the engine is doing; for admins only."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import asdict, fields
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from weft.engine.status import EngineStatus
from weft.errors import AuthenticationError, CapacityError
from weft.registry.records import Identity
from weft.server.auth.callers import Admin
from weft.server.http import sse
from weft.server.services import Services, Wired

ValueT = TypeVar("ValueT")
router = APIRouter(tags=["engine"])
ADMIN = "(admin)"
"""Stands for the tenant where an admin asked without one; no tenant can be called so."""
_ANY: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"schema": {"type": "object"}}}}}


@router.get("/v1/engine", response_class=Response, responses=_ANY)
async def get_engine(services: Wired, _: Admin) -> Response:
    """Show the last steps, adapters per step, pages by kind and place, resident adapters and tenants by name."""
    return Response(orjson.dumps(await _snapshot(services)), media_type="application/json")


class _EventsResponse(StreamingResponse):
    """Closes its events when the client leaves, instead of whenever they are collected as garbage."""

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().stream_response(send)


@router.get(
    "/v1/engine/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def stream_engine(request: Request, services: Wired, _: Admin) -> StreamingResponse:
    """Send a snapshot whenever the engine has moved on, at most twice a second; `engine_error` while it is away."""
    events = services.engine_feed.events(lambda: _snapshot(services), lambda: services.drain.is_draining)
    return _EventsResponse(_while_known(events, request.state.identify), headers=sse.HEADERS)


async def _while_known(
    events: AsyncGenerator[bytes, None], identify: Callable[[], Awaitable[Identity]]
) -> AsyncGenerator[bytes, None]:
    """The events, until who listens would not be let in any more: a stream has no other end."""
    async with aclosing(events):
        async for event in events:
            with suppress(CapacityError):  # without a database nobody is turned away who was here before
                try:
                    await identify()
                except AuthenticationError:
                    return
            yield event


async def _snapshot(services: Services) -> dict[str, Any]:
    status = await services.engine_status(is_detailed=True)
    shown = status.batches.adapters if status.batches else []
    names = await services.registry.adapters.version_names(
        {*shown, *(resident.digest for resident in status.residents)}
    )
    admission = services.gate.snapshot()
    tenant_names = {
        "": ADMIN,
        **await services.registry.tenants.tenant_names({*status.tenants, *status.service_tokens, *admission}),
    }
    return {
        "object": "engine",
        "model": services.served_name,
        "ready": services.engine.ready or services.ready,
        "http_requests": services.drain.num_running,
        "slots": services.ready.memory.slots,
        "usage_lag_s": services.registry.usage.lag_s(),
        **_shallow(status),
        "tenants": _by_name(status.tenants, tenant_names),
        "service_tokens": _by_name(status.service_tokens, tenant_names),
        "admission": _by_name(admission, tenant_names),
        "residents": [{**asdict(r), "adapters": names.get(r.digest, ())} for r in status.residents],
        "batches": status.batches
        and {
            "adapters": [{"digest": digest, "adapters": names.get(digest, ())} for digest in shown],
            "steps": status.batches.steps,
        },
    }


def _shallow(status: EngineStatus) -> dict[str, Any]:
    """Its fields as they are, which is cheaper than `asdict` by far; JSON knows dataclasses."""
    return {field.name: getattr(status, field.name) for field in fields(status)}


def _by_name(by_id: Mapping[str, ValueT], names: Mapping[str, str]) -> dict[str, ValueT]:
    """What belongs to tenants, by their names; a deleted tenant keeps its id."""
    return {names.get(tenant_id, tenant_id): value for tenant_id, value in by_id.items()}
