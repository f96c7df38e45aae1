"""Runs the batches of this server: finds them, checks their input, feeds their lines, and ends them.

All that has to outlive the process is in the database, so stopping is only leaving off: at SIGTERM at once, without a
word to the lines that run, which begin again at the next start.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path

import structlog

from weft.errors import AdapterUnavailableError, NotFoundError, WeftError
from weft.registry.batches import Batch
from weft.registry.clock import to_micros
from weft.registry.files import OPEN
from weft.server.batches.input_lines import InputCheck, check_input, parse_line, read_lines
from weft.server.batches.line_run import AdmittedLine, LineRunner
from weft.server.batches.line_slots import LineSlots
from weft.server.batches.results import ResultCommits, write_files
from weft.server.services import Services

log = structlog.get_logger("weft.server")
LOOK_S = 2.0
"""Seconds from one look for batches to the next; also how often others are told that this server goes on."""


class BatchWorker:
    """Works between `start` and `stop`. Thread: the event loop's.

    Args:
        services: All that the server has.
        owner: This server's name among all over the same database; the same after a restart.
    """

    def __init__(self, services: Services, owner: str) -> None:
        self._services = services
        self._owner = owner
        self._slots = LineSlots(services.config.batch.max_running)
        self._commits = ResultCommits(services, owner)
        self._runs: dict[str, _Run] = {}
        self._is_stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, and go on with what the last process left."""
        self._task = asyncio.create_task(self._go_on(), name="weft-batches")

    async def stop(self) -> None:
        """Leave everything as it is in the database, for whoever goes on with it."""
        self._is_stopping.set()
        if self._task is not None:
            await self._task

    async def look(self) -> None:
        """Take over what is due, let go of what is not ours any more, and end what is over."""
        held = {batch.id: batch for batch in await self._services.registry.batches.claim(self._owner)}
        now = to_micros(self._services.now())
        for batch_id in self._runs.keys() - held.keys():
            self._runs.pop(batch_id).task.cancel()
        for batch in held.values():
            run = self._runs.get(batch.id)
            if run is None or run.task.done():
                self._runs[batch.id] = _Run(self._services, batch, self._owner, self._slots, self._commits)
            elif batch.status == "cancelling" or batch.expires_at <= now:
                run.end_early()

    async def _go_on(self) -> None:
        changed, began = self._services.batches_changed, self._services.drain.began
        while not (began.is_set() or self._is_stopping.is_set()):
            changed.clear()
            try:
                await self.look()
            except WeftError as error:
                log.warning("batches_wait", code=error.code)
            except Exception:
                log.exception("batches_failed")
            await _first_of(LOOK_S, changed, began, self._is_stopping)
        await self._leave_off()

    async def _leave_off(self) -> None:
        tasks = [run.task for run in self._runs.values()]
        self._runs.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._commits.stop()
        with suppress(WeftError):  # others wait for the end of the lease then
            await self._services.registry.batches.release(self._owner)


