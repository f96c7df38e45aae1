"""Ways to an adapter version besides one form: uploads in pieces, and imports by the admin."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from weft.registry.uploads import Answer, Retry
from weft.server.adapters.hub_import import fetch, reader_of
from weft.server.adapters.publish import VersionDraft, checked_name, owner_of, publish
from weft.server.adapters.resumable_upload import announce, complete, receive_file, show
from weft.server.adapters.schemas import AdapterView, ImportBody, UploadBody, UploadList, UploadView
from weft.server.adapters.upload_guards import FILES, once
from weft.server.auth.callers import Admin, TenantReader, TenantWriter, UploadCaller, bound, for_tenant
from weft.server.http.json_body import json_body
from weft.server.http.openapi import takes, takes_file, takes_retries
from weft.server.services import Wired

router = APIRouter(tags=["uploads"])


@router.post(
    "/v1/uploads",
    status_code=201,
    response_model=UploadView,
    openapi_extra={**takes(UploadBody), **takes_retries()},
)
async def create_upload(request: Request, services: Wired, caller: UploadCaller) -> Response:
    """Announce an adapter version that comes in pieces; the answer says which files to send."""
    with once(request, services, caller.tenant_id or caller.actor) as retried:
        body = await json_body(request, UploadBody, services.config.server.max_body_bytes, services.pace)
        owner = await owner_of(services, caller, body.tenant)
        change = partial(announce, services, owner, body)
        return await retried.answer(owner.tenant_id, (body.model_dump_json(),), change)


@router.get("/v1/uploads")
async def list_uploads(
    services: Wired, caller: TenantReader, after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 100
) -> UploadList:
    """List uploads of the last 24 hours, oldest first."""
    page = await services.registry.uploads.list(caller.tenant_id, after, limit)
    return UploadList(data=[await show(services, upload) for upload in page.items], next=page.next)


@router.get("/v1/uploads/{upload_id}")
async def get_upload(upload_id: str, services: Wired, caller: TenantReader) -> UploadView:
    """Show how far an upload has come, and how it ended."""
    return await show(services, await services.registry.uploads.get(caller.tenant_id, upload_id))


@router.put("/v1/uploads/{upload_id}/files/{file}", openapi_extra=takes_file())
async def put_file(upload_id: str, file: str, request: Request, services: Wired, caller: TenantWriter) -> UploadView:
    """Send a file, or go on with it: what arrived before a connection broke is kept."""
    return await show(services, await receive_file(request, services, caller, upload_id, file))


@router.post(
    "/v1/uploads/{upload_id}/complete",
    status_code=201,
    response_model=AdapterView,
    openapi_extra=takes_retries(),
    responses={200: {"model": AdapterView, "description": "The version was there already."}},
)
async def complete_upload(upload_id: str, request: Request, services: Wired, caller: TenantWriter) -> Response:
    """Make the files an adapter version. Completing again gives the same answer."""
    await services.registry.uploads.get(caller.tenant_id, upload_id)  # another tenant's is not even busy
    with (
        services.drain.cancelling(),
        once(request, services, caller.tenant_id) as retried,
        services.intake.writing(upload_id, *FILES),
    ):
        upload = await services.registry.uploads.get(caller.tenant_id, upload_id)
        return await retried.answer(caller.tenant_id, (), partial(complete, services, caller, upload))


@router.delete("/v1/uploads/{upload_id}", status_code=204)
async def delete_upload(upload_id: str, services: Wired, caller: TenantWriter) -> Response:
    """Give an upload up; a version that it became stays."""
    await services.registry.uploads.get(caller.tenant_id, upload_id)
    with services.intake.writing(upload_id, *FILES):
        await services.registry.uploads.delete(caller.tenant_id, upload_id)
        await asyncio.to_thread(services.staged.delete, upload_id)
    return Response(status_code=204)


@router.post(
    "/v1/adapters:import",
    status_code=201,
    response_model=AdapterView,
    openapi_extra={**takes(ImportBody), **takes_retries()},
    responses={200: {"model": AdapterView, "description": "These very bytes were there already."}},
)
async def import_adapter(request: Request, services: Wired, admin: Admin) -> Response:
    """Fetch an adapter from the Hugging Face hub or from S3, and publish it as an upload would be."""
    server = services.config.server
    with services.drain.cancelling(), once(request, services, admin.role) as retried:
        body = await json_body(request, ImportBody, server.max_body_bytes, services.pace)
        owner = bound(await for_tenant(services, admin, body.tenant))
        name, read = checked_name(services, body.name), reader_of(body.source)

        async def change(retry: Retry | None) -> Answer:
            with services.blobs.create() as weights:
                config = await fetch(read, weights, server.max_upload_bytes)
                draft = VersionDraft(name=name, description=body.description, activate=body.activate, config=config)
                return await publish(services, owner, draft, weights, retry)

        return await retried.answer(owner.tenant_id, (body.model_dump_json(),), change)
