"""GET /v1/models in OpenAI's shape: the base, and the adapters that the caller may use."""

from __future__ import annotations

from datetime import datetime

from fastapi import APIRouter

from weft.errors import NotFoundError
from weft.registry.records import Adapter, AdapterIdentity, AdapterVersion
from weft.server.auth.callers import AnyCaller, Caller
from weft.server.generation.schemas import ModelList, ModelView
from weft.server.model_name import resolve_model
from weft.server.services import Services, Wired

router = APIRouter(tags=["models"])
PAGE = 1000


@router.get("/v1/models")
async def list_models(services: Wired, caller: AnyCaller) -> ModelList:
    """List the base and all adapters that the key may call."""
    own = [
        _adapter_view(services, adapter, adapter.current, adapter.name)
        for adapter in await _own_adapters(services, caller)
    ]
    granted = await services.registry.adapters.list_granted(caller.tenant_id) if caller.tenant_id else ()
    foreign = [
        _adapter_view(services, adapter, adapter.current, _granted_name(adapter, version))
        for adapter, version in granted
    ]
    return ModelList(data=[_base_view(services), *own, *foreign])


@router.get("/v1/models/{model_id:path}")
async def get_model(model_id: str, services: Wired, caller: AnyCaller) -> ModelView:
    """Show one model, by any name that a request may use."""
    if not model_id:
        raise NotFoundError("The path names no model. GET /v1/models lists all, GET /v1/models/NAME shows one.")
    model = await resolve_model(services.registry, caller, services.served_name, model_id)
    if model.adapter is None or model.version is None:
        return _base_view(services)
    return _adapter_view(services, model.adapter, model.version, model_id)


def _granted_name(adapter: Adapter, version: int | None) -> str:
    name = f"{adapter.tenant}/{adapter.name}"
    return name if version is None else f"{name}@{version}"


async def _own_adapters(services: Services, caller: Caller) -> list[Adapter]:
    adapters: list[Adapter] = []
    after: str | None = None
    while caller.tenant_id is not None:
        page = await services.registry.adapters.list_adapters(caller.tenant_id, after, PAGE)
        adapters.extend(page.items)
        after = page.next
        if after is None:
            break
    return adapters


def _base_view(services: Services) -> ModelView:
    return ModelView(
        id=services.served_name,
        created=_seconds(services.started_at),
        owned_by="weft",
        root=services.served_name,
        parent=None,
        max_model_len=services.ready.max_model_len,
    )


def _adapter_view(services: Services, adapter: AdapterIdentity, version: AdapterVersion, model_id: str) -> ModelView:
    return ModelView(
        id=model_id,
        created=_seconds(adapter.created_at),
        owned_by=adapter.tenant,
        root=version.digest,
        parent=services.served_name,
        max_model_len=services.ready.max_model_len,
    )


def _seconds(moment: datetime) -> int:
    return int(moment.timestamp())
