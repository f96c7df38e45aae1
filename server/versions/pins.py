"""Keeps the engine's pins equal to the registry's: a pinned adapter's current version stays on the device.

A pin asks for a number of copies: among several servers, `Services.is_duty` says which pins this one has to keep.

The engine knows pins by digest, and several adapters may share one, so each change compares all pins. A pinned
adapter is loaded as soon as there is room; its first request need not wait.
"""

from __future__ import annotations

from collections.abc import Iterable

from manylora.errors import AdapterUnavailableError, ForbiddenError
from manylora.registry.records import Adapter, VersionFacts
from manylora.server.process.threads import acting
from manylora.server.services import Services


async def check_pinned_pages(
    services: Services, adapter: Adapter, versions: Iterable[VersionFacts], copies: int
) -> None:
    """Return if the adapter's tenant may have so many copies of these versions pinned.

    The limit is the tenant's, also for an admin.

    Raises:
        ForbiddenError: Together with the other pins they exceed the limit; code quota.pinned_pages.
        AdapterUnavailableError: Its weights cannot be read, so their number of pages is unknown.
    """
    limit = (await services.registry.tenants.tenant_limits(adapter.tenant_id)).pinned_pages
    if limit is None:
        return
    pages = 0
    for version in versions:
        count = await services.validator.pages(version)
        if count is None:
            raise AdapterUnavailableError("The adapter's weights cannot be read now.")
        pages += count * copies
    taken = await pinned_pages(services, adapter.tenant_id, besides=adapter.id)
    if taken + pages > limit:
        services.metrics.limited("pinned_pages")
        numbers = f"is {limit}: {taken} are pinned, and this adapter takes {pages}"
        message = f"The tenant's limit pinned_pages {numbers}. Unpin another one."
        raise ForbiddenError(message, code="quota.pinned_pages", param="pinned")


async def pinned_pages(services: Services, tenant_id: str, besides: str | None = None) -> int:
    """Device pages of all copies of the tenant's pinned adapters, without the one of the id `besides`."""
    pinned = await services.registry.adapters.pinned_adapters()
    others = [other for other in pinned if other.tenant_id == tenant_id and other.id != besides]
    return sum(
        [
            (await services.validator.pages(other.current) or 0) * other.pinned_copies
            for other in others
        ]
    )


async def sync_pins(services: Services) -> None:
    """Send the engine the changes that make its pins those of the registry that this server has to keep."""
    async with services.pin_turns.place(*acting.get()):
        pinned = [
            adapter
            for adapter in await services.registry.adapters.pinned_adapters()
            if adapter.current.held_by == services.server_name
            or (
                adapter.current.held_by is None
                and services.is_duty(adapter.current.digest, adapter.pinned_copies)
            )
        ]
        wanted = {adapter.current.digest for adapter in pinned}
        for digest, ref in list(services.synced_pins.items()):
            if digest not in wanted:
                await services.engine.pin_adapter(ref, False)
                del services.synced_pins[digest]
        for adapter in pinned:
            ref = adapter.ref(adapter.current)
            if ref.digest not in services.synced_pins:
                services.metrics.learn_adapter(
                    ref.digest, adapter.tenant, adapter.name, ref.config.rank
                )
                await services.engine.pin_adapter(ref, True)
                services.synced_pins[ref.digest] = ref
