"""A client of an engine process of the demo model, for tests of either."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from manylora.adapters.ref import AdapterRef
from manylora.config import Config
from manylora.engine.process.client import EngineClient
from manylora.engine.request import GenerationRequest, RequestOutput
from manylora.engine.sampling_params import SamplingParams

DEMO = Path(__file__).resolve().parents[2] / "manylora" / "demo"


ADAPTERS = ("french", "haiku", "json", "pirate", "shout")


T = TypeVar("T")


class Engine:
    """A client in an event loop of its own, which turns only while `run` waits."""

    def __init__(self, config: Config) -> None:
        self._runner = asyncio.Runner()
        self.lines: list[str] = []
        self.client = EngineClient(config, announce=self.lines.append)
        self.ready = self.run(self.client.start())

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            return await asyncio.wait_for(main, 180)

        return self._runner.run(bounded())

    def close(self) -> None:
        self.run(self.client.close())
        self._runner.close()


async def collect(client: EngineClient, request: GenerationRequest) -> list[RequestOutput]:
    return [output async for output in client.generate(request)]


async def is_on_device(client: EngineClient, ref: AdapterRef) -> bool:
    residents = (await client.status()).residents
    return any(
        resident.digest == ref.digest and resident.tier == "device" for resident in residents
    )


async def eventually(condition: Callable[[], Awaitable[bool]], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def is_ready(client: EngineClient) -> bool:
    return client.ready is not None


async def has_restarted(client: EngineClient) -> bool:
    return client.restarts == 1


async def is_idle(client: EngineClient) -> bool:
    status = await client.status()
    return status.running == status.waiting == status.pages["kv"] == 0


def question(
    name: str, prompt: list[int], ref: AdapterRef | None = None, **params: Any
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=prompt,
        params=SamplingParams(**{"max_tokens": 60, "temperature": 0.0, **params}),
        adapter=ref,
    )


def endless(name: str, prompt: list[int]) -> GenerationRequest:
    return question(name, prompt, max_tokens=900, ignore_eos=True)


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
