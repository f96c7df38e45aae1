"""Routes of a tenant's adapters: upload in one form, in pieces or by import; show, change, delete, fit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from manylora.errors import AdapterUnavailableError, InvalidRequestError, NotFoundError
from manylora.registry.idempotency import KeptAnswer, Retry
from manylora.registry.names import DEFAULT_ALIAS
from manylora.registry.records import Adapter, AdapterUsage
from manylora.server.adapters import schemas
from manylora.server.adapters.fit import Capacity, find_fit, planned_item, waste
from manylora.server.adapters.form import UploadForm
from manylora.server.adapters.hub_import import fetch, reader_of
from manylora.server.adapters.idempotency import idempotent
from manylora.server.adapters.publish import (
    VersionDraft,
    checked_name,
    owner_of,
    publish,
    receive_adapter,
)
from manylora.server.adapters.resumable_upload import announce, complete, receive_file, show
from manylora.server.auth.callers import (
    Admin,
    AnyTenantReader,
    Caller,
    TenantCaller,
    TenantReader,
    TenantWriter,
    UploadCaller,
    bound,
    for_tenant,
)
from manylora.server.http.form import takes_form
from manylora.server.http.openapi import takes, takes_bytes, takes_retries
from manylora.server.process.threads import in_thread
from manylora.server.services import Services, Wired
from manylora.server.uploads.in_progress import FILES

router = APIRouter(tags=["adapters"])
Limit = Annotated[int, Query(ge=1, le=1000)]
CONTENT_RANGE = (
    "`bytes FIRST-LAST/SIZE` continues at byte FIRST; without it the file starts again at byte 0."
)
PUBLISHES: dict[str, Any] = {
    "status_code": 201,
    "response_model": schemas.AdapterView,
    "responses": {
        200: {"model": schemas.AdapterView, "description": "The version was there before."}
    },
}
"""Answers of the routes that publish a version."""


@router.post(
    "/v1/adapters", openapi_extra={**takes_form(UploadForm), **takes_retries()}, **PUBLISHES
)
async def upload_adapter(request: Request, services: Wired, caller: UploadCaller) -> Response:
    """Upload the first or next version of an adapter."""
    return await receive_adapter(request, services, caller)


@router.get("/v1/adapters")
async def list_adapters(
    services: Wired, caller: AnyTenantReader, after: str | None = None, limit: Limit = 100
) -> schemas.AdapterList:
    """List the tenant's adapters by name, with where they are and how they were used.

    Without `?tenant=`, or with `?tenant=*`, an admin sees those of all tenants, by tenant and name.
    """
    if caller.tenant_id is None:
        page = await services.registry.adapters.list_every_adapter(after, limit)
    else:
        page = await services.registry.adapters.list_adapters(caller.tenant_id, after, limit)
    return schemas.AdapterList(data=await _with_usage(services, page.items), next=page.next)


@router.post("/v1/adapters:fit", openapi_extra=takes(schemas.AdapterFitBody))
async def fit_adapters(
    request: Request, services: Wired, caller: UploadCaller
) -> schemas.AdapterFitView:
    """Tell whether adapters can be on the device all at once, and how much KV cache is left then.

    Answered from the plan of the memory, not from what is there now. Adapters that do not fit at once are served all
    the same: idle ones cost nothing, so they take turns.
    """
    body = await services.bodies.json(request, schemas.AdapterFitBody)
    ready = services.ready
    capacity = Capacity.of(ready)
    items = [await _stored_item(services, caller, selector, capacity) for selector in body.adapters]
    for plan in body.ranks:
        if plan.rank > ready.max_rank:
            raise InvalidRequestError(
                f"rank may be at most {ready.max_rank} here, got {plan.rank}.", param="ranks"
            )
        item = await in_thread(
            planned_item, plan.rank, plan.target_modules, plan.count, ready.base, capacity
        )
        items.append(item)
    return find_fit(items, capacity)


@router.get("/v1/adapters/{name}")
async def get_adapter(name: str, services: Wired, caller: TenantReader) -> schemas.AdapterView:
    """Show one adapter."""
    adapter = await services.registry.adapters.get_adapter(caller.tenant_id, name)
    return (await _with_usage(services, [adapter]))[0]


@router.get("/v1/adapters/{name}/versions")
async def list_versions(name: str, services: Wired, caller: TenantReader) -> schemas.VersionList:
    """List an adapter's versions, newest first."""
    adapter = await services.registry.adapters.get_adapter(caller.tenant_id, name)
    versions = await services.registry.adapters.list_versions(caller.tenant_id, name)
    residents = await schemas.residents_now(services)
    views = [schemas.version_view(adapter, version, residents) for version in versions]
    return schemas.VersionList(data=views, next=None)


