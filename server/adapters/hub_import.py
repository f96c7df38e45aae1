"""Fetches an adapter's two files from the Hugging Face hub or from S3: for the admin, never from a tenant's input.

Who may read what there is decided by the server's own environment: HF_ENDPOINT and HF_TOKEN, AWS_... .
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from functools import partial

from manylora.adapters.blobs.local import PIECE_BYTES, BlobWriter
from manylora.adapters.blobs.store import may_lack_tls
from manylora.adapters.checkpoint.peft_config import MAX_CONFIG_BYTES
from manylora.errors import CapacityError, InvalidRequestError, NotFoundError, PayloadTooLargeError
from manylora.registry.records import CONFIG_FILE, WEIGHTS_FILE
from manylora.server.process.threads import in_thread

IMPORT_S = 600.0
"""Seconds for both files."""
SILENCE_S = 30.0
"""Longest wait for the next bytes from the hub."""
_HUB = re.compile(r"hf://([\w.-]{1,96}/[\w.-]{1,96})(?:@([\w.-]{1,255}))?", re.ASCII)
_S3 = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([^\x00-\x1f\x7f]{0,1024}))?")
_UNKNOWN = (401, 403, 404)
Reader = Callable[[str], AsyncIterator[bytes]]


def reader_of(source: str) -> Reader:
    """Reader of the files of a source.

    Raises:
        InvalidRequestError: Neither a place on the hub nor in S3.
    """
    if found := _HUB.fullmatch(source):
        return partial(_from_hub, *found.groups())
    if found := _S3.fullmatch(source):
        return partial(_from_s3, found[1], (found[2] or "").strip("/"))
    message = "source must be hf://organization/repository[@revision] or s3://bucket/prefix."
    raise InvalidRequestError(message, param="source")


async def fetch(read: Reader, weights: BlobWriter, limit: int) -> bytes:
    """Write the weights, at most `limit` bytes, to `weights`, and return the config.

    Raises:
        NotFoundError: A file is not there, or not for this server; code import.not_found.
        PayloadTooLargeError: Codes config.too_large, upload.too_large.
        CapacityError: The source gives no answer, or not within 10 minutes; code import.unavailable.
    """
    config = bytearray()
    try:
        async with asyncio.timeout(IMPORT_S):
            async for piece in _bounded(read(CONFIG_FILE), MAX_CONFIG_BYTES, "config.too_large"):
                config += piece
            async for piece in _bounded(read(WEIGHTS_FILE), limit, "upload.too_large"):
                await in_thread(weights.write, piece)
    except TimeoutError as error:
        raise _unavailable() from error
    return bytes(config)


async def _bounded(pieces: AsyncIterator[bytes], limit: int, code: str) -> AsyncIterator[bytes]:
    received = 0
    async for piece in pieces:
        received += len(piece)
        if received > limit:
            raise PayloadTooLargeError(
                f"The file exceeds the limit of {limit} bytes.", code=code, param="source"
            )
        yield piece


async def _from_hub(repository: str, revision: str | None, file: str) -> AsyncIterator[bytes]:
    import httpx
    from huggingface_hub import constants, get_token, hf_hub_url
    from huggingface_hub.errors import HFValidationError

    if constants.HF_HUB_OFFLINE:
        message = "The server runs with HF_HUB_OFFLINE, so it cannot import from a hub."
        raise InvalidRequestError(message, param="source")
    token = get_token()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    try:
        url = hf_hub_url(repository, file, revision=revision)
        async with (
            httpx.AsyncClient(follow_redirects=True, timeout=SILENCE_S) as client,
            client.stream("GET", url, headers=headers) as answer,
        ):
            if answer.status_code in _UNKNOWN:
                raise _not_found(file)
            answer.raise_for_status()
            async for piece in answer.aiter_bytes(PIECE_BYTES):
                yield piece
    except HFValidationError as error:
        raise _not_found(file) from error
    except httpx.HTTPError as error:
        raise _unavailable() from error


async def _from_s3(bucket: str, prefix: str, file: str) -> AsyncIterator[bytes]:
    try:
        import obstore
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
        from obstore.store import S3Store

        from manylora.adapters.blobs.bucket import reason_of
    except ModuleNotFoundError as error:
        raise InvalidRequestError(
            "obstore is missing here: pip install 'manylora[s3]'.", param="source"
        ) from error

    try:
        store = S3Store(
            bucket,
            prefix=prefix or None,
            client_options={"allow_http": may_lack_tls(), "timeout": f"{IMPORT_S:g}s"},
        )
        found = await obstore.get_async(store, file)
        async for piece in found.stream(PIECE_BYTES):
            yield bytes(piece)
    except (FileNotFoundError, PermissionDeniedError, UnauthenticatedError) as error:
        raise _not_found(file) from error
    except BaseError as error:
        reason, is_final = reason_of(error)
        raise (_not_found(file, f" ({reason})") if is_final else _unavailable()) from error


def _not_found(file: str, why: str = "") -> NotFoundError:
    message = f"There is no {file} at the source, or this server may not read it{why}."
    return NotFoundError(message, code="import.not_found", param="source")


def _unavailable() -> CapacityError:
    message = "The source does not answer now; try again later."
    return CapacityError(message, retry_after_s=30.0, code="import.unavailable", param="source")
