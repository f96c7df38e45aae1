"""Runs the batches of this server: finds them, checks their input, feeds their lines, and ends them.

All state is in the database. At SIGTERM the lines that run are cancelled at once; they run again at the next start.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, nullcontext, suppress
from functools import partial
from weakref import WeakValueDictionary

import structlog

from manylora.errors import AdapterUnavailableError, ManyloraError, RequestError
from manylora.registry.batches import OPEN
from manylora.registry.cache import ReadThroughCache
from manylora.registry.db.clock import to_seconds
from manylora.registry.db.models import BatchRow
from manylora.server.auth.callers import Caller
from manylora.server.batches.input_lines import check_input, input_error, parse_line, read_lines
from manylora.server.batches.line_run import LineRunner
from manylora.server.batches.results import ResultCommits, write_files
from manylora.server.process.drain import first_of
from manylora.server.process.fair_semaphore import FairSemaphore
from manylora.server.process.threads import Acting, acting, cancel_all
from manylora.server.services import Services

log = structlog.get_logger("manylora.server")
LOOK_S = 2.0
"""Seconds between two looks for batches. Each look also renews this server's claim on its batches."""
RUNNING = 4
"""Batches of one key whose lines run at the same time."""
CHECKS = 2
"""Inputs that are checked at the same time."""


class KeysBatches:
    """The batches of one key: a few run at a time, the oldest first, and a bounded number of lines are in memory.

    If all of them ran, each would end late, and a commit of results, which has lines of all, would take long.
    """

    def __init__(self, max_lines: int) -> None:
        self.running = asyncio.Semaphore(RUNNING)
        self.lines = asyncio.Semaphore(max_lines)