@router.patch("/v1/adapters/{name}", openapi_extra=takes(schemas.AdapterPatchBody))
async def update_adapter(
    name: str, request: Request, services: Wired, caller: TenantWriter
) -> schemas.AdapterView:
    """Change description, pin or aliases; moving the alias `default` back is a rollback."""
    body = await services.bodies.json(request, schemas.AdapterPatchBody)
    async with services.versions.pins.turn():
        await _check_pin(services, caller, name, body)
        adapter = await services.registry.adapters.update_adapter(
            caller.tenant_id,
            name,
            description=body.description,
            pinned_copies=body.copies,
            aliases=body.aliases,
            actor=caller.actor,
        )
    await services.versions.pins.sync()
    pages = await services.uploads.validator.pages(adapter.current)
    return schemas.adapter_view(adapter, pages, await schemas.residents_now(services))


@router.delete("/v1/adapters/{name}", status_code=204, response_class=Response)
async def delete_adapter(
    name: str,
    services: Wired,
    caller: TenantWriter,
    version: Annotated[int | None, Query(ge=1, lt=1 << 31)] = None,
) -> None:
    """Delete an adapter, or one version of it. Running requests finish."""
    removed = await services.registry.adapters.delete_adapter(
        caller.tenant_id, name, version, actor=caller.actor
    )
    await services.versions.garbage.remove(removed)


@router.post(
    "/v1/uploads",
    status_code=201,
    response_model=schemas.UploadView,
    openapi_extra={**takes(schemas.UploadBody), **takes_retries()},
)
async def create_upload(request: Request, services: Wired, caller: UploadCaller) -> Response:
    """Announce an adapter version that comes in pieces; the answer says which files to send."""
    with idempotent(request, services, caller.tenant_id or caller.actor) as retried:
        body = await services.bodies.json(request, schemas.UploadBody)
        owner = await owner_of(services, caller, body.tenant)
        change = partial(announce, services, owner, body)
        return await retried.answer(owner.tenant_id, (body.model_dump_json(),), change)


@router.get("/v1/uploads")
async def list_uploads(
    services: Wired,
    caller: TenantReader,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 100,
) -> schemas.UploadList:
    """List uploads of the last 24 hours, oldest first."""
    page = await services.registry.uploads.list(caller.tenant_id, after, limit)
    views = await asyncio.gather(*(show(services, upload) for upload in page.items))
    return schemas.UploadList(data=views, next=page.next)


@router.get("/v1/uploads/{upload_id}")
async def get_upload(upload_id: str, services: Wired, caller: TenantReader) -> schemas.UploadView:
    """Show how far an upload has come, and how it ended."""
    return await show(services, await services.registry.uploads.get(caller.tenant_id, upload_id))


@router.put(
    "/v1/uploads/{upload_id}/files/{file}",
    openapi_extra=takes_bytes("Content-Range", CONTENT_RANGE),
)
async def put_file(
    upload_id: str, file: str, request: Request, services: Wired, caller: TenantWriter
) -> schemas.UploadView:
    """Send a file, or go on with it: what arrived before a connection broke is kept."""
    return await show(services, await receive_file(request, services, caller, upload_id, file))


@router.post("/v1/uploads/{upload_id}/complete", openapi_extra=takes_retries(), **PUBLISHES)
async def complete_upload(
    upload_id: str, request: Request, services: Wired, caller: TenantWriter
) -> Response:
    """Make the files an adapter version. Completing again gives the same answer."""
    await services.registry.uploads.get(
        caller.tenant_id, upload_id
    )  # another tenant's is not even busy
    with (
        services.drain.cancelling(),
        idempotent(request, services, caller.tenant_id) as retried,
        services.uploads.in_progress.writing(upload_id, *FILES),
    ):
        upload = await services.registry.uploads.get(caller.tenant_id, upload_id)
        return await retried.answer(
            caller.tenant_id, (), partial(complete, services, caller, upload)
        )


