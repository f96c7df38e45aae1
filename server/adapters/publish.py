"""Has an upload validated, stores it and publishes it as a version, atomically. Also receives uploads in one form.

A crash leaves at most a temporary file, or a blob that no version refers to; both are swept. The version, the answer
that a repeated request gets and the end of an upload in pieces are one transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from manylora.adapters.blobs.local import BlobWriter
from manylora.errors import (
    AdapterFormatError,
    EngineUnavailableError,
    NotFoundError,
    PayloadTooLargeError,
    TimeoutExceededError,
)
from manylora.registry.idempotency import KeptAnswer, Retry
from manylora.registry.limits import no_storage
from manylora.registry.names import NAME_RULE, is_name, no_such
from manylora.registry.records import Ephemeral, VersionDraft, VersionFacts
from manylora.server.adapters.form import UploadForm
from manylora.server.adapters.idempotency import idempotent
from manylora.server.adapters.schemas import Residents, VersionBody, adapter_view
from manylora.server.auth.callers import Caller, TenantCaller, bound, for_tenant
from manylora.server.http.bodies import validate
from manylora.server.http.body import STREAM_BYTES, content_length, held_body, read_chunks
from manylora.server.http.form import read_form
from manylora.server.process.threads import in_thread
from manylora.server.services import Services

STATUS_S = 2.0
"""Longest wait in seconds for the engine's status, where the answer works without it."""


async def receive_adapter(request: Request, services: Services, caller: Caller) -> Response:
    """Receive an upload in one form, and publish it.

    Returns:
        The adapter with the uploaded version as its current one: 201 if that is new, 200 if it was there.

    Raises:
        ManyloraError: Whatever is wrong with it; nothing of it stays.
    """
    most = services.config.server.max_upload_bytes
    await in_thread(services.blobs.check_room, min(most, content_length(request) or 0))
    with (
        services.drain.cancelling(),
        idempotent(request, services, caller.tenant_id or caller.actor) as retried,
        services.blobs.create() as weights,
    ):
        async with room_for_upload(request, services, caller.tenant_id, retried.key) as limit:
            form = await read_form(request, UploadForm, weights, limit, services.bodies.pace)
        owner = await owner_of(services, caller, form.text("tenant"))
        fields = {part: form.text(part) for part in ("name", "description")}
        draft = validate(VersionBody, {**fields, "activate": form.activate})
        check_adapter_name(services, draft.name)
        asked = (draft.model_dump_json(), form.config, weights.sha256())
        change = partial(publish, services, owner, draft, form.config, weights)
        return await retried.answer(owner.tenant_id, asked, change)


async def owner_of(services: Services, caller: Caller, tenant: str | None) -> TenantCaller:
    """The caller, acting for the tenant that the body names, if it names one.

    Raises:
        NotFoundError: There is no such tenant, or it is not the caller's.
        InvalidRequestError: An admin named none.
    """
    if tenant is None or tenant == caller.tenant:
        return bound(caller)
    if not caller.is_admin or caller.identity.tenant is not None:
        raise no_such("tenant", tenant, param="tenant")
    return bound(await for_tenant(services, caller.identity, tenant))


def check_adapter_name(services: Services, name: str) -> None:
    """Return if an adapter can have this name.

    Raises:
        AdapterFormatError: Not a name, or the base model's; codes adapter.name_invalid, adapter.name_reserved.
    """
    if not is_name(name):
        message = f"The adapter's name must {NAME_RULE}."
        raise AdapterFormatError(message, code="adapter.name_invalid", param="name")
    if name == services.served_name:
        message = "This name is the base model's; choose another."
        raise AdapterFormatError(message, code="adapter.name_reserved", param="name")


