"""Reads uploads: a strict multipart reader with its own byte limits.

The file goes to a temporary blob while it is hashed; nothing else is written to disk. File names are never paths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from weft.adapters.blobs.local import BlobWriter
from weft.adapters.checkpoint.peft_config import MAX_CONFIG_BYTES
from weft.errors import AdapterFormatError, InvalidRequestError, PayloadTooLargeError, TimeoutExceededError
from weft.server.http.body import Pace, read_chunks
from weft.server.http.openapi import BINARY, TEXT
from weft.server.threads import in_thread

FORM_BYTES = 1 << 20
"""Most bytes of an upload besides the weights: other parts, headers, boundaries."""
WRITE_BYTES = 1 << 20
"""Weights are written in pieces of about this size."""
WEIGHTS = "weights"
MAX_HEADERS = 8
MAX_HEADER_BYTES = 4096
FormT = TypeVar("FormT", bound="Form")


@dataclass(slots=True)
class Form:
    """The parts that came, except the bytes of the file. A subclass says which parts there are."""

    file: ClassVar[str]
    """The part with the file, which goes to a blob."""
    limits: ClassVar[Mapping[str, int]]
    """The other parts, and the most bytes of each."""
    required: ClassVar[tuple[str, ...]]
    """The parts that must come."""
    rule: ClassVar[str]
    """The error message for any other part."""
    properties: ClassVar[Mapping[str, object]]
    """The parts for the OpenAPI page."""

    texts: dict[str, bytearray] = field(default_factory=dict)
    has_file: bool = False
    filename: str = ""
    """The file name that the client gave."""

    def text(self, name: str) -> str | None:
        """A part's text; None where it did not come."""
        raw = self.texts.get(name)
        try:
            return None if raw is None else raw.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"{name} must be text in UTF-8.", param=name) from error

    def has(self, name: str) -> bool:
        """Whether a part came."""
        return self.has_file if name == self.file else name in self.texts


class UploadForm(Form):
    """The parts of an adapter's upload, except the weights."""

    __slots__ = ()
    file = WEIGHTS
    limits: ClassVar[Mapping[str, int]] = {
        "name": 1024,
        "tenant": 1024,
        "description": 16 * 1024,
        "activate": 16,
        "sha256": 80,
        "config": MAX_CONFIG_BYTES + 1,
    }
    required = ("name", "config", WEIGHTS)
    rule = (
        "An upload has the parts name, config and weights, and may have tenant, description, activate and "
        "sha256 (of the weights), each once."
    )
    properties: ClassVar[Mapping[str, object]] = {
        "name": TEXT,
        "config": {**BINARY, "description": "adapter_config.json"},
        "weights": {**BINARY, "description": "adapter_model.safetensors, or MLX's adapters.safetensors"},
        "tenant": {**TEXT, "description": "For admins."},
        "description": TEXT,
        "activate": {"enum": ["true", "false", "1", "0"], "default": "true"},
        "sha256": {**TEXT, "description": "SHA-256 of the weights; other bytes are refused."},
    }

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
        return bytes(self.texts["config"])


async def read_form(request: Request, kind: type[FormT], file: BlobWriter, limit: int, pace: Pace) -> FormT:
    """Read the whole body; the bytes of the file are written to `file`.

    Args:
        request: A multipart request whose body was not touched.
        kind: The form that is expected.
        file: An empty blob.
        limit: Most bytes of the file.
        pace: How slowly the client may send.

    Raises:
        InvalidRequestError: Not multipart, or a part that is missing or not allowed; codes `upload.*`.
        PayloadTooLargeError: Code upload.too_large.
        TimeoutExceededError: Code upload.timeout.
        CapacityError: The disk is full.
        ClientDisconnect: The client is gone.
    """
    form = kind()
    reader = _FormReader(_boundary(request), form, limit)
    try:
        async for chunk in read_chunks(request, limit + FORM_BYTES, pace, "upload.too_large"):
            for start in range(0, len(chunk), WRITE_BYTES):
                reader.feed(chunk[start : start + WRITE_BYTES])
                if len(reader.pending) >= WRITE_BYTES:
                    await in_thread(file.write, reader.take())
        await in_thread(file.write, reader.take())
    except TimeoutExceededError as error:
        raise TimeoutExceededError(error.message, code="upload.timeout") from error
    except FormParserError as error:
        raise _malformed("The multipart body is broken.") from error
    reader.check_complete()
    return form


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary or len(boundary) > 200:
        raise _malformed("Send the upload as multipart/form-data with a boundary.")
    return boundary


