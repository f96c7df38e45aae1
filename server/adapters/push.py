"""How trainers publish: the bytes of a version in one request, or a folder of this machine, as vLLM takes it.

Both are validated as any upload is. An ephemeral version's weights stay in memory, and go to the engine's host memory
before the answer does.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from starlette.requests import Request

from weft.adapters.blobs.local import PIECE_BYTES, BlobWriter
from weft.adapters.checkpoint.peft_config import MAX_CONFIG_BYTES
from weft.errors import ForbiddenError, InvalidRequestError, PayloadTooLargeError
from weft.registry.records import CONFIG_FILE, WEIGHTS_FILE, Ephemeral
from weft.registry.uploads import Answer
from weft.server.adapters.publish import VersionDraft, checked_name, publish, room_for_upload
from weft.server.auth.callers import TenantCaller
from weft.server.http.body import read_chunks
from weft.server.http.form import WRITE_BYTES
from weft.server.services import Services
from weft.server.threads import in_thread

CONFIG_HEADER = "x-weft-adapter-config"
MAX_TTL_S = 30 * 24 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """What a push asks for beside its bytes."""

    ephemeral: bool
    keep: int | None
    ttl_s: int | None
    activate: bool

    def life(self, services: Services) -> Ephemeral | None:
        """How long the version lives; None for one that goes to the store.

        Raises:
            InvalidRequestError: `keep` or `ttl_s` of a version that is not ephemeral.
        """
        if not self.ephemeral:
            if self.keep is not None or self.ttl_s is not None:
                raise InvalidRequestError("keep and ttl_s are for ephemeral=true.", param="ephemeral")
            return None
        ends = None if self.ttl_s is None else services.now() + timedelta(seconds=self.ttl_s)
        return Ephemeral(server=services.server_name, keep=self.keep, expires_at=ends)


async def receive_push(
    request: Request, services: Services, owner: TenantCaller, name: str, options: PushOptions
) -> Answer:
    """Take the weights from the body and the config from a header, and publish them.

    Raises:
        WeftError: Whatever is wrong with it; nothing of it stays.
    """
    config, life = _config_of(request), options.life(services)
    draft = VersionDraft(name=checked_name(services, name), description=None, activate=options.activate, config=config)
    store = services.blobs if life is None else services.memory
    with services.drain.cancelling(), services.intake.stream(owner.tenant_id), store.create() as weights:
        async with room_for_upload(request, services, owner.tenant_id) as limit:
            pending = bytearray()
            async for chunk in read_chunks(request, limit, services.pace, "upload.too_large"):
                pending += chunk
                if len(pending) >= WRITE_BYTES:
                    piece, pending = pending, bytearray()
                    await in_thread(weights.write, piece)
            await in_thread(weights.write, pending)
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
    life = Ephemeral(server=services.server_name, keep=1)
    draft_name = checked_name(services, name)
    with (
        services.drain.cancelling(),
        services.intake.stream(owner.tenant_id),
        services.memory.create() as weights,
    ):
        config = await in_thread(_read_folder, services.config.adapter.roots, folder, weights, limit)
        weights.prepare()
        draft = VersionDraft(name=draft_name, description=None, activate=True, config=config)
        await publish(services, owner, draft, weights, life=life)


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
    with _opened(roots, folder, CONFIG_FILE) as (fd, _):
        config = os.read(fd, MAX_CONFIG_BYTES + 1)  # one byte more is refused with the right code
    with _opened(roots, folder, WEIGHTS_FILE) as (fd, size):
        if size > limit:
            message = f"{WEIGHTS_FILE} exceeds the limit of {limit} bytes."
            raise PayloadTooLargeError(message, code="upload.too_large", param="lora_path")
        while weights.size < size and (piece := os.read(fd, min(PIECE_BYTES, size - weights.size))):
            weights.write(piece)
    return config


@contextmanager
def _opened(roots: list[Path], folder: str, name: str) -> Iterator[tuple[int, int]]:
    """A file's descriptor and size, opened step by step below a root: a link that appears meanwhile is not followed."""
    forbidden = ForbiddenError(
        "lora_path must be a folder below one of those of the setting adapter.load_roots."
        if roots
        else "This server loads no adapters from folders: its setting adapter.load_roots is empty.",
        code="adapter.path_forbidden",
        param="lora_path",
    )
    fd = -1
    try:
        path = Path(os.path.realpath(os.path.join(folder, name)))  # where it is, all links followed
        root = next((real for each in roots if path.is_relative_to(real := Path(os.path.realpath(each)))), None)
        if root is None or not os.path.isabs(folder):
            raise forbidden
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        *parents, last = path.relative_to(root).parts
        for part in parents:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = below
        file = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
        os.close(fd)
        fd = file
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidRequestError(f"{name} in lora_path is not a plain file.", param="lora_path")
        yield fd, found.st_size
    except (OSError, ValueError) as error:  # ValueError: a NUL, or what is no text
        raise InvalidRequestError(f"There is no {name} in lora_path that can be read.", param="lora_path") from error
    finally:
        if fd >= 0:
            os.close(fd)
