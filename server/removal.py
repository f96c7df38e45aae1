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
HOLD_S = 0.5
"""How long deletes may keep everybody else from changing the database at a time."""
BLOBS_AT_ONCE = 500


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
    rest, later = list(weights), list[str]()
    try:
        while rest:
            # A store that hangs is found out here, where nobody waits for the database's lock.
            await asyncio.to_thread(services.blobs.reach)
            used, unasked = await _delete_some(services, rest[:BLOBS_AT_ONCE])
            later += used
            rest = unasked + rest[BLOBS_AT_ONCE:]
    except CapacityError:
        later += rest
    if later:
        task = asyncio.create_task(_delete_later(services, later))
        services.removals.add(task)
        task.add_done_callback(services.removals.discard)


async def _delete_some(services: Services, weights: list[str]) -> tuple[list[str], list[str]]:
    """Delete as many as there is time for: every change of the database waits meanwhile.

    Returns:
        Those in use, and those for which there was no time.
    """
    used = []
    async with services.registry.holding_unreferenced(weights) as unreferenced:
        doomed, until_s = sorted(unreferenced), services.monotonic() + HOLD_S
        while doomed and services.monotonic() < until_s:
            if services.engine.uses(doomed[-1]):
                used.append(doomed[-1])
            else:
                await asyncio.to_thread(services.blobs.delete, doomed[-1])
            doomed.pop()
    return used, doomed


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
