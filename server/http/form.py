"""Reads uploads: a strict multipart reader with its own byte limits.

The file goes to a temporary blob while it is hashed; nothing else is written to disk. File names are never paths.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from weft.adapters.blobs.local import BlobWriter
from weft.adapters.checkpoint.peft_config import MAX_CONFIG_BYTES
from weft.errors import AdapterFormatError, InvalidRequestError, PayloadTooLargeError, TimeoutExceededError
from weft.server.http.body import Pace, read_chunks
from weft.server.threads import in_thread

FORM_BYTES = 1 << 20
"""Most bytes of an upload besides the weights: other parts, headers, boundaries."""
WRITE_BYTES = 1 << 20
"""Weights are written in pieces of about this size."""
TEXT_LIMITS = {
    "name": 1024,
    "tenant": 1024,
    "description": 16 * 1024,
    "activate": 16,
    "sha256": 80,
    "config": MAX_CONFIG_BYTES + 1,
}
WEIGHTS = "weights"
MAX_HEADERS = 8
MAX_HEADER_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Which parts a form may have."""

    file: str
    """The part with the file, which goes to a blob."""
    texts: Mapping[str, int]
    """The other parts, and the most bytes of each."""
    rule: str
    """The error message for any other part."""


ADAPTER_PARTS = Parts(
    file=WEIGHTS,
    texts=TEXT_LIMITS,
    rule="An upload has the parts name, config and weights, and may have tenant, description, activate and "
    "sha256 (of the weights), each once.",
)


@dataclass(slots=True)
class Form:
    """The parts that came, except the bytes of the file."""

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

    def check_has(self, names: Sequence[str], file: str) -> None:
        """Return if these parts came.

        Raises:
            InvalidRequestError: One did not; code upload.missing_part.
        """
        present = {*self.texts, *((file,) if self.has_file else ())}
        for name in names:
            if name not in present:
                raise InvalidRequestError(f"The part {name} is missing.", param=name, code="upload.missing_part")


class UploadForm(Form):
    """The parts of an adapter's upload, except the weights."""

    __slots__ = ()

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


async def read_upload(request: Request, weights: BlobWriter, limit: int, pace: Pace) -> UploadForm:
    """Read an adapter's upload; the weights are written to `weights`. Arguments and errors are those of `read_form`."""
    form = UploadForm()
    await read_form(request, form, ADAPTER_PARTS, weights, limit, pace)
    form.check_has(("name", "config", WEIGHTS), WEIGHTS)
    return form


async def read_form(request: Request, form: Form, parts: Parts, file: BlobWriter, limit: int, pace: Pace) -> None:
    """Read the whole body into `form`; the bytes of the file are written to `file`.

    Args:
        request: A multipart request whose body was not touched.
        form: Takes the texts.
        parts: The parts that are allowed.
        file: An empty blob.
        limit: Most bytes of the file.
        pace: How slowly the client may send.

    Raises:
        InvalidRequestError: Not multipart, or a part that is not allowed; codes `upload.*`.
        PayloadTooLargeError: Code upload.too_large.
        TimeoutExceededError: Code upload.timeout.
        CapacityError: The disk is full.
        ClientDisconnect: The client is gone.
    """
    reader = _FormReader(_boundary(request), form, parts, limit)
    try:
        async for chunk in read_chunks(request, limit + FORM_BYTES, pace, "upload.too_large"):
            for start in range(0, len(chunk), WRITE_BYTES):
                reader.feed(chunk[start : start + WRITE_BYTES])
                if reader.num_pending >= WRITE_BYTES:
                    await in_thread(file.write, reader.take())
        await in_thread(file.write, reader.take())
    except TimeoutExceededError as error:
        raise TimeoutExceededError(error.message, code="upload.timeout") from error
    except FormParserError as error:
        raise _malformed("The multipart body is broken.") from error
    reader.check_ended()


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary or len(boundary) > 200:
        raise _malformed("Send the upload as multipart/form-data with a boundary.")
    return boundary


class _FormReader:
    """Splits multipart bytes into parts. `take` returns the bytes of the file that are to be written."""

    def __init__(self, boundary: bytes, form: Form, parts: Parts, file_limit: int) -> None:
        self._form = form
        self._parts = parts
        self._file_limit = file_limit
        self._num_bytes = 0
        self._pending = bytearray()
        self._header = (b"", b"")
        self._part: str | None = None
        self._has_ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
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

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def take(self) -> bytearray:
        pending, self._pending = self._pending, bytearray()
        return pending

    def check_ended(self) -> None:
        if not self._has_ended:
            raise _malformed("The multipart body ends before its last boundary.")

    def _begin_part(self) -> None:
        self._part, self._header = None, (b"", b"")

    def _header_field(self, chunk: bytes, start: int, end: int) -> None:
        name, value = self._header
        self._header = (name + chunk[start:end], value)

    def _header_value(self, chunk: bytes, start: int, end: int) -> None:
        name, value = self._header
        self._header = (name, value + chunk[start:end])

    def _end_header(self) -> None:
        (name, value), self._header = self._header, (b"", b"")
        if name.lower() == b"content-disposition":
            options = parse_options_header(value)[1]
            self._part = options.get(b"name", b"").decode("latin-1")
            if self._part == self._parts.file:
                self._form.filename = options.get(b"filename", b"").decode("utf-8", "replace")

    def _check_part(self) -> None:
        part = self._part
        form, parts = self._form, self._parts
        is_new = part not in form.texts and not (part == parts.file and form.has_file)
        if part is None or not is_new or (part != parts.file and part not in parts.texts):
            raise InvalidRequestError(parts.rule, code="upload.unexpected_part")
        if part == parts.file:
            form.has_file = True
        else:
            form.texts[part] = bytearray()

    def _part_bytes(self, chunk: bytes, start: int, end: int) -> None:
        if self._part == self._parts.file:
            self._num_bytes += end - start
            if self._num_bytes > self._file_limit:
                raise PayloadTooLargeError(
                    f"The part {self._part} exceeds the limit of {self._file_limit} bytes.", code="upload.too_large"
                )
            self._pending += memoryview(chunk)[start:end]
        elif self._part is not None:
            self._text_bytes(self._part, memoryview(chunk)[start:end])

    def _text_bytes(self, part: str, piece: memoryview) -> None:
        text, limit = self._form.texts[part], self._parts.texts[part]
        room = limit - len(text)
        if len(piece) > room and part != "config":
            raise InvalidRequestError(f"{part} exceeds {limit} bytes.", param=part)
        text += piece[:room]

    def _end(self) -> None:
        self._has_ended = True


def digest_mismatch(file: str) -> AdapterFormatError:
    """The error for a file that does not have the announced digest."""
    return AdapterFormatError(
        f"The bytes of {file} do not have the SHA-256 that was announced; send the file again.",
        code="upload.digest_mismatch",
        param=file,
    )


def _malformed(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, code="upload.malformed")
