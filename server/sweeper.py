"""Removes what a crash, an expiry or a change of mind left behind: at the start, and every few minutes.

Expired uploads with their files, files of no upload, stale temporary blobs, blobs that no version refers to, answers
that nobody may ask for any more. Everything here is found by what it lacks, so a sweep that is cut loses nothing.
"""

from __future__ import annotations

import asyncio

import structlog

from weft.errors import WeftError
from weft.server.removal import delete_blobs
from weft.server.services import Services

log = structlog.get_logger("weft.server")
SWEEP_S = 300.0
"""Seconds from one sweep to the next."""
STALE_UPLOAD_S = 3600.0
"""Age at which a temporary blob has no writer any more."""
BLOBS_AT_ONCE = 500


class Sweeper:
    """Sweeps by itself between `start` and `stop`. Thread: the event loop's."""

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
            doomed += await self._services.registry.unreferenced(digests[start : start + BLOBS_AT_ONCE])
        for start in range(0, len(doomed), BLOBS_AT_ONCE):
            await delete_blobs(self._services, doomed[start : start + BLOBS_AT_ONCE])
        return len(doomed)
