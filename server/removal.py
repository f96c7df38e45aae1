"""After a delete: the engine forgets what nobody refers to, and the blobs go."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from weft.errors import CapacityError, EngineUnavailableError
from weft.registry.records import Removed
from weft.server.pins import settle_pins
from weft.server.services import Services

IN_USE_POLL_S = 0.5
"""How often to look whether deleted adapters are still in use, and whether their store answers."""


async def remove_unreferenced(services: Services, removed: Removed) -> None:
    """Let go of everything that no version refers to any more; running requests finish."""
    for digest in removed.digests:
        services.told_pins.pop(digest, None)
        try:
            await services.engine.drop_adapter(digest)
        except EngineUnavailableError:
            break  # a restarted engine holds nothing
    await settle_pins(services)
    await delete_blobs(services, removed.weights)


async def delete_blobs(services: Services, weights: Iterable[str]) -> None:
    """Delete those of the blobs (64 hex digits) that no version refers to.

    Those in use go when they no longer are, and those that the store cannot delete now as soon as it can.
    """
    wanted = list(weights)
    if not wanted:
        return
    later = []
    async with services.registry.holding_unreferenced(wanted) as unreferenced:
        for sha256 in unreferenced:
            if services.engine.uses(sha256):
                later.append(sha256)
                continue
            try:
                await asyncio.to_thread(services.blobs.delete, sha256)
            except CapacityError:
                later.append(sha256)
    if later:
        task = asyncio.create_task(_delete_later(services, later))
        services.removals.add(task)
        task.add_done_callback(services.removals.discard)


async def _delete_later(services: Services, weights: Iterable[str]) -> None:
    """Try again: a request that is preempted, or still waits, has to load its adapter once more."""
    await asyncio.sleep(IN_USE_POLL_S)
    await delete_blobs(services, weights)


async def end_removals(services: Services) -> None:
    """Wait for no request any more; the next start removes what is left."""
    tasks = list(services.removals)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
