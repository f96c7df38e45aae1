"""The answer to a generation request, whole or as a stream.

Status and headers go out with the engine's first token, so a refusal is a real 4xx or 5xx. A client that goes away
aborts its generations at once, streaming or not, and is billed what was computed until then. The usage event is durable
before the last bytes go out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import orjson
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from manylora.errors import EngineError, ManyloraError, RequestError
from manylora.server.generation.choices import ChoiceStep, best_choices
from manylora.server.generation.openai_format import AnswerPart, JsonObject, joined
from manylora.server.generation.run import GenerationRun
from manylora.server.http import sse
from manylora.server.http.wire import IS_CLOSING


async def whole_answer(run: GenerationRun) -> tuple[JsonObject, str, dict[str, str]]:
    """All steps of a generation as one body; raises what ends them early.

    Returns:
        The body, which is counted as delivered; the status that is recorded of it; and the headers.
    """
    parts: dict[int, list[AnswerPart]] = {}
    taken: list[ChoiceStep] = []
    async for together in run.generation.steps():
        for step in together:
            run.meter.observe(step)
            parts.setdefault(step.choice.index, []).append(run.shape.part(step))
        taken += together
    for step in taken:
        run.meter.deliver(step)
    best = best_choices(run.generation.choices, taken, run.body.n)
    ends = [joined(parts[choice.index]) for choice in best]
    body = run.writer.whole(list(zip(best, ends, strict=True)))
    return body, _overall(ends), run.model.headers | _state_header(taken[0])


class GenerationResponse(Response):
    """Has the engine compute a prepared run when it is called as an ASGI application."""

    def __init__(self, run: GenerationRun) -> None:
        super().__init__()
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer.

        Raises:
            ManyloraError: The engine refused, and nothing was sent yet.
            ClientDisconnect: The client is gone.
        """
        run = self._run
        cut = run.generation.cut
        is_closing: Callable[[], bool] = scope.get("state", {}).get(IS_CLOSING, lambda: False)
        watcher = asyncio.create_task(_until_gone(receive))
        watcher.add_done_callback(lambda _: cut(ClientDisconnect()))
        answer = self._stream if run.body.stream else self._whole
        try:
            with run.services.drain.running(cut):
                async with run.generating():
                    await answer(send, lambda: watcher.done() or is_closing())
        finally:
            watcher.cancel()

    async def _whole(self, send: Send, is_gone: Callable[[], bool]) -> None:
        body, status, headers = await whole_answer(self._run)
        if is_gone():
            raise ClientDisconnect
        await self._run.bill(status)
        response = Response(orjson.dumps(body), media_type="application/json", headers=headers)
        await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": False})

    async def _stream(self, send: Send, is_gone: Callable[[], bool]) -> None:
        run = self._run
        steps = run.generation.steps()
        first = await anext(steps)
        headers = Headers({**run.model.headers, **_state_header(first[0]), **sse.HEADERS})
        await send({"type": "http.response.start", "status": 200, "headers": headers.raw})
        try:
            await self._send_steps(first, steps, send, is_gone)
        except ClientDisconnect:
            raise
        except Exception as error:
            if isinstance(error, RequestError):
                await run.take_computed()
            shown = error if isinstance(error, ManyloraError) else EngineError(str(error))
            await _send_body(send, run.writer.failure(shown), is_last=True)
            if shown is not error:
                raise

    async def _send_steps(
        self,
        first: list[ChoiceStep],
        steps: AsyncIterator[list[ChoiceStep]],
        send: Send,
        is_gone: Callable[[], bool],
    ) -> None:
        """Send all steps that have arrived in one write, one event per step. A slow client gets more in each write."""
        run = self._run
        ends = list[AnswerPart]()
        together: list[ChoiceStep] | None = first
        while together is not None:
            payload = b""
            for step in together:
                run.meter.observe(step)
                part = run.shape.part(step)
                if part.finish_reason is not None:
                    ends.append(part)
                run.meter.deliver(step)
                payload += run.writer.events(step, part)
            if len(ends) == len(run.generation.choices) and not is_gone():
                await run.bill(_overall(ends))
                await _send_body(send, payload + run.writer.closing(), is_last=True)
                return
            if payload:
                await _send_body(send, payload, is_last=False)
            if is_gone():
                raise ClientDisconnect
            run.meter.mark()
            together = await anext(steps, None)


async def _send_body(send: Send, payload: bytes, *, is_last: bool) -> None:
    await send({"type": "http.response.body", "body": payload, "more_body": not is_last})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _state_header(step: ChoiceStep) -> dict[str, str]:
    state = step.output.adapter_state
    return {} if state is None or state == "base" else {"x-manylora-adapter-state": state}


def _overall(ends: list[AnswerPart]) -> str:
    """One status for all choices: `length` if any was cut short."""
    return "length" if any(part.finish_reason == "length" for part in ends) else "stop"
