"""Deletes what is no longer referred to: right after a delete, and the rest in sweeps every few minutes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable

import structlog

from manylora.errors import CapacityError, EngineUnavailableError, ManyloraError
from manylora.registry.records import Removed
from manylora.server.process.threads import in_thread
from manylora.server.services import Services
from manylora.server.versions.pins import sync_pins

log = structlog.get_logger("manylora.server")
IN_USE_POLL_S = 0.5
"""Seconds between looks at whether deleted adapters are still in use and whether the blob store answers."""
HOLD_S = 0.5
"""Longest time in seconds that deletes hold the database's write lock at once."""
BLOBS_AT_ONCE = 500
SWEEP_S = 300.0
"""Seconds from one sweep to the next."""
STALE_UPLOAD_S = 3600.0
"""Seconds after which a temporary blob counts as abandoned."""


async def remove_unreferenced(services: Services, removed: Removed) -> None:
    """Drop adapters and blobs that no version refers to any more; running requests finish."""
    for digest in removed.digests:
        services.synced_pins.pop(digest, None)
        try:
            await services.engine.drop_adapter(digest)
        except EngineUnavailableError:
            break  # a restarted engine holds nothing
    await sync_pins(services)
    is_alone = services.config.server.role == "all"
    # Requests at other servers may still have to load blobs; the sweep deletes those later.
    await delete_blobs(
        services, [each for each in removed.weights if is_alone or each in services.memory]
    )


async def delete_blobs(services: Services, weights: Iterable[str]) -> None:
    """Delete those of the blobs (64 hex digits) that no version refers to.

    Blobs in use are deleted once they are not; what the store cannot delete now is tried again.
    """
    rest, later = list(weights), list[str]()
    try:
        while rest:
            # A store that hangs is noticed here, before the database's lock is taken.
            await asyncio.to_thread(services.blobs.reach)
            used, unasked = await _delete_some(services, rest[:BLOBS_AT_ONCE])
            later += used
            rest = unasked + rest[BLOBS_AT_ONCE:]
    except CapacityError:
        later += rest
    if later:
        in_background(services, _delete_later(services, later))


def in_background(services: Services, removal: Coroutine[None, None, None]) -> None:
    """Let a removal run by itself; what it does not get to, the next sweep does."""
    task = asyncio.create_task(_quietly(removal, "removal_failed"))
    services.removals.add(task)
    task.add_done_callback(services.removals.discard)


async def _quietly(work: Coroutine[None, None, object], failure: str) -> None:
    """Log as `failure` what goes wrong: the next sweep does the rest."""
    try:
        await work
    except (ManyloraError, OSError) as error:
        log.warning(failure, exc_info=error)


async def _delete_some(services: Services, weights: list[str]) -> tuple[list[str], list[str]]:
    """Delete as many as `HOLD_S` allows: changes of the database wait meanwhile.

    Returns:
        Blobs in use, and blobs for which there was no time.
    """
    used = []
    async with services.registry.adapters.locking_unreferenced(weights) as unreferenced:
        doomed, until_s = sorted(unreferenced), services.monotonic() + HOLD_S
        while doomed and services.monotonic() < until_s:
            if services.uses(doomed[-1]):
                used.append(doomed[-1])
            elif doomed[-1] in services.memory:
                await _free(services, doomed[-1])
            else:
                await in_thread(services.blobs.delete, doomed[-1])
            doomed.pop()
    return used, doomed


async def _free(services: Services, weights: str) -> None:
    """Free the weights of ephemeral versions that are gone. One that was in the store as well is left to the sweep."""
    services.memory.delete(weights)
    await services.engine.drop_weights(weights)


async def _delete_later(services: Services, weights: Iterable[str]) -> None:
    """Try again later: a preempted or waiting request may still have to load the adapter."""
    await asyncio.sleep(IN_USE_POLL_S)
    await delete_blobs(services, weights)


class Sweeper:
    """Deletes leftovers every `SWEEP_S` seconds.

    These are ephemeral versions whose time is over or whose weights went with an earlier life of this server, expired
    uploads with their files, files without an upload, abandoned temporary blobs, blobs that no
    version refers to, and expired answers. Each sweep looks for all of them, so a sweep that is cut short loses
    nothing. Thread: the event loop's.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._unreferenced: set[str] = set()
        """Blobs that the last sweep found. Where other servers may use them, they are deleted at the second time."""

    async def start(self) -> asyncio.Task[None]:
        """Sweep once, then go on in the task that this returns; the next start sweeps what is left when it ends."""
        await _quietly(self.sweep(is_start=True), "sweep_failed")
        return asyncio.create_task(self._go_on())

    async def sweep(self, is_start: bool = False) -> dict[str, int]:
        """Delete leftovers.

        Args:
            is_start: Whether this process has not begun to write anything.

        Returns:
            How many were deleted, by kind.
        """
        services = self._services
        registry = services.registry
        if is_start:
            await remove_unreferenced(services, await registry.ephemeral.lose(services.server_name))
        await remove_unreferenced(services, await registry.ephemeral.expire())
        uploads, answers = await services.registry.uploads.forget_old()
        # The data folder belongs to this process, so nothing writes there at its start.
        is_alone = services.config.registry.blob_url is None
        age_s = 0.0 if is_start and is_alone else STALE_UPLOAD_S
        swept = {
            "uploads": uploads,
            "answers": answers,
            "staged": await self._sweep_staged(),
            "files": await services.registry.files.forget_expired(),
            "batches": await services.registry.batches.forget_old(),
            "temporary": await asyncio.to_thread(services.blobs.sweep, age_s),
            "blobs": await self._sweep_blobs(),
            "weights": await self._sweep_memory() if services.memory.digests() else 0,
        }
        if any(swept.values()):
            log.info("swept", **swept)
        return swept

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await _quietly(self.sweep(), "sweep_failed")

    async def _sweep_staged(self) -> int:
        # First the files, then the rows: files are made after their row.
        staged = await asyncio.to_thread(self._services.staged.ids)
        gone = set(staged) - await self._services.registry.uploads.open_ids()
        doomed = [
            upload_id for upload_id in gone if not self._services.intake.is_writing(upload_id)
        ]
        for upload_id in doomed:
            await asyncio.to_thread(self._services.staged.delete, upload_id)
        return len(doomed)

    async def _sweep_blobs(self) -> int:
        digests = await asyncio.to_thread(lambda: list(self._services.blobs.digests()))
        doomed: list[str] = []
        for start in range(0, len(digests), BLOBS_AT_ONCE):
            doomed += await self._services.registry.adapters.unreferenced(
                digests[start : start + BLOBS_AT_ONCE]
            )
        if self._services.config.server.role != "all":
            doomed, self._unreferenced = list(self._unreferenced.intersection(doomed)), set(doomed)
        await delete_blobs(self._services, doomed)
        return len(doomed)

    async def _sweep_memory(self) -> int:
        """Free weights that no ephemeral version has: one of them may have become a usual version, for example."""
        services = self._services
        async with services.registry.adapters.locking_unreferenced(()):
            gone = set(services.memory.digests()) - await services.registry.ephemeral.weights(
                services.server_name
            )
            doomed = [weights for weights in gone if not services.uses(weights)]
            for weights in doomed:
                await _free(services, weights)
        return len(doomed)
