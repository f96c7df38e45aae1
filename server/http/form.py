"""Reads uploads: a strict multipart reader with its own byte limits.

The file goes to a temporary blob while it is hashed; nothing else is written to disk. File names are never paths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, TypeVar

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header
from starlette.requests import Request

from manylora.adapters.blobs.local import BlobWriter
from manylora.adapters.checkpoint.peft_config import MAX_CONFIG_BYTES
from manylora.errors import (
    AdapterFormatError,
    InvalidRequestError,
    PayloadTooLargeError,
    TimeoutExceededError,
)
from manylora.server.http.body import STREAM_BYTES, Pace, held_body, read_chunks
from manylora.server.http.openapi import BINARY, TEXT
from manylora.server.process.threads import in_thread

FORM_BYTES = 1 << 20
"""Most bytes of an upload besides the weights: other parts, headers, boundaries."""
WRITE_BYTES = 1 << 20
"""Weights are written in pieces of about this size."""
WEIGHTS = "weights"
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
        self._name, self._value = bytearray(), bytearray()
        """Of the header that is being read."""
        self._part: str | None = None
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda chunk, start, end: self._name.extend(chunk[start:end]),
                "on_header_value": lambda chunk, start, end: self._value.extend(chunk[start:end]),
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
        if self._name.lower() == b"content-disposition":
            options = parse_options_header(bytes(self._value))[1]
            self._part = options.get(b"name", b"").decode("latin-1")
            if self._part == self.file:
                self.filename = options.get(b"filename", b"").decode("utf-8", "replace")
        self._name.clear()
        self._value.clear()

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
            text, (limit, _) = self._texts[self._part], self.parts[self._part]
            room = limit - len(text)
            if end - start > room and self._part != "config":
                raise InvalidRequestError(f"{self._part} exceeds {limit} bytes.", param=self._part)
            text += memoryview(chunk)[start : min(end, start + room)]


class UploadForm(Form):
    """The parts of an adapter's upload, except the weights."""

    file = WEIGHTS
    file_schema: ClassVar[Mapping[str, object]] = {
        **BINARY,
        "description": "adapter_model.safetensors, or MLX's adapters.safetensors",
    }
    parts: ClassVar[Mapping[str, tuple[int, Mapping[str, object]]]] = {
        "name": (1024, TEXT),
        "config": (MAX_CONFIG_BYTES + 1, {**BINARY, "description": "adapter_config.json"}),
        "tenant": (1024, {**TEXT, "description": "For admins."}),
        "description": (16 * 1024, TEXT),
        "activate": (16, {"enum": ["true", "false", "1", "0"], "default": "true"}),
        "sha256": (80, {**TEXT, "description": "SHA-256 of the weights; other bytes are refused."}),
    }
    required = ("name", "config", WEIGHTS)
    rule = (
        "An upload has the parts name, config and weights, and may have tenant, description, activate and "
        "sha256 (of the weights), each once."
    )

    @property
    def activate(self) -> bool:
        """Whether the alias `default` moves to this version."""
        word = (self.text("activate") or "true").lower()
        if word not in ("true", "false", "1", "0"):
            raise InvalidRequestError("activate must be true or false.", param="activate")
        return word in ("true", "1")

    def check_digest(self, sha256: str) -> None:
        """Return if the weights have the digest that was announced, or none was.

        Raises:
            InvalidRequestError: What was announced is no SHA-256.
            AdapterFormatError: Other bytes came; code upload.digest_mismatch.
        """
        announced = (self.text("sha256") or sha256).removeprefix("sha256:").lower()
        if not re.fullmatch(r"[0-9a-f]{64}", announced):
            raise InvalidRequestError("sha256 must be 64 hex digits.", param="sha256")
        if announced != sha256:
            raise digest_mismatch(WEIGHTS)

    @property
    def config(self) -> bytes:
        """`adapter_config.json`. One over the limit is cut one byte after it, so that its reader refuses it."""
        return bytes(self._texts["config"])


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
            for start in range(0, len(chunk), WRITE_BYTES):
                form.feed(chunk[start : start + WRITE_BYTES])
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


def digest_mismatch(file: str) -> AdapterFormatError:
    """The error for a file that does not have the announced digest."""
    message = (
        f"The bytes of {file} do not have the SHA-256 that was announced; send the file again."
    )
    return AdapterFormatError(message, code="upload.digest_mismatch", param=file)


def _malformed(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, code="upload.malformed")