class _Run:
    """One batch on its way, from wherever it stands."""

    def __init__(self, services: Services, batch: Batch, owner: str, slots: LineSlots, commits: ResultCommits) -> None:
        self._services = services
        self._batch = batch
        self._owner = owner
        self._slots = slots
        self._commits = commits
        self._runner: LineRunner | None = None
        self._lines: asyncio.Task[None] | None = None
        self.task = asyncio.create_task(self._run(), name=batch.id)

    def end_early(self) -> None:
        """The batch was cancelled or has expired: no line runs from now on, after a crash neither."""
        if self._runner is not None and self._lines is not None and not self._runner.is_ending:
            self._runner.is_ending = True
            self._lines.cancel()

    async def _run(self) -> None:
        try:
            await self._go_through()
        except WeftError as error:  # the next look begins again where this one stopped
            log.warning("batch_waits", batch=self._batch.id, code=error.code)
        except Exception:
            log.exception("batch_failed_to_run", batch=self._batch.id)

    async def _go_through(self) -> None:
        # What was claimed may have ended since.
        self._batch = await self._services.registry.batches.get(self._batch.tenant_id, self._batch.id)
        if self._batch.status not in OPEN:
            return
        sha256 = await self._input()
        if self._batch.status == "validating" and not await self._is_sound(sha256):
            return
        if self._batch.status == "in_progress" and sha256 is not None and not self._is_expired(self._batch):
            await self._run_lines(sha256)
        await self._end(sha256)

    def _is_expired(self, batch: Batch) -> bool:
        return batch.expires_at <= to_micros(self._services.now())

    async def _input(self) -> str | None:
        try:
            file = await self._services.registry.files.get(
                self._batch.tenant_id, self._batch.input_file_id, has_begun=True
            )
        except NotFoundError:
            return None
        return file.sha256

    async def _is_sound(self, sha256: str | None) -> bool:
        """Check the input, and enter the next status."""
        services, batch, limit = self._services, self._batch, self._services.config.server.max_body_bytes
        check = InputCheck(batch.endpoint, services.config.batch.max_lines, limit)
        lost = {"code": "file_unavailable", "message": "The file's bytes are missing or damaged: send it again."}
        try:
            if sha256 is None:
                check.errors.append(lost)
            else:
                await check_input(check, services.blobs, sha256, limit)
        except AdapterUnavailableError:
            check.errors.append(lost)
        if check.errors:
            await services.registry.batches.fail(batch.id, self._owner, check.errors)
            return False
        begun = await services.registry.batches.begin(batch.id, self._owner, check.total)
        self._batch = begun or batch
        return begun is not None

    async def _run_lines(self, sha256: str) -> None:
        tenants = await self._services.registry.tenant_names([self._batch.tenant_id])
        tenant = tenants.get(self._batch.tenant_id, "")
        self._runner = LineRunner(self._services, self._batch, tenant, self._slots, self._commits.keep)
        self._lines = asyncio.create_task(self._feed(self._runner, sha256))
        try:
            await asyncio.shield(self._lines)
        except AdapterUnavailableError as error:
            log.warning("batch_input_lost", batch=self._batch.id, code=error.code)
        except asyncio.CancelledError:
            is_ours = self._lines.cancelled()  # and not this task, which is to leave off
            self._lines.cancel()
            await asyncio.gather(self._lines, return_exceptions=True)
            if not (is_ours and self._runner.is_ending):
                raise

    async def _feed(self, runner: LineRunner, sha256: str) -> None:
        """Begin one line after the other; how many run at once is for the slots to say."""
        limit = self._services.config.server.max_body_bytes
        done = await self._services.registry.batches.done_lines(self._batch.id)
        try:
            async with (
                asyncio.TaskGroup() as group,
                aclosing(read_lines(self._services.blobs, sha256, limit)) as lines,
            ):
                async for number, raw in lines:
                    if number not in done:
                        line = parse_line(number, raw, self._batch.endpoint)
                        admitted = await runner.admit(line)
                        if admitted is not None:
                            task = group.create_task(runner.run(admitted))
                            # A task that is cancelled before its first step does not leave by itself.
                            task.add_done_callback(partial(_leave, admitted))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from several

    async def _end(self, sha256: str | None) -> None:
        batch = await self._services.registry.batches.stop(self._batch.id, self._owner)
        if batch is None:
            return
        if batch.status == "cancelling":
            status = "cancelled"
        elif batch.completed + batch.failed >= batch.total > 0:
            status = "completed"
        else:
            status = "expired" if self._is_expired(batch) else "failed"
        await write_files(self._services, batch, self._owner, sha256, status)
        log.info("batch_ended", batch=batch.id, status=status, total=batch.total)


def _leave(admitted: AdmittedLine, _: asyncio.Task[None]) -> None:
    admitted.leave()


def owner_name(data_dir: Path) -> str:
    """This server's name, made at the first start; one process at a time has the folder."""
    path = data_dir / "server-id"
    with suppress(FileNotFoundError):
        return path.read_text().strip()
    temporary = path.with_suffix(".new")
    temporary.write_text(f"srv_{secrets.token_hex(12)}\n")
    temporary.replace(path)
    return path.read_text().strip()


async def _first_of(seconds: float, *events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
