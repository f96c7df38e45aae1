"""One line of a batch, from its body to its result, through the same code as an interactive request.

A line does not fail where waiting helps: it waits for rate limits, and runs again when the engine lost it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial

import orjson
import structlog

from manylora import errors
from manylora.registry.batches import LineResult
from manylora.registry.cache import ReadThroughCache
from manylora.registry.db.models import BatchRow
from manylora.registry.records import SCOPES, Identity, UsageEvent
from manylora.server.auth.admission import admit
from manylora.server.auth.callers import Caller
from manylora.server.batches.input_lines import Line
from manylora.server.errors import answer, error_body
from manylora.server.generation.meter import Meter
from manylora.server.generation.openai_format import JsonObject
from manylora.server.generation.routes import endpoints, whole_answer
from manylora.server.generation.run import GenerationRun
from manylora.server.http.bodies import validate
from manylora.server.limits.reservation import LimitReservation
from manylora.server.process.fair_semaphore import FairSemaphore
from manylora.server.services import Services

log = structlog.get_logger("manylora.server")
PASSING = (errors.RateLimitError, errors.CapacityError)
"""Errors that may be over when a line runs again."""
LOSSES = (errors.EngineUnavailableError, errors.AdapterUnavailableError)
MAX_LOSSES = 5
"""A line fails after this number of runs in which the engine died or its adapter did not load: it may be the cause."""
LONGEST_WAIT_S = 30.0
CANCELLED = ("batch_cancelled", "The batch was cancelled before this request ran.")
EXPIRED = (
    "batch_expired",
    "This request could not be executed before the completion window expired.",
)


@dataclass(slots=True)
class LineRunner:
    """Runs lines of one batch."""

    services: Services
    batch: BatchRow
    places: FairSemaphore
    """Places of all lines that run on this server. A line that waits for a limit has none."""
    keep: Callable[[LineResult], Awaitable[bool]]
    """Makes a result durable; False if it no longer counts."""
    callers: ReadThroughCache[tuple[str, str], Caller]
    """Callers by tenant and key, which all batches share."""
    is_ending: bool = False
    """The batch is cancelled or has expired: no more lines run, and lines that are cut do not run again."""
    _caller: Caller | None = field(default=None)
    """As it was last read."""

    @property
    def weight(self) -> float:
        """The tenant's weight as it was last read; 1 before `caller` was asked."""
        return self._caller.weight if self._caller else 1.0

    async def run(self, number: int, line: Line) -> None:
        """Run a line until it has a result."""
        if self.is_ending:
            code, message = CANCELLED if self.batch.status == "cancelling" else EXPIRED
            await self.keep(self._result(number, line, None, {"code": code, "message": message}))
            return
        losses = 0
        while True:
            try:
                async with self.places.place(self.batch.tenant_id, self.weight):
                    await self._try(number, line, is_last=losses + 1 == MAX_LOSSES)
            except PASSING as error:
                losses += isinstance(error, LOSSES)
                wait_s = min(max(error.retry_after_s or 0, 0.05), LONGEST_WAIT_S)
            else:
                return
            await asyncio.sleep(wait_s)

    async def _try(self, number: int, line: Line, *, is_last: bool) -> None:
        """Keep a result or an error. Raises RateLimitError and CapacityError if the line may run later."""
        meter: Meter | None = None
        event: UsageEvent | None = None
        async with AsyncExitStack() as ends:
            try:
                run = await self._prepare(number, line, ends)
                meter = run.meter
                body, event = await self._generate(run)
                status = 200
            except Exception as error:
                is_passing = isinstance(error, PASSING) and error.retry_after_s is not None
                if is_passing and not (is_last and isinstance(error, LOSSES)):
                    raise
                if isinstance(error, errors.ManyloraError):
                    shown = error
                else:
                    log.exception("batch_line_failed", batch=self.batch.id, line=number)
                    shown = errors.EngineError(str(error))
                status, _ = answer(shown)
                body = dict(error_body(shown))
                event = meter.close("error") if meter is not None else None
            response: JsonObject = {
                "status_code": status,
                "request_id": f"{self.batch.id}-{number}",
                "body": body,
            }
            is_kept = await self.keep(self._result(number, line, response, None, event))
            if is_kept and meter is not None and event is not None:
                meter.settle(event)

    def _result(
        self,
        number: int,
        line: Line,
        response: JsonObject | None,
        error: JsonObject | None,
        event: UsageEvent | None = None,
    ) -> LineResult:
        name = f"batch_req_{self.batch.id.removeprefix('batch_')}-{number}"
        result = {"id": name, "custom_id": line.custom_id, "response": response, "error": error}
        is_error = response is None or response["status_code"] != 200
        text = orjson.dumps(result).decode()
        return LineResult(
            batch_id=self.batch.id, line=number, is_error=is_error, text=text, event=event
        )

    async def _prepare(self, number: int, line: Line, ends: AsyncExitStack) -> GenerationRun:
        """A run of the line, which the engine can be asked for; `ends` gives back what it takes."""
        services = self.services
        name = f"{self.batch.id}-{number}"
        if services.engine.ready is None:
            raise errors.CapacityError("The engine is starting.")
        caller = await self.caller()
        await services.limits.arrivals.turn(caller.tenant_id or "")
        reservation = LimitReservation()
        ends.callback(reservation.end)
        await admit(services, caller, reservation, 1, lambda _: None)
        run = GenerationRun(
            services=services,
            caller=caller,
            reservation=reservation,
            ends=ends,
            endpoint=self.batch.endpoint,
            request_id=name,
            session=name,
            line_id=name,
            num_bytes=line.num_bytes,
        )
        endpoint = endpoints[self.batch.endpoint]
        body = await run.work(partial(validate, endpoint.body, line.body), line.num_bytes)
        await endpoint.prepare(run, body)
        return run

    async def _generate(self, run: GenerationRun) -> tuple[JsonObject, UsageEvent | None]:
        async with run.generating():
            try:
                whole, status, _ = await whole_answer(run)
            except asyncio.CancelledError:
                if self.is_ending:
                    run.unbilled_status = "aborted"
                    await asyncio.shield(run.take_computed())
                raise
        return whole, run.meter.close(status)

    async def caller(self) -> Caller:
        """The caller who made the batch, with the rights that the key has now.

        Raises:
            AuthenticationError: The key was revoked or has expired.
            ForbiddenError: It may not generate any more.
        """
        key = (self.batch.tenant_id, self.batch.key_id)
        self._caller = await self.callers.ask(key, self._read_caller)
        return self._caller

    async def _read_caller(self) -> Caller:
        registry = self.services.registry
        if self.batch.key_id:
            identity = await registry.keys.identify_key(self.batch.key_id)
            if "infer" not in identity.scopes:
                raise errors.ForbiddenError("The API key lacks the scope infer.")
            return Caller(
                identity=identity,
                tenant_id=identity.tenant_id,
                tenant=identity.tenant,
                weight=identity.tenant_weight,
            )
        tenant_id = self.batch.tenant_id
        admin = Identity(role="admin", tenant_id=None, tenant=None, key_id=None, scopes=SCOPES)
        tenant = (await registry.tenants.tenant_names([tenant_id])).get(tenant_id)
        weight = 1.0 if tenant is None else (await registry.tenants.get_tenant(tenant)).weight
        return Caller(identity=admin, tenant_id=tenant_id, tenant=tenant, weight=weight)
