"""An upload in pieces: announced, filled file by file with pauses of any length, completed.

Every step may be repeated, at any server that shares database and blobs: the client asks how far it got. Completing
checks whether the bytes are right. What an upload became stands in its row, written in the transaction that publishes
the version.
"""

from __future__ import annotations

import hashlib
import re

from starlette.requests import Request

from manylora import errors
from manylora.adapters.blobs.local import BlobWriter
from manylora.adapters.checkpoint.peft_config import MAX_CONFIG_BYTES
from manylora.registry.idempotency import KeptAnswer, Retry
from manylora.registry.records import CONFIG_FILE, WEIGHTS_FILE, FileFacts, Upload, UploadDraft
from manylora.server.adapters.form import digest_mismatch
from manylora.server.adapters.publish import VersionDraft, checked_name, publish, write_body
from manylora.server.adapters.schemas import UploadBody, UploadView, upload_view
from manylora.server.auth.callers import TenantCaller
from manylora.server.errors import error_body
from manylora.server.process.threads import in_thread
from manylora.server.services import Services

_RANGE = re.compile(r"bytes (\d{1,16})-(\d{1,16})/(\d{1,16})")


async def announce(
    services: Services, owner: TenantCaller, body: UploadBody, retry: Retry | None
) -> KeptAnswer:
    """Make an upload, of which nothing is there yet.

    Raises:
        AdapterFormatError: The name cannot be an adapter's.
        PayloadTooLargeError: Codes upload.too_large, config.too_large.
        ForbiddenError: The tenant may not store as much; codes quota.*.
    """
    most = services.config.server.max_upload_bytes
    files: dict[str, FileFacts] = {
        name: FileFacts(**file.model_dump()) for name, file in body.files.items()
    }
    for file, limit, code in (
        (CONFIG_FILE, MAX_CONFIG_BYTES, "config"),
        (WEIGHTS_FILE, most, "upload"),
    ):
        if files[file].size > limit:
            message = f"{file} exceeds the limit of {limit} bytes."
            raise errors.PayloadTooLargeError(message, code=f"{code}.too_large", param="files")
    name = checked_name(services, body.name)
    draft = UploadDraft(
        name=name, description=body.description, activate=body.activate, files=files
    )

    def answer(upload: Upload) -> KeptAnswer:
        return KeptAnswer(
            status=201, body=upload_view(upload, dict.fromkeys(files, 0)).model_dump(mode="json")
        )

    return await services.registry.uploads.create(
        owner.tenant_id, draft, owner.identity.key_id, retry, answer
    )


async def show(services: Services, upload: Upload) -> UploadView:
    """An upload as it stands. Files of one that has ended are not looked for."""
    if upload.state != "uploading":
        return upload_view(upload, dict.fromkeys(upload.files, 0))
    return upload_view(upload, await in_thread(services.uploads.staged.sizes, upload.id))


async def receive_file(
    request: Request, services: Services, owner: TenantCaller, upload_id: str, name: str
) -> Upload:
    """Take a file, or what is left of it. What has come by the time that the client is gone stays.

    Raises:
        NotFoundError: There is no such upload, or no such file of it.
        ConflictError: It has ended, or the bytes do not follow those received; codes upload.ended,
            upload.offset_mismatch.
        PayloadTooLargeError: More bytes than announced; code upload.too_large.
        TimeoutExceededError: Code upload.timeout.
        BusyError, RateLimitError, CapacityError: Another request sends it already, the tenant sends too much at once,
            or the disk is full or S3 away.
    """
    upload = await services.registry.uploads.get(owner.tenant_id, upload_id)
    file = upload.files.get(name)
    if file is None:
        raise errors.NotFoundError("An upload has no such file.", param="file")
    if upload.state != "uploading":
        raise errors.ConflictError("The upload has ended; make a new one.", code="upload.ended")
    offset = _offset(request, file)
    await in_thread(services.blobs.check_room, file.size - (offset or 0))
    in_progress = services.uploads.in_progress
    writer = services.uploads.staged.writer(upload_id, name)
    with (
        services.drain.cancelling(),
        in_progress.stream(owner.tenant_id),
        in_progress.writing(upload_id, name),
    ):
        try:
            await in_thread(writer.open, offset)
            await write_body(request, services, file.size - (offset or 0), writer.write)
        finally:
            await in_thread(writer.close)
    return await services.registry.uploads.get(owner.tenant_id, upload_id)


async def complete(
    services: Services, owner: TenantCaller, upload: Upload, retry: Retry | None
) -> KeptAnswer:
    """Check what came and make it a version; what was completed before is answered as it was then.

    Raises:
        ConflictError: Bytes are missing; code upload.incomplete.
        BusyError: Another server receives a file of it; code upload.busy.
        AdapterError: It cannot be served, which ends the upload, or a file is not what was announced.
        ForbiddenError: The tenant may not store as much; codes quota.*.
        AnsweredBeforeError: Another server completed it.
    """
    if upload.state == "ready":
        return KeptAnswer(status=200, body=upload.result or {})
    if upload.state == "rejected":
        raise errors.AdapterFormatError.of(
            [errors.Finding(**finding) for finding in (upload.result or {})["findings"]]
        )
    view = await show(services, upload)
    if view.missing:
        gaps = ", ".join(f"{name} from byte {view.files[name].received}" for name in view.missing)
        raise errors.ConflictError(
            f"Not everything is here yet: send {gaps}.", code="upload.incomplete", param="files"
        )
    with services.blobs.create() as weights:
        try:
            config = await in_thread(gather, services, upload, weights)
        except FileNotFoundError as error:
            message = "Files of the upload were deleted meanwhile; ask how far it got."
            raise errors.ConflictError(message, code="upload.incomplete", param="files") from error
        draft = VersionDraft(
            name=upload.name,
            description=upload.description,
            activate=upload.activate,
            config=config,
        )
        try:
            made = await publish(services, owner, draft, weights, retry, upload.id)
        except errors.AdapterError as error:
            await services.registry.uploads.reject(
                upload.tenant_id, upload.id, error_body(error)["error"]
            )
            await in_thread(services.uploads.staged.delete, upload.id)
            raise
    await in_thread(services.uploads.staged.delete, upload.id)
    return made


def _offset(request: Request, file: FileFacts) -> int | None:
    """First byte by the header Content-Range; None if the body is the whole file."""
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
    staged = services.uploads.staged
    config = b"".join(staged.read(upload.id, CONFIG_FILE))
    for piece in staged.read(upload.id, WEIGHTS_FILE):
        weights.write(piece)
    found = {CONFIG_FILE: hashlib.sha256(config).hexdigest(), WEIGHTS_FILE: weights.sha256()}
    wrong = [name for name, file in upload.files.items() if found[name] != file.sha256]
    if wrong:
        staged.delete(upload.id, *wrong)
        raise digest_mismatch(wrong[0])
    return config