@router.delete("/v1/uploads/{upload_id}", status_code=204, response_class=Response)
async def delete_upload(upload_id: str, services: Wired, caller: TenantWriter) -> None:
    """Give an upload up; a version that it became stays."""
    await services.registry.uploads.get(caller.tenant_id, upload_id)
    with services.uploads.in_progress.writing(upload_id, *FILES):
        await services.registry.uploads.delete(caller.tenant_id, upload_id)
        await in_thread(services.uploads.staged.delete, upload_id)


@router.post(
    "/v1/adapters:import",
    openapi_extra={**takes(schemas.ImportBody), **takes_retries()},
    **PUBLISHES,
)
async def import_adapter(request: Request, services: Wired, admin: Admin) -> Response:
    """Fetch an adapter from the Hugging Face hub or from S3, and publish it as an upload would be."""
    server = services.config.server
    with services.drain.cancelling(), idempotent(request, services, admin.role) as retried:
        body = await services.bodies.json(request, schemas.ImportBody)
        owner = bound(await for_tenant(services, admin, body.tenant))
        name = checked_name(services, body.name)
        read = reader_of(body.source)

        async def change(retry: Retry | None) -> KeptAnswer:
            with services.blobs.create() as weights:
                config = await fetch(read, weights, server.max_upload_bytes)
                draft = VersionDraft(
                    name=name, description=body.description, activate=body.activate, config=config
                )
                return await publish(services, owner, draft, weights, retry)

        return await retried.answer(owner.tenant_id, (body.model_dump_json(),), change)


async def _with_usage(services: Services, adapters: Sequence[Adapter]) -> list[schemas.AdapterView]:
    residents = await schemas.residents_now(services)
    usage = await services.registry.usage.summary([adapter.id for adapter in adapters])
    pages = await asyncio.gather(
        *(services.uploads.validator.pages(adapter.current) for adapter in adapters)
    )
    return [
        schemas.adapter_view(adapter, count, residents, usage.get(adapter.id, AdapterUsage()))
        for adapter, count in zip(adapters, pages, strict=True)
    ]


async def _check_pin(
    services: Services, caller: TenantCaller, name: str, body: schemas.AdapterPatchBody
) -> None:
    """Return if the tenant may have the pages of this change pinned; raises like `PinKeeper.check_pages`."""
    adapter = await services.registry.adapters.get_adapter(caller.tenant_id, name)
    moves = DEFAULT_ALIAS in body.aliases
    copies = body.copies if body.copies is not None else adapter.pinned_copies if moves else 0
    if not copies:
        return
    meaning = body.aliases.get(DEFAULT_ALIAS) if moves else adapter.aliases.get(DEFAULT_ALIAS)
    wanted = {meaning} if isinstance(meaning, int) else set(meaning or ())
    versions = await services.registry.adapters.list_versions(caller.tenant_id, name)
    kept = [version for version in versions if version.version in wanted]
    await services.versions.pins.check_pages(adapter, kept or [adapter.current], copies)


async def _stored_item(
    services: Services, caller: Caller, selector: str, capacity: Capacity
) -> schemas.AdapterFitItem:
    try:
        model = await services.models.resolve(caller.tenant_id, selector)
    except NotFoundError as error:
        raise NotFoundError(error.message, code=error.code, param="adapters") from error
    adapter = model.adapter
    version = model.version
    if adapter is None or version is None:
        raise InvalidRequestError(
            f"`{selector}` is the base model, which is always there.", param="adapters"
        )
    pages = await services.uploads.validator.pages(version)
    if pages is None:
        raise AdapterUnavailableError(f"The weights of `{selector}` cannot be read now.")
    return schemas.AdapterFitItem(
        adapter=adapter.name_for(caller.tenant_id),
        version=version.version,
        digest=version.digest,
        rank=version.rank,
        target_modules=list(version.target_modules),
        pages=pages,
        waste=waste(version.parameters, pages, capacity.geometry),
    )
