"""GET /v1/models in OpenAI's shape: the base, and the adapters that the caller may use."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter

from manylora.errors import NotFoundError
from manylora.registry.records import AdapterIdentity, AdapterVersion
from manylora.server.auth.callers import AnyCaller
from manylora.server.http.bodies import View
from manylora.server.services import Services, Wired

router = APIRouter(tags=["models"])
PAGE = 1000


class ModelView(View):
    """A model in OpenAI's shape: the base, or an adapter."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    """The base's name, or the adapter version's digest."""
    parent: str | None
    """The base's name; null for the base itself."""
    max_model_len: int


class ModelList(View):
    """All models that the key may call."""

    object: Literal["list"] = "list"
    data: list[ModelView]


@router.get("/v1/models")
async def list_models(services: Wired, caller: AnyCaller) -> ModelList:
    """List the base and all adapters that the key may call."""
    models = [_view(services, services.served_name)]
    tenant_id = caller.tenant_id
    adapters = services.registry.adapters
    if tenant_id is None:
        return ModelList(data=models)
    after = None
    is_last = False
    while not is_last:
        page = await adapters.list_adapters(tenant_id, after, PAGE)
        models += [
            _view(services, adapter.name, adapter, adapter.current) for adapter in page.items
        ]
        after = page.next
        is_last = page.next is None
    for adapter, version in await adapters.list_granted(tenant_id):
        name = f"{adapter.tenant}/{adapter.name}" + (f"@{version}" if version is not None else "")
        models.append(_view(services, name, adapter, adapter.current))
    return ModelList(data=models)


@router.get("/v1/models/{model_id:path}")
async def get_model(model_id: str, services: Wired, caller: AnyCaller) -> ModelView:
    """Show one model, by any name that a request may use."""
    if not model_id:
        raise NotFoundError(
            "The path names no model. GET /v1/models lists all, GET /v1/models/NAME shows one."
        )
    model = await services.models.resolve(caller.tenant_id, model_id)
    return _view(services, model_id, model.adapter, model.version)


def _view(
    services: Services,
    name: str,
    adapter: AdapterIdentity | None = None,
    version: AdapterVersion | None = None,
) -> ModelView:
    """A version of an adapter; without one, the base."""
    return ModelView(
        id=name,
        created=int((adapter.created_at if adapter else services.clock.started_at).timestamp()),
        owned_by=adapter.tenant if adapter else "manylora",
        root=version.digest if version else services.served_name,
        parent=services.served_name if adapter else None,
        max_model_len=services.ready.max_model_len,
    )
