"""How trainers publish: the bytes of a version in one request, or a folder of this machine, as vLLM takes it.

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
from typing import BinaryIO

from starlette.requests import Request

from weft.adapters.blobs.local import PIECE_BYTES, BlobWriter, open_below
from weft.adapters.checkpoint.peft_config import MAX_CONFIG_BYTES
from weft.errors import ForbiddenError, InvalidRequestError, PayloadTooLargeError
from weft.registry.records import CONFIG_FILE, WEIGHTS_FILE, Ephemeral
from weft.registry.uploads import Answer
from weft.server.adapters.publish import VersionDraft, checked_name, publish, room_for_upload, write_body
from weft.server.auth.callers import TenantCaller
from weft.server.garbage import remove_unreferenced
from weft.server.http.body import content_length
from weft.server.services import Services
from weft.server.threads import in_thread

CONFIG_HEADER = "x-weft-adapter-config"
MAX_TTL_S = 30 * 24 * 3600


def life_of(services: Services, *, ephemeral: bool, keep: int | None, ttl_s: int | None) -> Ephemeral | None:
    """How long a pushed version lives; None for one that goes to the store.

    Raises:
        InvalidRequestError: `keep` or `ttl_s` of a version that is not ephemeral.
    """
    if ephemeral:
        ends = None if ttl_s is None else services.now() + timedelta(seconds=ttl_s)
        return Ephemeral(server=services.server_name, keep=keep, expires_at=ends)
    if keep is not None or ttl_s is not None:
        raise InvalidRequestError("keep and ttl_s are for ephemeral=true.", param="ephemeral")
    return None


async def receive_push(
    request: Request, services: Services, owner: TenantCaller, name: str, life: Ephemeral | None, activate: bool
) -> Answer:
    """Take the weights from the body and the config from a header, and publish them.

    Raises:
        WeftError: Whatever is wrong with it; nothing of it stays.
    """
    config = _config_of(request)
    draft = VersionDraft(name=checked_name(services, name), description=None, activate=activate, config=config)
    with services.drain.cancelling(), services.intake.stream(owner.tenant_id):
        async with room_for_upload(request, services, owner.tenant_id) as limit:
            create = services.blobs.create
            if life is not None:
                create = await _room_in_memory(services, owner, content_length(request) or limit)
            with create() as weights:
                await write_body(request, services, limit, weights.write)
                if life is not None:
                    weights.prepare()  # before anybody reads it
                return await publish(services, owner, draft, weights, life=life)


async def load_folder(services: Services, owner: TenantCaller, name: str, folder: str) -> None:
    """Publish what PEFT saved to a folder below `adapter.load_roots`, as the one ephemeral version that stays.

    Raises:
        ForbiddenError: The folder is not below one of `adapter.load_roots`; code adapter.path_forbidden.
        InvalidRequestError: There is no adapter.
        WeftError: As for an upload.
    """
    limit = services.config.server.max_upload_bytes
    name = checked_name(services, name)
    with services.drain.cancelling(), services.intake.stream(owner.tenant_id):
        create = await _room_in_memory(services, owner, limit)
        with create() as weights:
            config = await in_thread(_read_folder, services.config.adapter.roots, folder, weights, limit)
            weights.prepare()
            draft = VersionDraft(name=name, description=None, activate=True, config=config)
            life = Ephemeral(server=services.server_name, keep=1)
            await publish(services, owner, draft, weights, life=life)


async def _room_in_memory(services: Services, owner: TenantCaller, num_bytes: int) -> Callable[[], BlobWriter]:
    """What makes a blob of a tenant in memory. Where there may be too little room, what has expired is freed first.

    A tenant may fill half of the memory while there are other tenants, all of it by itself.
    """
    memory, most = services.memory, services.memory.most_bytes
    if memory.num_bytes + num_bytes > most // 2:
        await remove_unreferenced(services, await services.registry.ephemeral.expire())
        if len((await services.registry.tenants.list_tenants(limit=2)).items) > 1:
            most //= 2
    return partial(memory.create, owner.tenant_id, most)


def _config_of(request: Request) -> bytes:
    given = request.headers.getlist(CONFIG_HEADER)
    try:
        if len(given) != 1:
            raise InvalidRequestError(
                f"Send adapter_config.json, in base64, in one header {CONFIG_HEADER}.", param=CONFIG_HEADER
            )
        return base64.b64decode(given[0].encode(), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise InvalidRequestError(f"{CONFIG_HEADER} must be base64.", param=CONFIG_HEADER) from error


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
        root = next((real for each in roots if path.is_relative_to(real := Path(os.path.realpath(each)))), None)
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
        raise InvalidRequestError(f"There is no {name} in lora_path that can be read.", param="lora_path") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidRequestError(f"{name} in lora_path is not a plain file.", param="lora_path")
    return open(fd, "rb")
