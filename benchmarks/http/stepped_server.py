"""`manylora` with an engine that writes tokens by a clock, for benchmarks of what is around an engine.

The engine's process runs and says what it is, as ever, but gets no requests. Each request gets its first token at once,
and then one every `STEP_S` seconds until `max_tokens`.
"""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import AsyncGenerator

from manylora.engine.process.client import REQUESTS_A_ROUND, EngineClient
from manylora.engine.process.inbox import Inbox
from manylora.engine.request import GenerationRequest, RequestOutput
from manylora.engine.status import EngineReady
from manylora.server import serve
from manylora.server.server_process import PROGRAM

STEP_S = 0.01
TOKEN = 300


class SteppedEngine(EngineClient):
    """An engine whose steps are on time for any number of requests, unless the server keeps this event loop busy."""

    async def start(self) -> EngineReady:
        """Start the engine and the clock."""
        self._running: dict[str, Inbox[RequestOutput]] = {}
        self._stepping = asyncio.create_task(self._step())
        return await super().start()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        """Yield as many tokens as the request allows."""
        outputs = self._running[request.request_id] = Inbox()
        outputs.put(_token(request.request_id))
        num_tokens = 0
        try:
            while True:
                for output in await outputs.take():
                    num_tokens += len(output.token_ids)
                    if num_tokens == request.params.max_tokens:
                        output.finish_reason = "length"
                    yield output
                    if output.finish_reason is not None:
                        return
        finally:
            del self._running[request.request_id]

    def abort(self, request_id: str) -> None:
        """End a request."""
        if (outputs := self._running.get(request_id)) is not None:
            outputs.put(RequestOutput(request_id=request_id, finish_reason="abort"))

    async def _step(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            due_s = max(due_s + STEP_S, loop.time())  # a step that was late is not caught up with
            await asyncio.sleep(due_s - loop.time())
            for number, (request_id, outputs) in enumerate(list(self._running.items()), start=1):
                outputs.put(_token(request_id))
                if number % REQUESTS_A_ROUND == 0:
                    await asyncio.sleep(0)  # as the outputs of an engine are passed on


def _token(request_id: str) -> RequestOutput:
    return RequestOutput(request_id=request_id, token_ids=[TOKEN])


if __name__ == "__main__":
    vars(serve)["EngineClient"] = SteppedEngine
    runpy.run_module(PROGRAM, run_name="__main__")
