"""What nobody refers to any more goes: after a delete at once, and what was left behind in sweeps every few minutes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import structlog

from weft.errors import CapacityError, EngineUnavailableError, WeftError
from weft.registry.records import Removed
from weft.server.pins import sync_pins
from weft.server.services import Services

log = structlog.get_logger("weft.server")
IN_USE_POLL_S = 0.5
"""How often to look whether deleted adapters are still in use, and whether their store answers."""
HOLD_S = 0.5
"""How long deletes may keep everybody else from changing the database at a time."""
BLOBS_AT_ONCE = 500
SWEEP_S = 300.0
"""Seconds from one sweep to the next."""
STALE_UPLOAD_S = 3600.0
"""Age at which a temporary blob has no writer any more."""


async def remove_unreferenced(services: Services, removed: Removed) -> None:
    """Let go of everything that no version refers to any more; running requests finish."""
    for digest in removed.digests:
        services.synced_pins.pop(digest, None)
        try:
            await services.engine.drop_adapter(digest)
        except EngineUnavailableError:
            break  # a restarted engine holds nothing
    await sync_pins(services)
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
    async with services.registry.adapters.holding_unreferenced(weights) as unreferenced:
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


class Sweeper:
    """Removes what a crash, an expiry or a change of mind left behind, by itself between `start` and `stop`.

    Expired uploads with their files, files of no upload, stale temporary blobs, blobs that no version refers to,
    answers that nobody may ask for any more. Everything is found by what it lacks, so a sweep that is cut loses
    nothing. Thread: the event loop's.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Sweep, and go on in the background."""
        await self._try(is_start=True)
        self._task = asyncio.create_task(self._go_on())

    async def stop(self) -> None:
        """End it; the next start sweeps what is left."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def sweep(self, is_start: bool = False) -> dict[str, int]:
        """Remove what is due.

        Args:
            is_start: Nothing that this process writes has begun.

        Returns:
            How many of what were removed.
        """
        services = self._services
        uploads, answers = await services.registry.uploads.forget_old()
        # The data folder is this process's own, so at its start nobody writes there.
        is_alone = services.config.registry.blob_url is None
        age_s = 0.0 if is_start and is_alone else STALE_UPLOAD_S
        removed = {
            "uploads": uploads,
            "answers": answers,
            "staged": await self._sweep_staged(),
            "files": await services.registry.files.forget_expired(),
            "batches": await services.registry.batches.forget_old(),
            "temporary": await asyncio.to_thread(services.blobs.sweep, age_s),
            "blobs": await self._sweep_blobs(),
        }
        if any(removed.values()):
            log.info("swept", **removed)
        return removed

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self._try()

    async def _try(self, is_start: bool = False) -> None:
        try:
            await self.sweep(is_start)
        except (WeftError, OSError) as error:  # what was not removed now is found again
            log.warning("sweep_failed", exc_info=error)

    async def _sweep_staged(self) -> int:
        # First the folders, then the rows: a folder is made after its row.
        folders = await asyncio.to_thread(self._services.staged.ids)
        gone = set(folders) - await self._services.registry.uploads.open_ids()
        doomed = [upload_id for upload_id in gone if not self._services.intake.is_writing(upload_id)]
        for upload_id in doomed:
            await asyncio.to_thread(self._services.staged.delete, upload_id)
        return len(doomed)

    async def _sweep_blobs(self) -> int:
        digests = await asyncio.to_thread(lambda: list(self._services.blobs.digests()))
        doomed: list[str] = []
        for start in range(0, len(digests), BLOBS_AT_ONCE):
            doomed += await self._services.registry.adapters.unreferenced(digests[start : start + BLOBS_AT_ONCE])
        await delete_blobs(self._services, doomed)
        return len(doomed)