class BatchWorker:
    """Works between `start` and `stop`. Thread: the event loop's.

    Args:
        services: The parts of the server.
        owner: This server's name among all over the same database; the same after a restart.
    """

    def __init__(self, services: Services, owner: str) -> None:
        self._services = services
        self._owner = owner
        most = services.config.batch.max_running
        self._places = FairSemaphore(most, spare=most)
        self._checks = FairSemaphore(CHECKS, spare=CHECKS)
        self._in_order: WeakValueDictionary[tuple[str, str], KeysBatches] = WeakValueDictionary()
        """By tenant and key: one key's limits do not hold up batches of another."""
        self._callers: ReadThroughCache[tuple[str, str], Caller] = ReadThroughCache(
            services.clock.monotonic
        )
        self._commits = ResultCommits(services, owner)
        self._runs: dict[str, tuple[LineRunner, asyncio.Task[None]]] = {}
        self._is_stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; batches of the last process go on."""
        self._task = asyncio.create_task(self._go_on(), name="manylora-batches")

    async def stop(self) -> None:
        """End with everything left as it is in the database. This server, or another one, goes on with it later."""
        self._is_stopping.set()
        if self._task is not None:
            await self._task

    async def leave_off(self) -> None:
        """Cancel all lines that run, and let other servers have the batches."""
        tasks = [task for _, task in self._runs.values()]
        self._runs.clear()
        await cancel_all(tasks)
        await self._commits.settle()
        with suppress(ManyloraError):  # then other servers wait until this server's claim ends
            await self._services.registry.batches.release(self._owner)

    async def look(self) -> None:
        """Claim batches, drop those that other servers have now, and end those that are over."""
        held = {
            batch.id: batch for batch in await self._services.registry.batches.claim(self._owner)
        }
        for batch_id in self._runs.keys() - held.keys():
            self._runs.pop(batch_id)[1].cancel()
        for _, batch in sorted(held.items()):
            runner, task = self._runs.get(batch.id, (None, None))
            if runner is None or task is None or task.done():
                runner = LineRunner(
                    services=self._services,
                    batch=batch,
                    places=self._places,
                    keep=self._commits.keep,
                    callers=self._callers,
                    is_ending=self._is_over(batch),
                )
                self._runs[batch.id] = runner, asyncio.create_task(self._run(runner), name=batch.id)
            elif self._is_over(batch) and not runner.is_ending:
                runner.is_ending = True  # its lines end now, and another run writes its files
                task.cancel()
                task.add_done_callback(lambda _: self._services.registry.batches.changed.set())

    async def _go_on(self) -> None:
        changed = self._services.registry.batches.changed
        began = self._services.drain.began
        waits_for: str | None = None
        while not (began.is_set() or self._is_stopping.is_set()):
            changed.clear()
            try:
                await self.look()
                waits_for = None
            except ManyloraError as error:
                if error.code != waits_for:  # else it was said
                    log.warning("batches_wait", code=error.code)
                waits_for = error.code
            except Exception:
                log.exception("batches_failed")
            await first_of(LOOK_S, changed, began, self._is_stopping)
        await self.leave_off()

    async def _run(self, runner: LineRunner) -> None:
        """Continue a batch from its current status."""
        acting.set(Acting(runner.batch.tenant_id))
        try:
            await self._commits.settle()  # of a run before
            await self._go_through(runner)
        except ManyloraError as error:  # the next look begins again where this one stopped
            log.warning("batch_waits", batch=runner.batch.id, code=error.code)
        except Exception:
            log.exception("batch_failed_to_run", batch=runner.batch.id)

    async def _go_through(self, runner: LineRunner) -> None:
        batches = self._services.registry.batches
        # What was claimed may have been cancelled, or have ended, since.
        found = await batches.get(runner.batch.tenant_id, runner.batch.id)
        runner.batch = found
        runner.is_ending = self._is_over(found)
        with suppress(RequestError):  # which the lines will say
            await runner.caller()
        acting.set(Acting(found.tenant_id, runner.weight))
        batch = await self._check(found, runner.weight) if found.status == "validating" else found
        if batch is None or batch.status not in OPEN:
            return
        if batch.status != "finalizing" and batch.total:
            await self._feed(runner, batch)
        if batch.status != "cancelling":
            batch = await batches.enter(batch.id, self._owner, "finalizing")
        if batch is not None:
            await self._end(batch, is_expired=runner.is_ending)

    def _is_over(self, batch: BatchRow) -> bool:
        return batch.status == "cancelling" or batch.expires_at <= to_seconds(
            self._services.clock.now()
        )

    async def _check(self, batch: BatchRow, weight: float) -> BatchRow | None:
        """Check the input in the tenant's turn, and enter the next status; None if no line is to run."""
        services = self._services
        config = self._services.config
        try:
            async with self._checks.place(batch.tenant_id, weight):
                total, errors = await check_input(
                    services.blobs,
                    batch.input_sha256,
                    batch.endpoint,
                    max_lines=config.batch.max_lines,
                    max_bytes=config.server.max_body_bytes,
                    work=partial(
                        services.bodies.long_work.run, tenant=batch.tenant_id, weight=weight
                    ),
                )
        except AdapterUnavailableError:
            lost = "The file's bytes are missing or damaged: send it again."
            total = 0
            errors = [input_error("file_unavailable", lost)]
        if not errors:
            return await services.registry.batches.enter(
                batch.id, self._owner, "in_progress", total=total
            )
        told = {"object": "list", "data": errors}
        await services.registry.batches.enter(batch.id, self._owner, "failed", errors=told)
        return None

    async def _feed(self, runner: LineRunner, batch: BatchRow) -> None:
        """Run each line that has no result yet, in the batch's turn among those of its key."""
        key = batch.tenant_id, batch.key_id
        own = self._in_order.setdefault(
            key, KeysBatches(2 * self._services.config.batch.max_running)
        )
        async with nullcontext() if runner.is_ending else own.running:
            await self._run_lines(runner, batch, own.lines)

    async def _run_lines(
        self, runner: LineRunner, batch: BatchRow, ahead: asyncio.Semaphore
    ) -> None:
        services = self._services
        limit = self._services.config.server.max_body_bytes
        done = await services.registry.batches.done_lines(batch.id)
        try:
            async with (
                asyncio.TaskGroup() as group,
                aclosing(read_lines(services.blobs, batch.input_sha256, limit)) as lines,
            ):
                async for number, raw in lines:
                    if number not in done:
                        await ahead.acquire()
                        parse = partial(parse_line, raw, batch.endpoint, limit)
                        line = await services.bodies.long_work.run(
                            parse, len(raw), batch.tenant_id, runner.weight
                        )
                        task = group.create_task(runner.run(number, line))
                        task.add_done_callback(lambda _: ahead.release())
        except BaseExceptionGroup as several:
            error = several.exceptions[0]
            if not isinstance(error, AdapterUnavailableError):
                raise error from several
            log.warning("batch_input_lost", batch=batch.id, code=error.code)

    async def _end(self, batch: BatchRow, *, is_expired: bool) -> None:
        if batch.status == "cancelling":
            status = "cancelled"
        elif is_expired and batch.completed < batch.total:
            status = "expired"
        else:  # where the input was lost, lines have no result
            status = "completed" if batch.completed + batch.failed == batch.total else "failed"
        await write_files(self._services, batch, self._owner, status)
        log.info("batch_ended", batch=batch.id, status=status, total=batch.total)
