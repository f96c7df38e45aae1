"""Results of lines: committed together with their usage, and made files when their batch ends."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, aclosing

import structlog

from weft.adapters.blobs import BlobWriter
from weft.errors import AdapterUnavailableError, CapacityError
from weft.registry.batches import LineResult
from weft.registry.files import new_file
from weft.registry.models import BatchRow
from weft.server.batches.input_lines import parse_line, read_lines
from weft.server.batches.line_run import result_text
from weft.server.services import Services
from weft.server.threads import in_thread

log = structlog.get_logger("weft.server")
COMMIT_S = 0.1
"""Results of so many seconds are one transaction."""
RETRY_S = 1.0
PAGE_LINES = 64
NEVER_RAN = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request ran."),
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "failed": ("batch_failed", "The batch failed before this request ran."),
}


class ResultCommits:
    """Commits results of all batches of this server. Thread: the event loop's."""

    def __init__(self, services: Services, owner: str) -> None:
        self._services = services
        self._owner = owner
        self._results: list[LineResult] = []
        self._next: asyncio.Task[frozenset[tuple[str, int]]] | None = None
        """Commits what is in `_results`, in a moment."""
        self._tasks: set[asyncio.Task[frozenset[tuple[str, int]]]] = set()
        self._turn = asyncio.Lock()

    async def keep(self, result: LineResult) -> bool:
        """Return once the result and its usage are in the database; False where they no longer count.

        Waits as long as the database is away. What was handed in is committed also where the caller is cancelled.
        """
        while True:
            self._results.append(result)
            if self._next is None:
                self._next = asyncio.create_task(self._commit())
                self._tasks.add(self._next)
                self._next.add_done_callback(self._tasks.discard)
            try:
                return (result.batch_id, result.line) in await asyncio.shield(self._next)
            except CapacityError as error:
                log.warning("batch_result_waits", batch=result.batch_id, line=result.line, code=error.code)
                await asyncio.sleep(RETRY_S)

    async def settle(self) -> None:
        """Return once everything that was handed in is committed, or could not be: then its line runs again."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _commit(self) -> frozenset[tuple[str, int]]:
        async with self._turn:
            await asyncio.sleep(COMMIT_S)
            results, self._results, self._next = self._results, [], None
            return await self._services.registry.batches.add_results(self._owner, results)


async def write_files(services: Services, batch: BatchRow, owner: str, status: str) -> None:
    """End a batch: its results become an output file and an error file, with the lines that never ran in the latter.

    Args:
        services: Registry and blobs.
        batch: Takes no more results.
        owner: This server.
        status: How it ends: completed, cancelled, expired or failed.
    """
    with ExitStack() as stack:
        output, errors = (stack.enter_context(services.blobs.create()) for _ in range(2))
        done, after = set[int](), 0
        while page := await services.registry.batches.results(batch.id, after, PAGE_LINES):
            for each in page:
                after = each.line
                done.add(after)
                await in_thread((errors if each.is_error else output).write, f"{each.result}\n".encode())
        failed = batch.failed
        if len(done) < batch.total:
            failed += await _write_left(services, batch, done, errors, status)
        blobs = {name: blob for name, blob in (("output", output), ("error", errors)) if blob.size}
        files = {
            f"{name}_file_id": new_file(
                batch.tenant_id,
                f"{batch.id}_{name}.jsonl",
                "batch_output",
                services.now(),
                size_bytes=blob.size,
                sha256=blob.sha256(),
            )
            for name, blob in blobs.items()
        }
        for blob in blobs.values():
            await in_thread(blob.prepare)

        async def store() -> None:
            for blob in blobs.values():
                await in_thread(blob.commit)

        await services.registry.batches.end(batch, owner, status, files, failed, store)


async def _write_left(services: Services, batch: BatchRow, done: set[int], blob: BlobWriter, status: str) -> int:
    """Tell of the lines that never ran; returns how many."""
    code, message = NEVER_RAN[status]
    limit, written = services.config.server.max_body_bytes, 0
    try:
        async with aclosing(read_lines(services.blobs, batch.input_sha256, limit)) as lines:
            async for number, raw in lines:
                if number not in done:
                    line = parse_line(raw, batch.endpoint, limit)
                    text = result_text(batch.id, number, line, None, {"code": code, "message": message})
                    await in_thread(blob.write, f"{text}\n".encode())
                    written += 1
    except AdapterUnavailableError as error:
        log.warning("batch_input_lost", batch=batch.id, code=error.code)
    return written
