"""An upload's way from the wire to a version: received, checked, stored, published, or gone without a trace."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request

from weft.adapters.blobs import BlobWriter
from weft.errors import AdapterFormatError, DrainingError, NotFoundError
from weft.registry.records import Adapter, VersionFacts
from weft.server.access import Caller, TenantCaller, bound, for_tenant
from weft.server.drain import Drain
from weft.server.pins import settle_pins
from weft.server.removal import delete_blobs
from weft.server.services import Services
from weft.server.upload import UploadForm, read_upload


async def receive_adapter(request: Request, services: Services, caller: Caller) -> tuple[Adapter, bool]:
    """Take an upload in.

    Returns:
        The adapter with `current` as the uploaded version, and whether that version is new.

    Raises:
        WeftError: Whatever is wrong with it; nothing of it stays.
    """
    with _ended_by(services.drain), services.blobs.create() as weights:
        form = await read_upload(request, weights, services.config.server.max_upload_bytes, services.pace)
        if form.name == services.served_name:
            raise AdapterFormatError(
                "This name is the base model's; choose another.", code="adapter.name_reserved", param="name"
            )
        owner = await _owner(services, caller, form.tenant)
        facts = await services.check.check(form.config, weights.path, weights.sha256(), weights.size)
        return await _publish(services, owner, form, facts, weights)


async def _owner(services: Services, caller: Caller, tenant: str | None) -> TenantCaller:
    if tenant is None or tenant == caller.tenant:
        return bound(caller)
    if not caller.is_admin or caller.identity.tenant is not None:
        raise NotFoundError("There is no such tenant.", param="tenant")
    return bound(await for_tenant(services, caller.identity, tenant))


async def _publish(
    services: Services, owner: TenantCaller, form: UploadForm, facts: VersionFacts, weights: BlobWriter
) -> tuple[Adapter, bool]:
    try:
        await asyncio.to_thread(weights.prepare)
        async with services.blob_lock:
            await asyncio.to_thread(weights.commit)
            adapter, _, is_new = await services.registry.publish_version(
                owner.tenant_id, form.name, facts, form.description, form.activate, actor=owner.actor
            )
    except BaseException:
        await asyncio.shield(delete_blobs(services, [facts.weights_sha256]))
        raise
    services.metrics.learn_adapter(facts.digest, owner.tenant, form.name)
    if adapter.pinned:
        await settle_pins(services)
    return adapter, is_new


@contextmanager
def _ended_by(drain: Drain) -> Iterator[None]:
    """Run the block as work that a shutdown may cancel."""
    task = asyncio.current_task()
    ended: list[DrainingError] = []

    def cut(error: DrainingError) -> None:
        if task is not None:
            ended.append(error)
            task.cancel()

    with drain.running(cut):
        try:
            yield
        except asyncio.CancelledError:
            if not ended or task is None:
                raise
            task.uncancel()
            raise ended[0] from None
