"""The answer to a generation request, whole or as a stream.

Status and headers go out with the engine's first token, so a refusal is a real 4xx or 5xx. A client that goes away
aborts its generations at once, streaming or not, and is billed what was computed until then. The usage event is durable
before the last bytes go out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.errors import EngineError, RequestError, WeftError
from weft.server.generation.choices import ChoiceStep, Generation, best_choices
from weft.server.generation.openai_format import JsonObject, Part, ResponseFormat, joined
from weft.server.http import sse
from weft.server.http.wire import IS_CLOSING

if TYPE_CHECKING:
    from weft.server.drain import Drain
    from weft.server.generation.meter import Meter
    from weft.server.generation.schemas import GenerationBody
    from weft.server.generation.writer import AnswerWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGeneration:
    """A request that can run, checked, resolved, admitted and reserved; and how its answer looks."""

    generation: Generation
    body: GenerationBody
    shape: ResponseFormat
    writer: AnswerWriter
    meter: Meter
    headers: dict[str, str]

    async def bill_computed(self) -> None:
        """End what still runs, and bill what was computed instead of what was delivered."""
        await self.generation.abort()
        self.meter.take_computed(self.generation.choices)


async def whole_answer(
    plan: PlannedGeneration, steps: AsyncIterator[list[ChoiceStep]]
) -> tuple[JsonObject, str, dict[str, str]]:
    """All steps of a generation as one body; raises what ends them early.

    Returns:
        The body, which is counted as delivered; the status that is recorded of it; and the headers.
    """
    parts: dict[int, list[Part]] = {}
    taken: list[ChoiceStep] = []
    async for together in steps:
        for step in together:
            plan.meter.observe(step)
            parts.setdefault(step.choice.index, []).append(plan.shape.part(step))
        taken += together
    for step in taken:
        plan.meter.deliver(step)
    best = best_choices(plan.generation.choices, taken, plan.body.n)
    ends = [joined(parts[choice.index]) for choice in best]
    body = plan.writer.whole(list(zip(best, ends, strict=True)))
    return body, _overall(ends), plan.headers | _state_header(taken[0])


class GenerationResponse(Response):
    """Runs the generation when it is called as an ASGI application."""

    def __init__(self, plan: PlannedGeneration, drain: Drain) -> None:
        super().__init__()
        self._plan = plan
        self._generation = plan.generation
        self._meter = plan.meter
        self._writer = plan.writer
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; raises what the engine refused if nothing was sent yet."""
        is_closing: Callable[[], bool] = scope.get("state", {}).get(IS_CLOSING, lambda: False)
        watcher = asyncio.create_task(_until_gone(receive))
        watcher.add_done_callback(lambda _: self._generation.cut(ClientDisconnect()))
        status = "error"
        try:
            with self._drain.running(self._generation.cut):
                async with self._generation as generation:
                    answer = self._stream if self._plan.body.stream else self._whole
                    try:
                        await answer(generation.steps(), send, lambda: watcher.done() or is_closing())
                    except ClientDisconnect:
                        status = "aborted"
                        await self._plan.bill_computed()
                    except RequestError:
                        await self._plan.bill_computed()
                        raise
                    finally:
                        await asyncio.shield(self._meter.finish_quietly(status))
        finally:
            watcher.cancel()
            if self._generation.admission is not None:
                self._generation.admission.end()

    async def _whole(self, steps: AsyncIterator[list[ChoiceStep]], send: Send, is_gone: Callable[[], bool]) -> None:
        body, status, headers = await whole_answer(self._plan, steps)
        if is_gone():
            raise ClientDisconnect
        await self._meter.finish(status)
        response = Response(orjson.dumps(body), media_type="application/json", headers=headers)
        await _send_start(send, response.status_code, dict(response.headers))
        await send({"type": "http.response.body", "body": response.body, "more_body": False})

    async def _stream(self, steps: AsyncIterator[list[ChoiceStep]], send: Send, is_gone: Callable[[], bool]) -> None:
        first = await anext(steps)
        await _send_start(send, 200, {**self._plan.headers, **_state_header(first[0]), **sse.HEADERS})
        try:
            await self._send_steps(first, steps, send, is_gone)
        except ClientDisconnect:
            raise
        except WeftError as error:
            if isinstance(error, RequestError):
                await self._plan.bill_computed()
            await self._end_badly(error, send)
        except Exception as error:
            await self._end_badly(EngineError(str(error)), send)
            raise

    async def _send_steps(
        self, first: list[ChoiceStep], steps: AsyncIterator[list[ChoiceStep]], send: Send, is_gone: Callable[[], bool]
    ) -> None:
        """Send all steps that have arrived in one write, one event per step. A slow client gets more in each write."""
        ends: list[Part] = []
        together: list[ChoiceStep] | None = first
        while together is not None:
            payload = b""
            for step in together:
                self._meter.observe(step)
                part = self._plan.shape.part(step)
                if part.finish_reason is not None:
                    ends.append(part)
                self._meter.deliver(step)
                payload += self._writer.events(step, part)
            if len(ends) == len(self._generation.choices) and not is_gone():
                await self._meter.finish(_overall(ends))
                await send({"type": "http.response.body", "body": payload + self._writer.closing(), "more_body": False})
                return
            if payload:
                await send({"type": "http.response.body", "body": payload, "more_body": True})
            if is_gone():
                raise ClientDisconnect
            self._meter.mark()
            together = await anext(steps, None)

    async def _end_badly(self, error: WeftError, send: Send) -> None:
        await asyncio.shield(self._meter.finish_quietly("error"))
        await send({"type": "http.response.body", "body": self._writer.failure(error), "more_body": False})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_start(send: Send, status: int, headers: dict[str, str]) -> None:
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})


def _state_header(step: ChoiceStep) -> dict[str, str]:
    state = step.output.adapter_state
    return {} if state is None or state == "base" else {"x-weft-adapter-state": state}


def _overall(ends: list[Part]) -> str:
    """One status for all choices: `length` if any was cut short."""
    return "length" if any(part.finish_reason == "length" for part in ends) else "stop"
