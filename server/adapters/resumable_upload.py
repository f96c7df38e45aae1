"""An upload in pieces: announced, filled file by file with pauses of any length, completed.

Every step may be repeated. The files of an upload lie in one folder of its own on this server. What was received is
what lies there, so a crash needs no bookkeeping: the client asks how far it got. Completing checks whether the bytes
are right. What an upload became stands in its row, written in the transaction that publishes the version.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from starlette.requests import Request

from weft import errors
from weft.adapters.blobs.local import PIECE_BYTES, BlobWriter, full_disk_is_capacity, write_all
from weft.adapters.blobs.store import read_pieces
from weft.adapters.checkpoint.peft_config import MAX_CONFIG_BYTES
from weft.registry.records import CONFIG_FILE, WEIGHTS_FILE, FileFacts, Upload, UploadDraft
from weft.registry.uploads import Answer, Retry
from weft.server.adapters.publish import VersionDraft, checked_name, publish, write_body
from weft.server.adapters.schemas import UploadBody, UploadView, upload_view
from weft.server.adapters.upload_guards import FILES
from weft.server.auth.callers import TenantCaller
from weft.server.errors import error_body
from weft.server.http.form import digest_mismatch
from weft.server.services import Services
from weft.server.threads import in_thread

_ID = re.compile(r"upl_[0-9a-f]{26}")
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
_RANGE = re.compile(r"bytes (\d{1,16})-(\d{1,16})/(\d{1,16})")


async def announce(services: Services, owner: TenantCaller, body: UploadBody, retry: Retry | None) -> Answer:
    """Make an upload, of which nothing is there yet but weights that the tenant has stored before.

    Raises:
        AdapterFormatError: The name cannot be an adapter's.
        PayloadTooLargeError: Codes upload.too_large, config.too_large.
        ForbiddenError: The tenant may not store as much; codes quota.*.
    """
    most = services.config.server.max_upload_bytes
    files: dict[str, FileFacts] = {name: FileFacts(**file.model_dump()) for name, file in body.files.items()}
    for file, limit, code in ((CONFIG_FILE, MAX_CONFIG_BYTES, "config"), (WEIGHTS_FILE, most, "upload")):
        if files[file].size > limit:
            message = f"{file} exceeds the limit of {limit} bytes."
            raise errors.PayloadTooLargeError(message, code=f"{code}.too_large", param="files")
    name = checked_name(services, body.name)
    draft = UploadDraft(name=name, description=body.description, activate=body.activate, files=files)

    def answer(upload: Upload) -> Answer:
        return Answer(status=201, body=upload_view(upload, dict.fromkeys(files, 0)).model_dump(mode="json"))

    return await services.registry.uploads.create(owner.tenant_id, draft, owner.identity.key_id, retry, answer)


async def show(services: Services, upload: Upload) -> UploadView:
    """An upload as it stands."""
    return upload_view(upload, await asyncio.to_thread(services.staged.sizes, upload.id))


async def receive_file(request: Request, services: Services, owner: TenantCaller, upload_id: str, name: str) -> Upload:
    """Take a file, or what is left of it. What has come by the time that the client is gone stays.

    Raises:
        NotFoundError: There is no such upload, or no such file of it.
        ConflictError: It has ended, or the bytes do not follow those received; codes upload.ended,
            upload.offset_mismatch.
        PayloadTooLargeError: More bytes than announced; code upload.too_large.
        TimeoutExceededError: Code upload.timeout.
        BusyError, RateLimitError, CapacityError: Somebody sends it already, the tenant sends too much at once, or the
            disk is full.
    """
    upload = await services.registry.uploads.get(owner.tenant_id, upload_id)
    file = upload.files.get(name)
    if file is None:
        raise errors.NotFoundError("An upload has no such file.", param="file")
    if upload.state != "uploading":
        raise errors.ConflictError("The upload has ended; make a new one.", code="upload.ended")
    offset = _offset(request, file)
    intake = services.intake
    with (
        services.drain.cancelling(),
        intake.stream(owner.tenant_id),
        intake.writing(upload_id, name),
        services.staged.appending(upload_id, name, offset) as fd,
    ):
        try:
            await write_body(request, services, file.size - (offset or 0), partial(write_all, fd))
        finally:
            await in_thread(sync, fd)
    return await services.registry.uploads.get(owner.tenant_id, upload_id)


async def complete(services: Services, owner: TenantCaller, upload: Upload, retry: Retry | None) -> Answer:
    """Check what came and make it a version; what was completed before is answered as it was then.

    Raises:
        ConflictError: Bytes are missing; code upload.incomplete.
        AdapterError: It cannot be served, which ends the upload, or a file is not what was announced.
        ForbiddenError: The tenant may not store as much; codes quota.*.
        AnsweredBeforeError: Another server completed it.
    """
    if upload.state == "ready":
        return Answer(status=200, body=upload.result or {})
    if upload.state == "rejected":
        raise errors.AdapterFormatError.of([errors.Finding(**finding) for finding in (upload.result or {})["findings"]])
    view = await show(services, upload)
    if view.missing:
        gaps = ", ".join(f"{name} from byte {view.files[name].received}" for name in view.missing)
        raise errors.ConflictError(f"Not everything is here yet: send {gaps}.", code="upload.incomplete", param="files")
    with services.blobs.create() as weights:
        config = await in_thread(gather, services, upload, weights)
        draft = VersionDraft(name=upload.name, description=upload.description, activate=upload.activate, config=config)
        try:
            made = await publish(services, owner, draft, weights, retry, upload.id)
        except errors.AdapterError as error:
            await services.registry.uploads.reject(upload.tenant_id, upload.id, error_body(error)["error"])
            await asyncio.to_thread(services.staged.delete, upload.id)
            raise
    await asyncio.to_thread(services.staged.delete, upload.id)
    return made


def sync(fd: int) -> None:
    """Make all bytes of a file durable.

    Raises:
        CapacityError: The disk is full (code storage.full).
    """
    with full_disk_is_capacity():
        os.fsync(fd)


def _offset(request: Request, file: FileFacts) -> int | None:
    """Where the bytes begin by the header Content-Range; None where they are the whole file."""
    given = request.headers.get("content-range")
    if given is None:
        return None
    found = _RANGE.fullmatch(given)
    first, last, total = (int(number) for number in found.groups()) if found else (0, -1, 0)
    if not (first <= last < total == file.size):
        message = f"Content-Range must be bytes FIRST-LAST/{file.size}; the last number is the announced size."
        raise errors.InvalidRequestError(message, param="content-range")
    return first


def gather(services: Services, upload: Upload, weights: BlobWriter) -> bytes:
    """Copy the weights into `weights` and return the config, if both are what was announced."""
    staged, files = services.staged, upload.files
    config = b"".join(staged.read(upload.id, CONFIG_FILE))
    is_staged = staged.sizes(upload.id)[WEIGHTS_FILE] == files[WEIGHTS_FILE].size
    stored = files[WEIGHTS_FILE].sha256
    for piece in staged.read(upload.id, WEIGHTS_FILE) if is_staged else read_pieces(services.blobs, stored):
        weights.write(piece)
    found = {CONFIG_FILE: hashlib.sha256(config).hexdigest(), WEIGHTS_FILE: weights.sha256()}
    wrong = [name for name, file in files.items() if found[name] != file.sha256]
    if wrong:
        staged.delete(upload.id, *wrong)
        raise digest_mismatch(wrong[0])
    return config


class StagedFiles:
    """Files of uploads in pieces: one folder per upload, with names of our own. Thread-safe; one writer per file."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def sizes(self, upload_id: str) -> dict[str, int]:
        """How many bytes of each file were received."""
        sizes = dict.fromkeys(FILES, 0)
        for name in FILES:
            with suppress(FileNotFoundError):
                sizes[name] = (self._folder(upload_id) / name).stat(follow_symlinks=False).st_size
        return sizes

    @contextmanager
    def appending(self, upload_id: str, name: str, offset: int | None) -> Iterator[int]:
        """Open a file that has `offset` bytes for appending; None empties it first. Yields its descriptor.

        Raises:
            ConflictError: The file does not end at `offset`; code upload.offset_mismatch.
            CapacityError: The disk is full (code storage.full).
        """
        folder = self._folder(upload_id)
        with full_disk_is_capacity():
            folder.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _FLAGS, 0o600)
        try:
            received = os.fstat(fd).st_size
            if offset is None:
                os.ftruncate(fd, 0)
            elif offset != received:
                message = f"{received} bytes of the file were received; go on with byte {received}."
                raise errors.ConflictError(message, code="upload.offset_mismatch", param="content-range")
            yield fd
        finally:
            os.close(fd)

    def read(self, upload_id: str, name: str) -> Iterator[bytes]:
        """A file's bytes in pieces of `PIECE_BYTES`."""
        with os.fdopen(os.open(self._folder(upload_id) / name, os.O_RDONLY | _FLAGS), "rb") as file:
            while piece := file.read(PIECE_BYTES):
                yield piece

    def delete(self, upload_id: str, *names: str) -> None:
        """Remove these files, or without names the whole folder; what is not there is no error."""
        folder = self._folder(upload_id)
        for name in names:
            (folder / name).unlink(missing_ok=True)
        if not names:
            with suppress(FileNotFoundError):
                shutil.rmtree(folder)

    def ids(self) -> list[str]:
        """Uploads that have a folder."""
        return [name for name in os.listdir(self._root) if _ID.fullmatch(name)]

    def _folder(self, upload_id: str) -> Path:
        if not _ID.fullmatch(upload_id):
            raise ValueError(f"no id of an upload: {upload_id!r}")
        return self._root / upload_id
