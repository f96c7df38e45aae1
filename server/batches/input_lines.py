"""Lines of a batch's input: read piece by piece, and checked before the first of them runs."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from manylora.adapters.blobs.store import BlobStore, read_pieces
from manylora.errors import InvalidRequestError, RequestError
from manylora.server.http.bodies import Body, parse_json, validate
from manylora.server.process.threads import in_thread

MAX_ERRORS = 50
"""Most errors reported for a batch that fails its check."""
Work = Callable[[Callable[[], bool], int], Awaitable[bool]]
"""Runs a function that reads a given number of bytes, as `LongWork.run` does."""


class Line(Body):
    """One request of a batch."""

    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]
    _num_bytes: int = PrivateAttr(0)

    @property
    def num_bytes(self) -> int:
        """Its length in the file."""
        return self._num_bytes


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
        raise InvalidRequestError(
            f"A line may have at most {max_bytes} bytes.", code="line_too_long"
        )
    try:
        fields = parse_json(raw, takes_nul=True)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            error.message.replace("The body", "The line", 1), code="invalid_json_line"
        ) from error
    line = validate(Line, fields)
    line._num_bytes = len(raw)
    if line.url != endpoint:
        raise InvalidRequestError(f"url must be the batch's endpoint, {endpoint}.", param="url")
    if line.body.get("stream"):
        raise InvalidRequestError(
            "stream must be false: batches do not stream.", param="body.stream"
        )
    return line


async def check_input(
    blobs: BlobStore, sha256: str, endpoint: str, *, max_lines: int, max_bytes: int, work: Work
) -> tuple[int, list[dict[str, Any]]]:
    """Check all lines of a batch.

    Returns:
        The number of lines, and the errors of the first bad ones. Raises like `read_lines`.
    """
    check = _InputCheck(endpoint, max_lines, max_bytes)
    async with aclosing(read_lines(blobs, sha256, max_bytes)) as groups:
        async for lines in groups:
            if not await work(partial(check.take, lines), sum(len(raw) for _, raw in lines)):
                break
    if not check.total:
        check.errors.append(
            input_error("empty_file", "The file has no requests: send one as JSON on each line.")
        )
    return check.total, check.errors


@dataclass(slots=True)
class _InputCheck:
    """Findings in the lines so far."""

    endpoint: str
    max_lines: int
    max_bytes: int
    total: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    _seen: set[bytes] = field(default_factory=set)
    """Hashes of custom ids."""

    def take(self, lines: Sequence[tuple[int, bytes]]) -> bool:
        """Check further lines; False if no more have to be looked at."""
        for number, raw in lines:
            self.total += 1
            try:
                self._check(raw)
            except RequestError as error:
                self.errors.append(input_error(error.code, error.message, number, error.param))
            if len(self.errors) == MAX_ERRORS or self.total > self.max_lines:
                return False
        return True

    def _check(self, raw: bytes) -> None:
        if self.total > self.max_lines:
            raise InvalidRequestError(
                f"A batch may have at most {self.max_lines} requests.", code="too_many_lines"
            )
        line = parse_line(raw, self.endpoint, self.max_bytes)
        digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            message = "Another line has this custom_id."
            raise InvalidRequestError(message, code="duplicate_custom_id", param="custom_id")
        self._seen.add(digest)


def input_error(
    code: str, message: str, line: int | None = None, param: str | None = None
) -> dict[str, Any]:
    """An error of a line, or of the whole file if `line` is None."""
    return {"code": code, "message": message, "line": line, "param": param}


async def read_lines(
    blobs: BlobStore, sha256: str, max_bytes: int
) -> AsyncGenerator[list[tuple[int, bytes]], None]:
    """Number and bytes of each line that is not blank, in groups: those that end in one piece of the file.

    A line over `max_bytes` is cut one byte after them.

    Raises:
        AdapterUnavailableError: The blob is missing or corrupt; this may come after the first lines.
        CapacityError: The store cannot be reached.
    """
    pieces = read_pieces(blobs, sha256)
    groups = _groups(pieces, max_bytes)
    try:
        while (lines := await in_thread(next, groups, None)) is not None:
            yield lines
    finally:
        await in_thread(pieces.close)


def _groups(pieces: Iterable[bytes], max_bytes: int) -> Iterator[list[tuple[int, bytes]]]:
    rest = b""
    number = 0
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        rest = rest[: max_bytes + 1]
        yield [
            (at, raw[: max_bytes + 1]) for at, raw in enumerate(whole, number + 1) if raw.strip()
        ]
        number += len(whole)
    if rest.strip():
        yield [(number + 1, rest)]
