"""One line of a batch, from its body to its result, through the same code as an interactive request.

What only asks for patience does not fail a line: a rate limit is waited for, and a line that Weft lost runs again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import orjson
import structlog

from weft.errors import (
    AdapterUnavailableError,
    CapacityError,
    EngineError,
    EngineUnavailableError,
    ForbiddenError,
    RateLimitError,
    WeftError,
)
from weft.registry.batches import Batch, LineResult
from weft.registry.records import SCOPES, Identity, UsageEvent
from weft.server.access import Caller
from weft.server.admission import shares_of
from weft.server.batches.input_lines import Line
from weft.server.batches.line_slots import LineSlots
from weft.server.errors import answer, error_body
from weft.server.generation_response import WholeAnswer
from weft.server.json_body import validate
from weft.server.lease import Lease
from weft.server.routes_generation import Origin, PlannedGeneration, plan_chat, plan_completion
from weft.server.schemas import ChatBody, CompletionBody
from weft.server.services import Services
from weft.server.shapes import JsonObject

log = structlog.get_logger("weft.server")
OK = 200
LOSSES = (EngineUnavailableError, AdapterUnavailableError)
MAX_LOSSES = 5
"""A line that the engine died under, or whose adapter did not load, so often has failed: it may be the reason."""
LONGEST_WAIT_S = 30.0
CALLER_S = 1.0
"""How old the word may be that the key still works."""
Keep = Callable[[LineResult], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class AdmittedLine:
    """A line with a place and its part of the limits, which `leave` gives back; calling it again changes nothing."""

    line: Line
    planned: PlannedGeneration
    leave: Callable[[], None]


@dataclass(slots=True)
class LineRunner:
    """Runs lines of one batch."""

    services: Services
    batch: Batch
    tenant: str
    slots: LineSlots
    keep: Keep
    """Makes a result durable; False where it no longer counts."""
    is_ending: bool = False
    """The batch is cancelled or has expired: lines that are cut now never run again."""
    _known: tuple[float, Caller] | None = field(default=None)

    async def admit(self, line: Line) -> AdmittedLine | None:
        """Wait for a place and for the limits; None where the line has failed, and its result is kept."""
        while True:
            await self.slots.take(self.batch.tenant_id, self.batch.id)
            with ExitStack() as stack:
                stack.callback(self.slots.free, self.batch.tenant_id, self.batch.id)
                try:
                    planned = await self._planned(line)
                except WeftError as error:
                    wait_s = _wait_s(error)
                    if wait_s is None:
                        await self._keep(self._result(line, *_failure(error), None))
                        return None
                except Exception as error:
                    log.exception("batch_line_failed", batch=self.batch.id, line=line.number)
                    await self._keep(self._result(line, *_failure(EngineError(str(error))), None))
                    return None
                else:
                    stack.callback(planned.origin.lease.end)
                    return AdmittedLine(line, planned, stack.pop_all().close)
            await asyncio.sleep(wait_s)

    async def run(self, admitted: AdmittedLine | None) -> None:
        """Carry a line to its result."""
        losses = 0
        while admitted is not None:
            try:
                await self._generate(admitted, is_last=losses + 1 >= MAX_LOSSES)
            except CapacityError as error:
                losses += isinstance(error, LOSSES)
                await asyncio.sleep(min(error.retry_after_s, LONGEST_WAIT_S))
                admitted = await self.admit(admitted.line)
            else:
                return

    async def _planned(self, line: Line) -> PlannedGeneration:
        services, lease = self.services, Lease()
        if services.engine.ready is None:
            raise EngineUnavailableError("The engine is starting.")
        try:
            caller = await self._caller()
            lease.admit(await shares_of(services, caller), services.monotonic, lambda _: None, 1)
            name = f"{self.batch.id}-{line.number}"
            origin = Origin(
                services=services,
                caller=caller,
                lease=lease,
                endpoint=self.batch.endpoint,
                request_id=name,
                session=name,
                line_id=name,
            )
            if self.batch.endpoint == "/v1/completions":
                return await plan_completion(origin, validate(CompletionBody, line.body))
            return await plan_chat(origin, validate(ChatBody, line.body))
        except BaseException:
            lease.end()
            raise

    async def _caller(self) -> Caller:
        """Whoever made the batch, as the key is now.

        Raises:
            AuthenticationError: The key was revoked or has expired.
            ForbiddenError: It may not generate any more.
        """
        now_s = self.services.monotonic()
        if self._known is not None and now_s - self._known[0] < CALLER_S:
            return self._known[1]
        identity = Identity(role="admin", tenant_id=None, tenant=None, key_id=None, scopes=SCOPES)
        if self.batch.key_id:
            identity = await self.services.registry.identify_key(self.batch.key_id)
        if "infer" not in identity.scopes:
            raise ForbiddenError("The API key lacks the scope infer.")
        caller = Caller(
            identity=identity, tenant_id=self.batch.tenant_id, tenant=self.tenant, weight=identity.tenant_weight
        )
        self._known = (now_s, caller)
        return caller

    async def _generate(self, admitted: AdmittedLine, *, is_last: bool) -> None:
        line, planned = admitted.line, admitted.planned
        try:
            async with planned.generation as generation:
                whole = WholeAnswer(planned.shape, planned.meter)
                try:
                    await whole.collect(generation.steps())
                    body, ended = whole.body(planned.manner, generation.choices)
                    status = OK
                except asyncio.CancelledError:
                    if self.is_ending:
                        planned.meter.take_computed(await asyncio.shield(generation.abort()))
                        await asyncio.shield(planned.meter.finish_quietly("aborted"))
                    raise
                except WeftError as error:
                    if isinstance(error, CapacityError) and not (is_last and isinstance(error, LOSSES)):
                        raise
                    status, body, ended = *_failure(error), "error"
                except Exception as error:
                    log.exception("batch_line_failed", batch=self.batch.id, line=line.number)
                    status, body, ended = *_failure(EngineError(str(error))), "error"
            event = planned.meter.close(ended)
            if await self._keep(self._result(line, status, body, event)) and event is not None:
                planned.meter.settle(event)
        finally:
            admitted.leave()

    async def _keep(self, result: LineResult) -> bool:
        """Make a result durable, also where the batch is being cancelled: what was computed is in its output."""
        keeping = asyncio.ensure_future(self.keep(result))
        try:
            return await asyncio.shield(keeping)
        except asyncio.CancelledError:
            if self.is_ending:
                await asyncio.wait([keeping])
            raise

    def _result(self, line: Line, status: int, body: JsonObject, event: UsageEvent | None) -> LineResult:
        response: JsonObject = {"status_code": status, "request_id": f"{self.batch.id}-{line.number}", "body": body}
        text = result_text(self.batch.id, line, response, None)
        return LineResult(batch_id=self.batch.id, line=line.number, is_error=status != OK, text=text, event=event)


def _failure(error: WeftError) -> tuple[int, JsonObject]:
    return answer(error)[0], dict(error_body(error))


def result_text(batch_id: str, line: Line, response: dict[str, object] | None, error: dict[str, object] | None) -> str:
    """A line of a result file, without its end."""
    name = f"batch_req_{batch_id.removeprefix('batch_')}-{line.number}"
    return orjson.dumps({"id": name, "custom_id": line.custom_id, "response": response, "error": error}).decode()


def _wait_s(error: WeftError) -> float | None:
    """Seconds after which a line may be tried again that was not let in; None where that does not help."""
    if isinstance(error, RateLimitError | CapacityError) and error.retry_after_s is not None:
        return min(max(error.retry_after_s, 0.05), LONGEST_WAIT_S)
    return None
