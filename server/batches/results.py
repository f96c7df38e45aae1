"""Results of lines: committed together with their usage, and written to files when their batch ends."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from contextvars import Context

import structlog

from manylora.errors import CapacityError
from manylora.registry.batches import LineResult, new_file
from manylora.registry.db.models import BatchRow
from manylora.server.process.threads import in_thread
from manylora.server.services import Services

log = structlog.get_logger("manylora.server")
COMMIT_S = 0.1
"""Seconds within which results are collected for one transaction."""
RETRY_S = 1.0
PAGE_LINES = 64


class ResultCommits:
    """Commits results of all batches of this server. Thread: the event loop's."""

    def __init__(self, services: Services, owner: str) -> None:
        self._services = services
        self._owner = owner
        self._results: list[LineResult] = []
        self._next: asyncio.Task[frozenset[tuple[str, int]]] | None = None
        """Will commit what is in `_results`."""
        self._tasks: set[asyncio.Task[frozenset[tuple[str, int]]]] = set()
        self._turn = asyncio.Lock()

    async def keep(self, result: LineResult) -> bool:
        """Return once the result and its usage are in the database; False if they no longer count.

        Waits as long as the database is unavailable. The result is committed even if the caller is cancelled.
        """
        while True:
            self._results.append(result)
            if self._next is None:
                self._next = asyncio.create_task(
                    self._commit(), context=Context()
                )  # for many tenants
                self._tasks.add(self._next)
                self._next.add_done_callback(self._tasks.discard)
            try:
                return (result.batch_id, result.line) in await asyncio.shield(self._next)
            except CapacityError as error:
                log.warning(
                    "batch_result_waits", batch=result.batch_id, line=result.line, code=error.code
                )
                await asyncio.sleep(RETRY_S)

    async def settle(self) -> None:
        """Return once all results are committed, or could not be; then their lines run again."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _commit(self) -> frozenset[tuple[str, int]]:
        async with self._turn:
            await asyncio.sleep(COMMIT_S)
            results, self._results, self._next = self._results, [], None
            return await self._services.registry.batches.add_results(self._owner, results)


async def write_files(services: Services, batch: BatchRow, owner: str, status: str) -> None:
    """End a batch: its results become an output file and an error file.

    Args:
        services: Registry and blobs.
        batch: Takes no more results.
        owner: This server.
        status: How it ends: completed, cancelled, expired or failed.
    """
    with ExitStack() as stack:
        blobs = {
            name: stack.enter_context(services.blobs.create())
            for name in ("output_file_id", "error_file_id")
        }
        after = 0
        while page := await services.registry.batches.results(batch.id, after, PAGE_LINES):
            after = page[-1].line
            for each in page:
                blob = blobs["error_file_id" if each.is_error else "output_file_id"]
                await in_thread(blob.write, f"{each.result}\n".encode())
        files = {}
        for name, blob in blobs.items():
            if blob.size:
                await in_thread(blob.prepare)
                files[name] = new_file(
                    batch.tenant_id,
                    f"{batch.id}_{name.removesuffix('_file_id')}.jsonl",
                    "batch_output",
                    services.clock.now(),
                    size_bytes=blob.size,
                    sha256=blob.sha256(),
                )

        async def store() -> None:
            for name in files:
                await in_thread(blobs[name].commit)

        await services.registry.batches.end(batch.id, owner, status, files, store)
