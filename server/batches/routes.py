"""/v1/files and /v1/batches, in OpenAI's shapes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from weft.adapters.blobs import PIECE_BYTES
from weft.errors import InvalidRequestError
from weft.registry.files import FileQuota, StoredFile, new_file
from weft.server.access import InferTenant
from weft.server.batches.schemas import (
    BatchBody,
    BatchList,
    BatchView,
    FileDeleted,
    FileList,
    FileView,
    batch_view,
    file_view,
)
from weft.server.json_body import json_body
from weft.server.openapi import takes, takes_form
from weft.server.removal import delete_blobs
from weft.server.services import Services, Wired
from weft.server.threads import in_thread
from weft.server.upload import Form, Parts, read_form

router = APIRouter(tags=["batches"])
EXPIRY_S = (3600, 30 * 86_400)
"""Shortest and longest life of a file; without a wish it is the longest."""
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
FILE_PARTS = Parts(
    file="file",
    texts={"purpose": 64, _ANCHOR: 32, _SECONDS: 16},
    rule=f"A file has the parts file and purpose, and may have {_ANCHOR} and {_SECONDS}, each once.",
)
_TEXT = {"type": "string"}
_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "file": {**_TEXT, "format": "binary", "description": "One request as JSON on each line."},
        "purpose": {"enum": ["batch"]},
        _ANCHOR: {"enum": ["created_at"]},
        _SECONDS: {"type": "integer", "minimum": EXPIRY_S[0], "maximum": EXPIRY_S[1]},
    },
}


@router.post("/v1/files", openapi_extra=takes_form(_FORM))
async def create_file(request: Request, services: Wired, caller: InferTenant) -> FileView:
    """Keep a file of requests for batches."""
    quota, limit = quota_of(services), services.config.batch.max_file_bytes
    limit = min(limit, await services.registry.files.bytes_left(caller.tenant_id, quota))
    form = Form()
    with (
        services.drain.cancelling(),
        services.intake.stream(caller.tenant_id),
        services.blobs.create() as blob,
    ):
        await read_form(request, form, FILE_PARTS, blob, limit, services.pace)
        form.check_has(("file", "purpose"), "file")
        if form.text("purpose") != "batch":
            raise InvalidRequestError("purpose must be batch.", param="purpose")
        now = services.now()
        fields = new_file(caller.tenant_id, form.filename, "batch", now, now + _life(form))
        file = StoredFile(**fields, size_bytes=blob.size, sha256=blob.sha256())

        async def store() -> None:
            await in_thread(blob.commit)

        try:
            await in_thread(blob.prepare)
            await services.registry.files.add(file, quota, store)
        except BaseException:
            await asyncio.shield(delete_blobs(services, [file.sha256]))
            raise
    return file_view(file)


@router.get("/v1/files")
async def list_files(
    services: Wired,
    caller: InferTenant,
    purpose: Annotated[str | None, Query(max_length=64)] = None,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
) -> FileList:
    """List files, the newest first."""
    page = await services.registry.files.list(caller.tenant_id, purpose, after, limit, is_oldest_first=order == "asc")
    return FileList(**_page([file_view(file) for file in page.items], page.next))


@router.get("/v1/files/{file_id}")
async def get_file(file_id: str, services: Wired, caller: InferTenant) -> FileView:
    """Show a file."""
    return file_view(await services.registry.files.get(caller.tenant_id, file_id))


@router.get(
    "/v1/files/{file_id}/content",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": {"schema": {**_TEXT, "format": "binary"}}}}},
)
async def get_content(file_id: str, services: Wired, caller: InferTenant) -> StreamingResponse:
    """Send a file's bytes."""
    file = await services.registry.files.get(caller.tenant_id, file_id)
    await in_thread(services.blobs.peek, file.sha256, 0)  # a blob that is missing is an error while there can be one
    headers = {"content-length": str(file.size_bytes)}
    pieces = _pieces(services, file.sha256)
    return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, services: Wired, caller: InferTenant) -> FileDeleted:
    """Delete a file that no batch needs any more."""
    file = await services.registry.files.delete(caller.tenant_id, file_id)
    await delete_blobs(services, [file.sha256])
    return FileDeleted(id=file.id)


@router.post("/v1/batches", openapi_extra=takes(BatchBody))
async def create_batch(request: Request, services: Wired, caller: InferTenant) -> BatchView:
    """Run the requests of a file within 24 hours, in what interactive traffic leaves."""
    body = await json_body(request, BatchBody, services.config.server.max_body_bytes, services.pace)
    batch = await services.registry.batches.create(
        caller.tenant_id, caller.identity.key_id, body.input_file_id, body.endpoint, body.metadata or {}
    )
    services.batches_changed.set()
    return batch_view(batch)


@router.get("/v1/batches")
async def list_batches(
    services: Wired,
    caller: InferTenant,
    after: Annotated[str | None, Query(max_length=64)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> BatchList:
    """List batches, the newest first."""
    page = await services.registry.batches.list(caller.tenant_id, after, limit)
    return BatchList(**_page([batch_view(batch) for batch in page.items], page.next))


@router.get("/v1/batches/{batch_id}")
async def get_batch(batch_id: str, services: Wired, caller: InferTenant) -> BatchView:
    """Show how far a batch has come."""
    return batch_view(await services.registry.batches.get(caller.tenant_id, batch_id))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(batch_id: str, services: Wired, caller: InferTenant) -> BatchView:
    """End a batch early; results so far are kept."""
    batch = await services.registry.batches.cancel(caller.tenant_id, batch_id)
    services.batches_changed.set()
    return batch_view(batch)


def _page(data: Sequence[FileView | BatchView], following: str | None) -> dict[str, Any]:
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return {"data": data, "first_id": first, "last_id": last, "has_more": following is not None}


def quota_of(services: Services) -> FileQuota:
    """What each tenant's files may be together."""
    return FileQuota(files=services.config.batch.max_files, size_bytes=services.config.batch.max_stored_bytes)


def _life(form: Form) -> timedelta:
    anchor, text = form.text(_ANCHOR), form.text(_SECONDS)
    if anchor is None and text is None:
        return timedelta(seconds=EXPIRY_S[1])
    seconds = int(text) if text is not None and text.isascii() and text.isdigit() else 0
    if anchor != "created_at" or not EXPIRY_S[0] <= seconds <= EXPIRY_S[1]:
        raise InvalidRequestError(
            f"expires_after must have the anchor created_at and {EXPIRY_S[0]} to {EXPIRY_S[1]} seconds.",
            param="expires_after",
        )
    return timedelta(seconds=seconds)


async def _pieces(services: Services, sha256: str) -> AsyncIterator[bytes]:
    opened = services.blobs.open(sha256)
    reader = await in_thread(opened.__enter__)
    try:
        left = reader.size
        while left:
            piece = bytearray(min(left, PIECE_BYTES))
            left -= await in_thread(reader.readinto, memoryview(piece))
            if not left:
                await in_thread(reader.verify)  # the last piece goes out only if all of it is what it was
            yield bytes(piece)
    finally:
        await in_thread(opened.__exit__, None, None, None)
