"""Lines of a batch's input: read piece by piece, and checked before the first of them runs."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from pydantic import Field

from manylora.adapters.blobs.store import BlobStore, read_pieces
from manylora.errors import InvalidRequestError, RequestError
from manylora.server.http.bodies import Body
from manylora.server.http.json_body import parse_json, validate
from manylora.server.threads import in_thread

MAX_ERRORS = 50
"""Most errors reported for a batch that fails its check."""


class Line(Body):
    """One request of a batch."""

    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


def parse_line(raw: bytes, endpoint: str, max_bytes: int) -> Line:
    """Parse a line. Its body is checked when it runs.

    Args:
        raw: The line in the file.
        endpoint: What its `url` must be.
        max_bytes: Longest line.

    Raises:
        RequestError: It is too long, no JSON object, or has wrong fields.
    """
    if len(raw) > max_bytes:
        raise InvalidRequestError(f"A line may have at most {max_bytes} bytes.", code="line_too_long")
    try:
        fields = parse_json(raw, takes_nul=True)
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message.replace("The body", "The line", 1), code="invalid_json_line") from error
    line = validate(Line, fields)
    if line.url != endpoint:
        raise InvalidRequestError(f"url must be the batch's endpoint, {endpoint}.", param="url")
    if line.body.get("stream"):
        raise InvalidRequestError("stream must be false: batches do not stream.", param="body.stream")
    return line


async def check_input(
    blobs: BlobStore, sha256: str, endpoint: str, *, max_lines: int, max_bytes: int
) -> tuple[int, list[dict[str, Any]]]:
    """Check all lines of a batch.

    Returns:
        The number of lines, and the errors of the first bad ones. Raises like `read_lines`.
    """
    errors: list[dict[str, Any]] = []
    seen: set[bytes] = set()
    total = 0
    async with aclosing(read_lines(blobs, sha256, max_bytes)) as lines:
        async for number, raw in lines:
            total += 1
            try:
                if total > max_lines:
                    raise InvalidRequestError(f"A batch may have at most {max_lines} requests.", code="too_many_lines")
                line = parse_line(raw, endpoint, max_bytes)
                digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
                if digest in seen:
                    message = "Another line has this custom_id."
                    raise InvalidRequestError(message, code="duplicate_custom_id", param="custom_id")
                seen.add(digest)
            except RequestError as error:
                errors.append(input_error(error.code, error.message, number, error.param))
            if len(errors) == MAX_ERRORS or total > max_lines:
                break
    if not total:
        errors.append(input_error("empty_file", "The file has no requests: send one as JSON on each line."))
    return total, errors


def input_error(code: str, message: str, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    """An error of a line, or of the whole file if `line` is None."""
    return {"code": code, "message": message, "line": line, "param": param}


async def read_lines(blobs: BlobStore, sha256: str, max_bytes: int) -> AsyncGenerator[tuple[int, bytes], None]:
    """Number and bytes of each line that is not blank. A line over `max_bytes` is cut one byte after them.

    Raises:
        AdapterUnavailableError: The blob is missing or corrupt; this may come after the first lines.
        CapacityError: The store cannot be reached.
    """
    pieces, rest, number = read_pieces(blobs, sha256), b"", 0
    try:
        while piece := await in_thread(next, pieces, b""):
            *whole, rest = (rest + piece).split(b"\n")
            rest = rest[: max_bytes + 1]
            for raw in whole:
                number += 1
                if raw.strip():
                    yield number, raw[: max_bytes + 1]
    finally:
        await in_thread(pieces.close)
    if rest.strip():
        yield number + 1, rest