async def publish(
    services: Services,
    owner: TenantCaller,
    draft: VersionDraft,
    config: bytes,
    weights: BlobWriter,
    retry: Retry | None = None,
    life: Ephemeral | None = None,
) -> KeptAnswer:
    """Have an upload validated, store it and publish it as a version.

    Args:
        services: Validator, blobs and registry.
        owner: The caller, acting for the adapter's tenant.
        draft: Name and description of the version; an upload in pieces ends with it.
        config: Its `adapter_config.json`.
        weights: All bytes of the weights, not yet committed.
        retry: The Idempotency-Key under which the answer is kept.
        life: How long an ephemeral version lives; its weights are written to memory.

    Raises:
        AdapterError: It cannot be served.
        ConflictError: It would end a split of `default`; code upload.ends_split.
        ForbiddenError: The tenant may not store as much; codes quota.*.
        AnsweredBeforeError: The same change was made before.
    """
    sha256 = weights.sha256()
    validating = services.uploads.validator.validate(config, weights.path, sha256, weights.size)
    # A push does not wait for the engine's step, after which it would say where adapters are.
    facts, residents = (
        (await validating, {})
        if life
        else await asyncio.gather(validating, residents_now(services))
    )
    pages = await services.uploads.validator.pages(facts)
    if draft.activate:
        await _check_pinned(services, owner, draft.name, facts)
    try:
        await in_thread(weights.prepare)
        async with services.registry.adapters.publishing(
            owner.tenant_id, draft, facts, life=life, actor=owner.actor
        ) as made:
            version = made.adapter.current
            body = adapter_view(made.adapter, pages, residents).model_dump(mode="json")
            answer = KeptAnswer(status=201 if made.is_new else 200, body=body)
            await made.keep(answer, pages, retry)
            if life is None or version.held_by is not None:  # else it is in the store already
                await in_thread(weights.commit)
            place = services.versions.weights.blobs.place(sha256)
            if place is not None and version.held_by is not None:
                await services.engine.take_weights(made.adapter.ref(version), place)
    except BaseException:
        await asyncio.shield(services.versions.garbage.delete([facts.weights_sha256]))
        raise
    services.metrics.learn_adapter(facts.digest, owner.tenant, draft.name, facts.rank)
    if made.removed.digests or made.removed.weights:
        services.versions.garbage.remove_later(made.removed)
    if made.adapter.pinned:
        await services.versions.pins.sync()
    return answer


async def _check_pinned(
    services: Services, owner: TenantCaller, name: str, facts: VersionFacts
) -> None:
    """A version that becomes the plain name of a pinned adapter is pinned with it."""
    try:
        adapter = await services.registry.adapters.get_adapter(owner.tenant_id, name)
    except NotFoundError:
        return
    if adapter.pinned:
        await services.versions.pins.check_pages(adapter, [facts], adapter.pinned_copies)


async def residents_now(services: Services) -> Residents:
    """Ask the engine; while it is away, or busy for longer than `STATUS_S`, no adapter counts as resident."""
    try:
        status = await services.engine_status(STATUS_S)
    except EngineUnavailableError:
        return {}
    return {resident.digest: resident for resident in status.residents}


@asynccontextmanager
async def room_for_upload(
    request: Request, services: Services, tenant_id: str | None, key: str | None = None
) -> AsyncIterator[int]:
    """The most bytes that a body may have: no more than the tenant may still store. They count as coming meanwhile.

    An admin's form names the tenant: its limits are checked when the version is published.

    Raises:
        ForbiddenError: The body is larger than what is left; code quota.storage.
    """
    most = services.config.server.max_upload_bytes
    left = (
        None if tenant_id is None else await services.registry.uploads.storage_left(tenant_id, key)
    )
    if tenant_id is None or left is None:
        yield most
        return
    left -= services.uploads.reserved[tenant_id]
    if left <= 0:
        raise no_storage()
    limit = min(most, left)
    with services.uploads.reserving(tenant_id, min(limit, content_length(request) or limit)):
        try:
            yield limit
        except PayloadTooLargeError as error:
            if error.code == "upload.too_large" and limit < most:
                raise no_storage() from error
            raise


async def write_body(
    request: Request, services: Services, limit: int, write: Callable[[bytearray], object]
) -> None:
    """Hand a body to `write` in pieces of about `STREAM_BYTES`, in threads; also what came before an error.

    Raises:
        RateLimitError, CapacityError: There is no room for it among the bodies in memory.
        PayloadTooLargeError, TimeoutExceededError: Codes upload.too_large, upload.timeout.
    """
    pending = bytearray()
    held_body(request).keep(STREAM_BYTES)
    try:
        async for chunk in read_chunks(request, limit, services.bodies.pace, "upload.too_large"):
            pending += chunk
            if len(pending) >= STREAM_BYTES:
                piece, pending = pending, bytearray()
                await in_thread(write, piece)
    except TimeoutExceededError as error:
        raise TimeoutExceededError(error.message, code="upload.timeout") from error
    finally:
        await in_thread(write, pending)
