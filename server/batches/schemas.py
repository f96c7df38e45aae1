"""Bodies of files and batches, in OpenAI's shapes, made of their rows. Times are seconds since 1970."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from manylora.server.apis import FACTS
from manylora.server.http.bodies import Body, Labels, View

if TYPE_CHECKING:
    Endpoint = str
else:
    Endpoint = Literal[tuple(sorted(path for path, facts in FACTS.items() if facts.in_batches))]


class BatchBody(Body):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: Endpoint
    """The `url` of all lines."""
    completion_window: Literal["24h"]
    metadata: Labels = Field(default_factory=dict)
    """Kept for the client."""


class FileView(View):
    """A file of requests, or of results."""

    id: str
    object: Literal["file"] = "file"
    bytes: int = Field(validation_alias="size_bytes")
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    """batch, or batch_output for results."""
    status: Literal["processed"] = "processed"


class FileDeleted(View):
    """Answer of DELETE /v1/files/{file_id}."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchView(View):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: dict[str, Any] | None
    """Errors of the input: a list, each with `code`, `message`, `line` and `param`."""
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
    request_counts: dict[str, int]
    """Numbers of lines: total, completed and failed."""
    metadata: dict[str, str] | None = Field(validation_alias="labels")


class ListView(View):
    """A page of files or batches."""

    object: Literal["list"] = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(ListView):
    """A page of files."""

    data: list[FileView]


class BatchList(ListView):
    """A page of batches."""

    data: list[BatchView]
