"""Clients that ask without pause while servers die under them, and remember what each of their requests saw.

A request that failed is never sent again: what follows it is another request, under another id.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from manylora_server import DEMO_MODEL
from stream_client import Cut, Seen, exchange, note_usage, stream

CLIENTS = 8
BACK_OFF_S = 0.2
BASE = DEMO_MODEL.name
SHARED = list(range(10, 90))
"""What many prompts begin with; some blocks of the prefix cache."""


@dataclass(slots=True, kw_only=True)
class Asked:
    """One request, and what came back."""

    request_id: str
    tenant: str
    path: str
    body: dict[str, Any]
    is_stream: bool
    seen: Seen = field(default_factory=Seen)

    @property
    def asked_tokens(self) -> int:
        return int(self.body["n"] * self.body["max_tokens"])


class UsageLoad:
    """Clients in a thread of their own; `url` may change at any time.

    Args:
        keys: A key of each tenant.
        adapters: Names that each tenant may call.
        seed: Decides what is asked.
    """

    def __init__(self, keys: dict[str, str], adapters: tuple[str, ...], seed: int) -> None:
        self.url = "http://127.0.0.1:1"  # where nobody listens
        self.asked: list[Asked] = []
        """In the order in which they were sent."""
        self._keys = keys
        self._models = (BASE, *adapters)
        self._rng = random.Random(seed)
        self._is_over = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="usage-load")

    def __enter__(self) -> UsageLoad:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._is_over = True
        self._thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._ask_all())
        except BaseException as error:  # noqa: BLE001 - the test's thread raises it
            self._failure = error

    async def _ask_all(self) -> None:
        async with asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(self._client())

    async def _client(self) -> None:
        while not self._is_over:
            asked = self._draw()
            self.asked.append(asked)
            with contextlib.suppress(
                ConnectionError
            ):  # nobody listens, or it went away before it answered
                await send(self.url, self._keys[asked.tenant], asked)
            if not asked.seen.is_done:
                await asyncio.sleep(BACK_OFF_S)

    def _draw(self) -> Asked:
        rng, number = self._rng, len(self.asked)
        body: dict[str, Any] = {
            "model": rng.choice(self._models),
            "max_tokens": rng.choice([1, 8, 40, 200]),
            "n": rng.choice([1, 1, 2]),
            "temperature": rng.choice([0, 1]),
            "ignore_eos": rng.random() < 0.7,
        }
        path = rng.choice(["/v1/completions", "/v1/chat/completions"])
        if path == "/v1/completions":
            body["prompt"] = [
                *SHARED[: rng.choice([0, 40, 80])],
                *(rng.randint(6, 600) for _ in range(5)),
            ]
        else:
            body["messages"] = [
                {"role": "user", "content": rng.choice(["hello", "where is my order?"])}
            ]
        return Asked(
            request_id=f"ask-{number}",
            tenant=rng.choice(sorted(self._keys)),
            path=path,
            body=body,
            is_stream=rng.random() < 0.7,
        )


async def send(url: str, key: str, asked: Asked) -> None:
    """Ask once, and note what came.

    Raises:
        ConnectionError: Nothing came.
    """
    if asked.is_stream:
        asked.seen = await stream(url, key, asked.request_id, asked.body, Cut(), asked.path)
        return
    asked.seen.status, content = await exchange(
        url, key, f"POST {asked.path}", asked.body, X_Request_Id=asked.request_id
    )
    try:
        answer = json.loads(content)
    except ValueError:
        return  # cut in the middle
    if asked.seen.status == 200:
        note_usage(asked.seen, answer["usage"])
        asked.seen.is_done = True
    else:
        asked.seen.error = str(answer["error"]["code"])
