"""/v1/files and /v1/batches, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from manylora.adapters.blobs.store import read_pieces
from manylora.errors import InvalidRequestError
from manylora.registry.batches import new_file
from manylora.registry.db.models import BatchRow, FileRow
from manylora.registry.records import Page
from manylora.server.auth.callers import InferTenant
from manylora.server.batches.schemas import (
    BatchBody,
    BatchList,
    BatchView,
    FileDeleted,
    FileList,
    FileView,
)
from manylora.server.http.body import content_length
from manylora.server.http.form import Form, read_form, takes_form
from manylora.server.http.openapi import BINARY, sends, takes
from manylora.server.process.threads import in_thread
from manylora.server.services import Wired

router = APIRouter(tags=["batches"])
After = Annotated[str | None, Query(max_length=64)]


class FileForm(Form):
    """A file of requests, and what it is for."""

    file = "file"
    parts: ClassVar[Mapping[str, tuple[int, Mapping[str, object]]]] = {
        "purpose": (64, {"enum": ["batch"]})
    }
    required = ("file", "purpose")
    rule = "A file has the parts file and purpose, each once."


@router.post("/v1/files", response_model=FileView, openapi_extra=takes_form(FileForm))
async def create_file(request: Request, services: Wired, caller: InferTenant) -> FileRow:
    """Keep a file of requests for batches."""
    limits = services.config.batch
    files = services.registry.files
    limit = min(limits.max_file_bytes, await files.bytes_left(caller.tenant_id, limits))
    await in_thread(services.blobs.check_room, min(limit, content_length(request) or 0))
    with (
        services.drain.cancelling(),
        services.uploads.stream(caller.tenant_id),
        services.blobs.create() as blob,
    ):
        form = await read_form(request, FileForm, blob, limit, services.bodies.pace)
        if form.text("purpose") != "batch":
            raise InvalidRequestError("purpose must be batch.", param="purpose")
        file = new_file(
            caller.tenant_id,
            form.filename,
            "batch",
            services.clock.now(),
            size_bytes=blob.size,
            sha256=blob.sha256(),
        )
        await in_thread(blob.prepare)
        await files.add(file, limits, partial(in_thread, blob.commit))
    return file


@router.get("/v1/files", response_model=FileList)
async def list_files(
    services: Wired,
    caller: InferTenant,
    purpose: Annotated[str | None, Query(max_length=64)] = None,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
) -> dict[str, Any]:
    """List files, the newest first."""
    return _list(await services.registry.files.list(caller.tenant_id, purpose, after, limit))


@router.get("/v1/files/{file_id}", response_model=FileView)
async def get_file(file_id: str, services: Wired, caller: InferTenant) -> FileRow:
    """Show a file."""
    return await services.registry.files.get(caller.tenant_id, file_id)


@router.get(
    "/v1/files/{file_id}/content",
    response_class=StreamingResponse,
    responses=sends("application/octet-stream", BINARY),
)
async def get_content(file_id: str, services: Wired, caller: InferTenant) -> StreamingResponse:
    """Send a file's bytes."""
    file = await services.registry.files.get(caller.tenant_id, file_id)
    await in_thread(
        services.blobs.peek, file.sha256, 0
    )  # a blob that is missing is an error while there can be one
    pieces = read_pieces(services.blobs, file.sha256)
    headers = {"content-length": str(file.size_bytes)}
    return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, services: Wired, caller: InferTenant) -> FileDeleted:
    """Delete a file that no batch needs any more."""
    file = await services.registry.files.delete(caller.tenant_id, file_id)
    await services.versions.garbage.delete([file.sha256])
    return FileDeleted(id=file.id)


@router.post("/v1/batches", response_model=BatchView, openapi_extra=takes(BatchBody))
async def create_batch(request: Request, services: Wired, caller: InferTenant) -> BatchRow:
    """Run the requests of a file within 24 hours, when interactive traffic leaves capacity."""
    body = await services.bodies.json(request, BatchBody)
    return await services.registry.batches.create(
        caller.tenant_id, caller.identity.key_id, body.input_file_id, body.endpoint, body.metadata
    )


@router.get("/v1/batches", response_model=BatchList)
async def list_batches(
    services: Wired,
    caller: InferTenant,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> dict[str, Any]:
    """List batches, the newest first."""
    return _list(await services.registry.batches.list(caller.tenant_id, after, limit))


@router.get("/v1/batches/{batch_id}", response_model=BatchView)
async def get_batch(batch_id: str, services: Wired, caller: InferTenant) -> BatchRow:
    """Show how far a batch has come."""
    return await services.registry.batches.get(caller.tenant_id, batch_id)


@router.post("/v1/batches/{batch_id}/cancel", response_model=BatchView)
async def cancel_batch(batch_id: str, services: Wired, caller: InferTenant) -> BatchRow:
    """End a batch early; results so far are kept."""
    return await services.registry.batches.cancel(caller.tenant_id, batch_id)


def _list(page: Page[FileRow] | Page[BatchRow]) -> dict[str, Any]:
    first, last = (page.items[0].id, page.items[-1].id) if page.items else (None, None)
    return {
        "data": page.items,
        "first_id": first,
        "last_id": last,
        "has_more": page.next is not None,
    }
