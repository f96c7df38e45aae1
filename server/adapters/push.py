"""Routes for trainers: the bytes of a version in one request, or a folder of this machine, as vLLM takes it.

Both are validated as any upload is. An ephemeral version's weights stay in memory, and go to the engine's host memory
before the answer does.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, BinaryIO

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse

from manylora.adapters.blobs.local import PIECE_BYTES, BlobWriter, open_below
from manylora.adapters.checkpoint.peft_config import MAX_CONFIG_BYTES
from manylora.errors import ForbiddenError, InvalidRequestError, PayloadTooLargeError
from manylora.registry.records import CONFIG_FILE, WEIGHTS_FILE, Ephemeral
from manylora.server.adapters.idempotency import answered
from manylora.server.adapters.publish import (
    VersionDraft,
    checked_name,
    publish,
    room_for_upload,
    write_body,
)
from manylora.server.adapters.routes import PUBLISHES
from manylora.server.adapters.schemas import LoadBody, UnloadBody
from manylora.server.auth.callers import TenantCaller, TenantWriter
from manylora.server.http.body import content_length
from manylora.server.http.openapi import takes, takes_bytes
from manylora.server.process.threads import in_thread
from manylora.server.services import Services, Wired

CONFIG_HEADER = "x-manylora-adapter-config"


router = APIRouter(tags=["adapters"])


@router.put(
    "/v1/adapters/{name}/versions:push",
    openapi_extra=takes_bytes(
        CONFIG_HEADER, "adapter_config.json in base64; a push without it is refused."
    ),
    **PUBLISHES,
)
async def push_version(  # noqa: PLR0913 - one parameter per option
    name: str,
    request: Request,
    services: Wired,
    caller: TenantWriter,
    ephemeral: bool = False,
    keep: Annotated[int | None, Query(ge=1, le=1000)] = None,
    ttl_s: Annotated[int | None, Query(ge=1, le=30 * 24 * 3600)] = None,
    activate: bool = True,
) -> Response:
    """Publish a version from adapter_model.safetensors as the body.

    With `ephemeral=true` its weights stay in this server's memory: it goes with the server, after `ttl_s` seconds, or
    when `keep` newer ones are there. Requests that run with it finish.
    """
    config = _config_of(request)
    life = None
    if ephemeral:
        ends = None if ttl_s is None else services.clock.now() + timedelta(seconds=ttl_s)
        life = Ephemeral(server=services.server_name, keep=keep, expires_at=ends)
    elif keep is not None or ttl_s is not None:
        raise InvalidRequestError("keep and ttl_s are for ephemeral=true.", param="ephemeral")
    draft = VersionDraft(
        name=checked_name(services, name), description=None, activate=activate, config=config
    )
    with services.drain.cancelling(), services.uploads.in_progress.stream(caller.tenant_id):
        async with room_for_upload(request, services, caller.tenant_id) as limit:
            create = services.blobs.create
            if life is None:
                await in_thread(services.blobs.check_room, min(limit, content_length(request) or 0))
            else:
                create = await _room_in_memory(services, caller, content_length(request) or limit)
            with create() as weights:
                await write_body(request, services, limit, weights.write)
                if life is not None:
                    weights.prepare()  # before anybody reads it
                return answered(await publish(services, caller, draft, weights, life=life))


@router.post(
    "/v1/load_lora_adapter",
    openapi_extra=takes(LoadBody),
    response_class=PlainTextResponse,
)
async def load_lora_adapter(request: Request, services: Wired, caller: TenantWriter) -> Response:
    """Publish an adapter from a folder of the server's machine as an ephemeral version, as vLLM loads it."""
    limit = services.config.server.max_upload_bytes
    roots = services.config.adapter.roots
    body = await services.bodies.json(request, LoadBody)
    name = checked_name(services, body.lora_name)
    life = Ephemeral(server=services.server_name, keep=1)
    with services.drain.cancelling(), services.uploads.in_progress.stream(caller.tenant_id):
        create = await _room_in_memory(services, caller, limit)
        with create() as weights:
            config = await in_thread(_read_folder, roots, body.lora_path, weights, limit)
            weights.prepare()
            draft = VersionDraft(name=name, description=None, activate=True, config=config)
            await publish(services, caller, draft, weights, life=life)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post(
    "/v1/unload_lora_adapter", openapi_extra=takes(UnloadBody), response_class=PlainTextResponse
)
async def unload_lora_adapter(request: Request, services: Wired, caller: TenantWriter) -> Response:
    """Withdraw all ephemeral versions of an adapter; requests that run with them finish."""
    body = await services.bodies.json(request, UnloadBody)
    removed = await services.registry.ephemeral.unload(
        caller.tenant_id, body.lora_name, caller.actor
    )
    await services.versions.garbage.remove(removed)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


async def _room_in_memory(
    services: Services, owner: TenantCaller, num_bytes: int
) -> Callable[[], BlobWriter]:
    """Maker of a blob of a tenant in memory. Where there may be too little room, expired versions are freed first.

    A tenant may fill half of the memory while there are other tenants, all of it by itself.
    """
    memory = services.versions.weights.blobs
    most = memory.most_bytes
    if memory.num_bytes + num_bytes > most // 2:
        await services.versions.garbage.remove(await services.registry.ephemeral.expire())
        if len((await services.registry.tenants.list_tenants(limit=2)).items) > 1:
            most //= 2
    return partial(memory.create, owner.tenant_id, most)


def _config_of(request: Request) -> bytes:
    given = request.headers.getlist(CONFIG_HEADER)
    try:
        if len(given) != 1:
            message = f"Send adapter_config.json, in base64, in one header {CONFIG_HEADER}."
            raise InvalidRequestError(message, param=CONFIG_HEADER)
        return base64.b64decode(given[0].encode(), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise InvalidRequestError(
            f"{CONFIG_HEADER} must be base64.", param=CONFIG_HEADER
        ) from error


def _read_folder(roots: list[Path], folder: str, weights: BlobWriter, limit: int) -> bytes:
    """Write the weights of a folder to `weights`, and return its config."""
    with _opened(roots, folder, CONFIG_FILE) as file:
        config = file.read(MAX_CONFIG_BYTES + 1)  # one byte more is refused with the right code
    with _opened(roots, folder, WEIGHTS_FILE) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            message = f"{WEIGHTS_FILE} exceeds the limit of {limit} bytes."
            raise PayloadTooLargeError(message, code="upload.too_large", param="lora_path")
        while weights.size < size and (piece := file.read(min(PIECE_BYTES, size - weights.size))):
            weights.write(piece)
    return config


def _opened(roots: list[Path], folder: str, name: str) -> BinaryIO:
    """A file, opened step by step below a root: a link that appears meanwhile is not followed."""
    try:
        path = Path(os.path.realpath(os.path.join(folder, name)))  # where it is, all links followed
        root = next(
            (real for each in roots if path.is_relative_to(real := Path(os.path.realpath(each)))),
            None,
        )
        if root is None or not os.path.isabs(folder):
            raise ForbiddenError(
                "lora_path must be a folder below one of those of the setting adapter.load_roots."
                if roots
                else "This server loads no adapters from folders: its setting adapter.load_roots is empty.",
                code="adapter.path_forbidden",
                param="lora_path",
            )
        *parents, last = path.relative_to(root).parts
        fd = open_below(root, parents, last)
    except (OSError, ValueError) as error:  # ValueError: a NUL, or what is no text
        raise InvalidRequestError(
            f"There is no {name} in lora_path that can be read.", param="lora_path"
        ) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidRequestError(f"{name} in lora_path is not a plain file.", param="lora_path")
    return open(fd, "rb")
