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
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from manylora.errors import CapacityError, EngineError, ManyloraError, RequestError
from manylora.server.generation.choices import ChoiceStep, Generation, best_choices
from manylora.server.generation.meter import Meter
from manylora.server.generation.openai_format import JsonObject, Part, ResponseFormat, joined
from manylora.server.generation.schemas import GenerationBody
from manylora.server.generation.writer import ChunkWriter
from manylora.server.http import sse
from manylora.server.http.wire import IS_CLOSING

if TYPE_CHECKING:
    from manylora.server.generation.items import ItemWriter
    from manylora.server.process.drain import Drain


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGeneration:
    """A request that can run, checked, resolved, admitted and reserved; and how its answer looks."""

    generation: Generation
    body: GenerationBody
    shape: ResponseFormat
    writer: ChunkWriter | ItemWriter
    meter: Meter
    headers: dict[str, str]

    async def bill_computed(self) -> None:
        """End what still runs, and bill what was computed instead of what was delivered."""
        await self.generation.abort()
        self.meter.take_computed(self.generation.choices)


async def whole_answer(plan: PlannedGeneration) -> tuple[JsonObject, str, dict[str, str]]:
    """All steps of a generation as one body; raises what ends them early.

    Returns:
        The body, which is counted as delivered; the status that is recorded of it; and the headers.
    """
    parts: dict[int, list[Part]] = {}
    taken: list[ChoiceStep] = []
    async for together in plan.generation.steps():
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
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; raises what the engine refused if nothing was sent yet."""
        plan, generation = self._plan, self._plan.generation
        is_closing: Callable[[], bool] = scope.get("state", {}).get(IS_CLOSING, lambda: False)
        watcher = asyncio.create_task(_until_gone(receive))
        watcher.add_done_callback(lambda _: generation.cut(ClientDisconnect()))
        status = "error"
        try:
            with self._drain.running(generation.cut):
                async with generation:
                    answer = self._stream if plan.body.stream else self._whole
                    try:
                        await answer(send, lambda: watcher.done() or is_closing())
                    except ClientDisconnect:
                        status = "aborted"
                        await plan.bill_computed()
                    except RequestError:
                        await plan.bill_computed()
                        raise
                    except CapacityError:
                        if (
                            plan.meter.is_passed_on
                        ):  # nothing was sent: the gateway asks another server, by this id
                            plan.meter.close("error")
                        raise
                    finally:
                        await asyncio.shield(plan.meter.finish_quietly(status))
        finally:
            watcher.cancel()
            if generation.admission is not None:
                generation.admission.end()

    async def _whole(self, send: Send, is_gone: Callable[[], bool]) -> None:
        body, status, headers = await whole_answer(self._plan)
        if is_gone():
            raise ClientDisconnect
        await self._plan.meter.finish(status)
        response = Response(orjson.dumps(body), media_type="application/json", headers=headers)
        await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": False})

    async def _stream(self, send: Send, is_gone: Callable[[], bool]) -> None:
        plan, steps = self._plan, self._plan.generation.steps()
        first = await anext(steps)
        headers = Headers({**plan.headers, **_state_header(first[0]), **sse.HEADERS})
        await send({"type": "http.response.start", "status": 200, "headers": headers.raw})
        try:
            await self._send_steps(first, steps, send, is_gone)
        except ClientDisconnect:
            raise
        except Exception as error:
            if isinstance(error, RequestError):
                await plan.bill_computed()
            told = error if isinstance(error, ManyloraError) else EngineError(str(error))
            await asyncio.shield(plan.meter.finish_quietly("error"))
            await send(
                {
                    "type": "http.response.body",
                    "body": plan.writer.failure(told),
                    "more_body": False,
                }
            )
            if told is not error:
                raise

    async def _send_steps(
        self,
        first: list[ChoiceStep],
        steps: AsyncIterator[list[ChoiceStep]],
        send: Send,
        is_gone: Callable[[], bool],
    ) -> None:
        """Send all steps that have arrived in one write, one event per step. A slow client gets more in each write."""
        plan, ends = self._plan, list[Part]()
        together: list[ChoiceStep] | None = first
        while together is not None:
            payload = b""
            for step in together:
                plan.meter.observe(step)
                part = plan.shape.part(step)
                if part.finish_reason is not None:
                    ends.append(part)
                plan.meter.deliver(step)
                payload += plan.writer.events(step, part)
            if len(ends) == len(plan.generation.choices) and not is_gone():
                await plan.meter.finish(_overall(ends))
                await send(
                    {
                        "type": "http.response.body",
                        "body": payload + plan.writer.closing(),
                        "more_body": False,
                    }
                )
                return
            if payload:
                await send({"type": "http.response.body", "body": payload, "more_body": True})
            if is_gone():
                raise ClientDisconnect
            plan.meter.mark()
            together = await anext(steps, None)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _state_header(step: ChoiceStep) -> dict[str, str]:
    state = step.output.adapter_state
    return {} if state is None or state == "base" else {"x-manylora-adapter-state": state}


def _overall(ends: list[Part]) -> str:
    """One status for all choices: `length` if any was cut short."""
    return "length" if any(part.finish_reason == "length" for part in ends) else "stop"
