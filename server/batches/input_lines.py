"""Lines of a batch's input: read piece by piece, and checked before the first of them runs."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import Any

from weft.adapters.blob_store import BlobStore
from weft.adapters.blobs import PIECE_BYTES
from weft.errors import InvalidRequestError
from weft.server.json_body import parse_json
from weft.server.threads import in_thread

LINES_AT_ONCE = 64
MAX_ERRORS = 50
"""Errors that a batch which fails its check tells of."""
MAX_CUSTOM_ID = 512
_FIELDS = {"custom_id", "method", "url", "body"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One request of a batch."""

    number: int
    """Of the line in the file, from 1."""
    custom_id: str
    body: dict[str, Any]


class InputCheck:
    """Checks all lines of a batch, one after the other.

    Args:
        endpoint: What each line's `url` must be.
        max_lines: Most requests.
        max_bytes: Longest line.
    """

    def __init__(self, endpoint: str, max_lines: int, max_bytes: int) -> None:
        self.errors: list[dict[str, Any]] = []
        self.total = 0
        self._endpoint = endpoint
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._seen: set[bytes] = set()

    def add(self, number: int, raw: bytes) -> None:
        """Look at a line; what is wrong with it is added to `errors`."""
        self.total += 1
        if self.total == self._max_lines + 1:
            self._wrong("too_many_lines", f"A batch may have {self._max_lines} requests; split the file.", number)
        elif len(raw) > self._max_bytes:
            self._wrong("line_too_long", f"A line may have {self._max_bytes} bytes.", number)
        else:
            try:
                line = parse_line(number, raw, self._endpoint)
            except InvalidRequestError as error:
                self._wrong(error.code, error.message, number, error.param)
                return
            digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
            if digest in self._seen:
                self._wrong("duplicate_custom_id", "Another line has this custom_id.", number, "custom_id")
            self._seen.add(digest)

    def end(self) -> None:
        """All lines were added."""
        if not self.total:
            self._wrong("empty_file", "The file has no requests: send one as JSON on each line.", None)

    @property
    def is_over(self) -> bool:
        """Whether more lines would change nothing."""
        return len(self.errors) >= MAX_ERRORS or self.total > self._max_lines

    def _wrong(self, code: str, message: str, line: int | None, param: str | None = None) -> None:
        self.errors.append({"code": code, "message": message, "line": line, "param": param})


def parse_line(number: int, raw: bytes, endpoint: str) -> Line:
    """A line that can be run; whether its body is good is found out then.

    Raises:
        InvalidRequestError: It is no JSON object, or not of the form that is due.
    """
    try:
        line = parse_json(raw)
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message.replace("The body", "The line", 1), code="invalid_json_line") from error
    missing = sorted(_FIELDS - line.keys())
    if missing:
        raise InvalidRequestError(f"{missing[0]} is required.", param=missing[0], code="missing_required_parameter")
    unknown = sorted(line.keys() - _FIELDS)
    if unknown:
        raise InvalidRequestError(
            f"A line has custom_id, method, url and body, and not {unknown[0][:64]!r}.", code="unknown_parameter"
        )
    custom_id, body = line["custom_id"], line["body"]
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        raise _invalid("custom_id", f"text of 1 to {MAX_CUSTOM_ID} characters")
    if line["method"] != "POST":
        raise _invalid("method", "POST")
    if line["url"] != endpoint:
        raise _invalid("url", f"the batch's endpoint, {endpoint}")
    if not isinstance(body, dict):
        raise _invalid("body", "an object")
    if body.get("stream"):
        raise _invalid("body.stream", "false: batches do not stream")
    return Line(number=number, custom_id=custom_id, body=body)


async def read_lines(blobs: BlobStore, sha256: str, max_bytes: int) -> AsyncGenerator[tuple[int, bytes], None]:
    """Number and bytes of each line that is not blank; of one that is longer than `max_bytes`, a byte more than those.

    Raises:
        AdapterUnavailableError: The blob is missing or corrupt, which may be told behind its last line.
        CapacityError: The store cannot be reached.
    """
    lines = _raw_lines(blobs, sha256, max_bytes)
    try:
        while some := await in_thread(list, islice(lines, LINES_AT_ONCE)):
            for line in some:
                yield line
    finally:
        await in_thread(lines.close)


async def check_input(check: InputCheck, blobs: BlobStore, sha256: str, max_bytes: int) -> None:
    """Give all lines to `check`, but no more than it needs; raises like `read_lines`."""
    async with aclosing(read_lines(blobs, sha256, max_bytes)) as lines:
        async for number, raw in lines:
            check.add(number, raw)
            if check.is_over:
                return
    check.end()


def _raw_lines(blobs: BlobStore, sha256: str, max_bytes: int) -> Generator[tuple[int, bytes], None, None]:
    with blobs.open(sha256) as reader:
        rest, number, left = b"", 0, reader.size
        while left:
            piece = bytearray(min(left, PIECE_BYTES))
            left -= reader.readinto(memoryview(piece))
            *whole, rest = (rest + piece).split(b"\n")
            rest = rest[: max_bytes + 1]
            for raw in whole:
                number += 1
                if raw.strip():
                    yield number, raw[: max_bytes + 1]
        reader.verify()
        if rest.strip():
            yield number + 1, rest


def _invalid(param: str, expected: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} must be {expected}.", param=param, code="invalid_value")
