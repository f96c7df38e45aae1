"""Results of lines: committed together with their usage, and made files when their batch ends."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, aclosing
from datetime import timedelta

import structlog

from weft.adapters.blobs import BlobWriter
from weft.errors import AdapterUnavailableError, CapacityError
from weft.registry.batches import Batch, LineResult
from weft.registry.files import StoredFile, new_file
from weft.server.batches.input_lines import parse_line, read_lines
from weft.server.batches.line_run import result_text
from weft.server.services import Services
from weft.server.threads import in_thread

log = structlog.get_logger("weft.server")
COMMIT_S = 0.1
"""Results of so many seconds are one transaction."""
RETRY_S = 1.0
PAGE_LINES = 64
KEPT = timedelta(days=30)


class ResultCommits:
    """Commits results of all batches of this server. Thread: the event loop's."""

    def __init__(self, services: Services, owner: str) -> None:
        self._services = services
        self._owner = owner
        self._pending: list[tuple[LineResult, asyncio.Future[bool]]] = []
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False

    async def keep(self, result: LineResult) -> bool:
        """Return once the result and its usage are in the database; False where they no longer count."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._pending.append((result, done))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._commit())
        return await done

    async def stop(self) -> None:
        """Commit what is there, if the database lets us: what is not committed runs again."""
        self._is_stopped = True
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _commit(self) -> None:
        while self._pending:
            await asyncio.sleep(COMMIT_S)
            some, self._pending = self._pending, []
            try:
                results = [result for result, _ in some]
                written = await self._services.registry.batches.add_results(self._owner, results)
            except CapacityError as error:  # the database is away: they wait, and keep their places meanwhile
                log.warning("batch_results_wait", results=len(some), code=error.code)
                self._pending = [] if self._is_stopped else some + self._pending
                await asyncio.sleep(RETRY_S)
                continue
            except Exception as error:
                log.exception("batch_results_failed")
                for _, done in some:
                    if not done.done():
                        done.set_exception(error)
                continue
            for result, done in some:
                if not done.done():
                    done.set_result((result.batch_id, result.line) in written)


async def write_files(services: Services, batch: Batch, owner: str, input_sha256: str | None, status: str) -> None:
    """End a batch: its results become an output file and an error file, with the lines that never ran in the latter.

    Args:
        services: Registry and blobs.
        batch: Takes no more results.
        owner: This server.
        input_sha256: The blob of its input; None where that is lost.
        status: How it ends: completed, cancelled, expired or failed.
    """
    registry, counts = services.registry, {False: 0, True: 0}
    with ExitStack() as stack:
        blobs = {is_error: stack.enter_context(services.blobs.create()) for is_error in (False, True)}
        done, after = set[int](), 0
        while page := await registry.batches.results(batch.id, after, PAGE_LINES):
            for line, is_error, text in page:
                counts[is_error] += 1
                done.add(line)
                after = line
                await in_thread(blobs[is_error].write, f"{text}\n".encode())
        if len(done) < batch.total and input_sha256 is not None:
            counts[True] += await _write_left(services, batch, input_sha256, done, blobs[True], status)
        kept = {"error" if is_error else "output": blobs[is_error] for is_error in blobs if counts[is_error]}
        files = {f"{name}_file_id": _file(services, batch, f"{batch.id}_{name}.jsonl", kept[name]) for name in kept}
        for blob in kept.values():
            await in_thread(blob.prepare)

        async def store() -> None:
            for blob in kept.values():
                await in_thread(blob.commit)

        await registry.batches.end(batch, owner, status, files, counts[True], store)


async def _write_left(
    services: Services, batch: Batch, sha256: str, done: set[int], blob: BlobWriter, status: str
) -> int:
    """Tell of the lines that never ran; returns how many."""
    why = {
        "cancelled": ("batch_cancelled", "The batch was cancelled before this request ran."),
        "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    }
    code, message = why.get(status, ("batch_failed", "The batch failed before this request ran."))
    limit, written = services.config.server.max_body_bytes, 0
    try:
        async with aclosing(read_lines(services.blobs, sha256, limit)) as lines:
            async for number, raw in lines:
                if number not in done:
                    line = parse_line(number, raw, batch.endpoint)
                    text = result_text(batch.id, line, None, {"code": code, "message": message})
                    await in_thread(blob.write, f"{text}\n".encode())
                    written += 1
    except AdapterUnavailableError as error:
        log.warning("batch_input_lost", batch=batch.id, code=error.code)
    return written


def _file(services: Services, batch: Batch, name: str, blob: BlobWriter) -> StoredFile:
    now = services.now()
    fields = new_file(batch.tenant_id, name, "batch_output", now, now + KEPT)
    return StoredFile(**fields, size_bytes=blob.size, sha256=blob.sha256())