class _FormReader:
    """Splits multipart bytes into parts."""

    def __init__(self, boundary: bytes, form: Form, file_limit: int) -> None:
        self._form = form
        self._file_limit = file_limit
        self._num_bytes = 0
        self.pending = bytearray()
        """Bytes of the file that are to be written."""
        self._header_name, self._header_value = bytearray(), bytearray()
        self._part: str | None = None
        self._has_ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._name_bytes,
                "on_header_value": self._value_bytes,
                "on_header_end": self._end_header,
                "on_headers_finished": self._check_part,
                "on_part_data": self._part_bytes,
                "on_end": self._end,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )

    def feed(self, chunk: bytes) -> None:
        self._parser.write(chunk)

    def take(self) -> bytearray:
        pending, self.pending = self.pending, bytearray()
        return pending

    def check_complete(self) -> None:
        if not self._has_ended:
            raise _malformed("The multipart body ends before its last boundary.")
        for name in self._form.required:
            if not self._form.has(name):
                raise InvalidRequestError(f"The part {name} is missing.", param=name, code="upload.missing_part")

    def _begin_part(self) -> None:
        self._part = None

    def _name_bytes(self, chunk: bytes, start: int, end: int) -> None:
        self._header_name += chunk[start:end]

    def _value_bytes(self, chunk: bytes, start: int, end: int) -> None:
        self._header_value += chunk[start:end]

    def _end_header(self) -> None:
        name, value = bytes(self._header_name), bytes(self._header_value)
        self._header_name, self._header_value = bytearray(), bytearray()
        if name.lower() == b"content-disposition":
            options = parse_options_header(value)[1]
            self._part = options.get(b"name", b"").decode("latin-1")
            if self._part == self._form.file:
                self._form.filename = options.get(b"filename", b"").decode("utf-8", "replace")

    def _check_part(self) -> None:
        part, form = self._part, self._form
        if part is None or form.has(part) or (part != form.file and part not in form.limits):
            raise InvalidRequestError(form.rule, code="upload.unexpected_part")
        if part == form.file:
            form.has_file = True
        else:
            form.texts[part] = bytearray()

    def _part_bytes(self, chunk: bytes, start: int, end: int) -> None:
        if self._part == self._form.file:
            self._num_bytes += end - start
            if self._num_bytes > self._file_limit:
                raise PayloadTooLargeError(
                    f"The part {self._part} exceeds the limit of {self._file_limit} bytes.", code="upload.too_large"
                )
            self.pending += memoryview(chunk)[start:end]
        elif self._part is not None:
            text, limit = self._form.texts[self._part], self._form.limits[self._part]
            room = limit - len(text)
            if end - start > room and self._part != "config":
                raise InvalidRequestError(f"{self._part} exceeds {limit} bytes.", param=self._part)
            text += memoryview(chunk)[start : min(end, start + room)]

    def _end(self) -> None:
        self._has_ended = True


def digest_mismatch(file: str) -> AdapterFormatError:
    """The error for a file that does not have the announced digest."""
    message = f"The bytes of {file} do not have the SHA-256 that was announced; send the file again."
    return AdapterFormatError(message, code="upload.digest_mismatch", param=file)


def _malformed(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, code="upload.malformed")
