"""Bodies of files and batches, in OpenAI's shapes. Times are Unix seconds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from weft.registry.batches import Batch
from weft.registry.files import StoredFile
from weft.server.responses import View
from weft.server.schemas import Body

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
MICROS = 1_000_000


class BatchBody(Body):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: Endpoint
    """The `url` of all lines."""
    completion_window: Literal["24h"]
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]] | None, Field(max_length=16)
    ] = None
    """Kept for the client."""


class FileView(View):
    """A file of requests, or of results."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    """batch, or batch_output for results."""
    status: Literal["processed"] = "processed"


class FileList(View):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileView]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(View):
    """What DELETE answers."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class InputError(View):
    """What is wrong with a line, or with the file where `line` is null."""

    code: str
    line: int | None = None
    message: str
    param: str | None = None


class InputErrorList(View):
    """The first of what is wrong with a batch's input."""

    object: Literal["list"] = "list"
    data: list[InputError]


class RequestCounts(View):
    """Lines of a batch; those that ended are completed and failed."""

    total: int
    completed: int
    failed: int


class BatchView(View):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: InputErrorList | None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: str
    """validating, failed, in_progress, finalizing, completed, expired, cancelling or cancelled."""
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(View):
    """A page of batches."""

    object: Literal["list"] = "list"
    data: list[BatchView]
    first_id: str | None
    last_id: str | None
    has_more: bool


def file_view(file: StoredFile) -> FileView:
    """A file's body."""
    return FileView(
        id=file.id,
        bytes=file.size_bytes,
        created_at=file.created_at // MICROS,
        expires_at=file.expires_at // MICROS,
        filename=file.filename,
        purpose=file.purpose,
    )


def batch_view(batch: Batch) -> BatchView:
    """A batch's body."""
    times = {name: moment // MICROS for name, moment in batch.times.items()}
    return BatchView(
        id=batch.id,
        endpoint=batch.endpoint,
        errors=InputErrorList(data=[InputError(**error) for error in batch.errors]) if batch.errors else None,
        input_file_id=batch.input_file_id,
        status=batch.status,
        output_file_id=batch.output_file_id or None,
        error_file_id=batch.error_file_id or None,
        created_at=batch.created_at // MICROS,
        in_progress_at=times.get("in_progress_at"),
        expires_at=batch.expires_at // MICROS,
        finalizing_at=times.get("finalizing_at"),
        completed_at=times.get("completed_at"),
        failed_at=times.get("failed_at"),
        expired_at=times.get("expired_at"),
        cancelling_at=times.get("cancelling_at"),
        cancelled_at=times.get("cancelled_at"),
        request_counts=RequestCounts(total=batch.total, completed=batch.completed, failed=batch.failed),
        metadata=dict(batch.labels) or None,
    )
