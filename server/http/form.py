"""A strict reader of multipart forms, with its own byte limits.

The file goes to a temporary blob while it is hashed; nothing else is written to disk. File names are never paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header
from starlette.requests import Request

from manylora.adapters.blobs.local import BlobWriter
from manylora.errors import InvalidRequestError, PayloadTooLargeError, TimeoutExceededError
from manylora.server.http.body import STREAM_BYTES, Pace, held_body, read_chunks
from manylora.server.http.openapi import BINARY, request_body
from manylora.server.process.threads import in_thread

FORM_BYTES = 1 << 20
"""Most bytes of a form besides its file: other parts, headers, boundaries."""
WRITE_BYTES = 1 << 20
"""Least size of the pieces in which a file is written."""
MAX_HEADERS = 8
MAX_HEADER_BYTES = 4096
FormT = TypeVar("FormT", bound="Form")


class Form:
    """Splits multipart bytes into parts, and keeps all but the file's. A subclass says which parts there are.

    Args:
        boundary: Stands between two parts.
        file_limit: Most bytes of the file.
    """

    file: ClassVar[str]
    """The part with the file, which goes to a blob."""
    file_schema: ClassVar[Mapping[str, object]] = BINARY
    """The file for the OpenAPI page."""
    parts: ClassVar[Mapping[str, tuple[int, Mapping[str, object]]]]
    """The other parts: the most bytes of each, and what it is for the OpenAPI page."""
    required: ClassVar[tuple[str, ...]]
    """The parts that must come."""
    rule: ClassVar[str]
    """The error message for any other part."""

    def __init__(self, boundary: bytes, file_limit: int) -> None:
        self.filename = ""
        """The file name that the client gave."""
        self.pending = bytearray()
        """Bytes of the file that are to be written."""
        self._texts: dict[str, bytearray] = {}
        """By part, from its beginning; that of the file stays empty."""
        self._file_limit = file_limit
        self._num_bytes = 0
        self._header_name = bytearray()
        self._header_value = bytearray()
        self._part: str | None = None
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda chunk, start, end: self._header_name.extend(
                    chunk[start:end]
                ),
                "on_header_value": lambda chunk, start, end: self._header_value.extend(
                    chunk[start:end]
                ),
                "on_header_end": self._end_header,
                "on_headers_finished": self._check_part,
                "on_part_data": self._part_bytes,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )
        self.feed = self._parser.write

    def text(self, name: str) -> str | None:
        """A part's text; None where it did not come."""
        raw = self._texts.get(name)
        try:
            return None if raw is None else raw.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"{name} must be text in UTF-8.", param=name) from error

    def take(self) -> bytearray:
        """The bytes of the file that have come since the last time."""
        pending, self.pending = self.pending, bytearray()
        return pending

    def check_complete(self) -> None:
        """Return if the last boundary and all required parts have come.

        Raises:
            InvalidRequestError: They have not.
        """
        if self._parser.state != MultipartState.END:
            raise _malformed("The multipart body ends before its last boundary.")
        for name in self.required:
            if name not in self._texts:
                raise InvalidRequestError(
                    f"The part {name} is missing.", param=name, code="upload.missing_part"
                )

    def _begin_part(self) -> None:
        self._part = None

    def _end_header(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            options = parse_options_header(bytes(self._header_value))[1]
            self._part = options.get(b"name", b"").decode("latin-1")
            if self._part == self.file:
                self.filename = options.get(b"filename", b"").decode("utf-8", "replace")
        self._header_name.clear()
        self._header_value.clear()

    def _check_part(self) -> None:
        part = self._part
        if part is None or part in self._texts or (part != self.file and part not in self.parts):
            raise InvalidRequestError(self.rule, code="upload.unexpected_part")
        self._texts[part] = bytearray()

    def _part_bytes(self, chunk: bytes, start: int, end: int) -> None:
        if self._part == self.file:
            self._num_bytes += end - start
            if self._num_bytes > self._file_limit:
                message = f"The part {self._part} exceeds the limit of {self._file_limit} bytes."
                raise PayloadTooLargeError(message, code="upload.too_large")
            self.pending += memoryview(chunk)[start:end]
        elif self._part is not None:
            text = self._texts[self._part]
            limit, _ = self.parts[self._part]
            room = limit - len(text)
            if end - start > room and self._part != "config":
                raise InvalidRequestError(f"{self._part} exceeds {limit} bytes.", param=self._part)
            text += memoryview(chunk)[start : min(end, start + room)]


def takes_form(kind: type[Form]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads this form."""
    parts = {
        kind.file: kind.file_schema,
        **{name: schema for name, (_, schema) in kind.parts.items()},
    }
    form = {
        "type": "object",
        "required": [*kind.required],
        "additionalProperties": False,
        "properties": parts,
    }
    return request_body("multipart/form-data", form)


async def read_form(
    request: Request, kind: type[FormT], file: BlobWriter, limit: int, pace: Pace
) -> FormT:
    """Read the whole body; the bytes of the file are written to `file`.

    Args:
        request: A multipart request whose body was not touched.
        kind: The form that is expected.
        file: An empty blob.
        limit: Most bytes of the file.
        pace: How slowly the client may send.

    Raises:
        RateLimitError, CapacityError: There is no room for it among the bodies in memory.
        InvalidRequestError: Not multipart, or a part that is missing or not allowed; codes `upload.*`.
        PayloadTooLargeError: Code upload.too_large.
        TimeoutExceededError: Code upload.timeout.
        CapacityError: The disk is full.
        ClientDisconnect: The client is gone.
    """
    form = kind(_boundary(request), limit)
    held_body(request).keep(STREAM_BYTES)
    try:
        async for chunk in read_chunks(request, limit + FORM_BYTES, pace, "upload.too_large"):
            form.feed(chunk)
            if len(form.pending) >= WRITE_BYTES:
                await in_thread(file.write, form.take())
        await in_thread(file.write, form.take())
    except TimeoutExceededError as error:
        raise TimeoutExceededError(error.message, code="upload.timeout") from error
    except FormParserError as error:
        raise _malformed("The multipart body is broken.") from error
    form.check_complete()
    return form


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary or len(boundary) > 200:
        raise _malformed("Send the upload as multipart/form-data with a boundary.")
    return boundary


def _malformed(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, code="upload.malformed")
