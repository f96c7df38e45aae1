"""Nothing that a client sends makes the server stand still: neither its event loop nor the interpreter's lock.

The routes and the fields of their bodies are read from the OpenAPI page, so a new route is tried too.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import httpx
import orjson
import pytest

from api_server import ADMIN_KEY, BASE, Api, new_client
from fake_engine import demo_ready
from manylora.server.app import create_app
from manylora.server.process.threads import keep_interpreter_moving

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
LONGEST_S = 0.3
"""A third of it is the goal; the processor may be a slow one."""
TRIES = 4
MIB = 1 << 20
ROOM = MIB - 4096
"""Bytes for the long field of a body."""
LISTS = {
    "numbers": b"1",
    "texts": b'""',
    "lists": b"[]",
    "objects": b"{}",
    "parts": b'{"type":"text","text":""}',
}
ANY = "x"


class Moment(NamedTuple):
    """Two clocks, read together."""

    clock_s: float
    computed_s: float
    """Seconds for which this process had a core."""

    @classmethod
    def now(cls) -> Moment:
        return cls(time.perf_counter(), time.process_time())


@dataclass
class Ticks:
    """The longest time that a thread and the event loop had to wait for a turn.

    Counts no more than this process computed meanwhile: other tests take the cores too.
    """

    longest_s: float = 0.0

    def note(self, last: Moment) -> Moment:
        now = Moment.now()
        self.longest_s = max(
            self.longest_s, min(now.clock_s - last.clock_s, now.computed_s - last.computed_s)
        )
        return now


@contextlib.asynccontextmanager
async def ticking() -> AsyncIterator[Ticks]:
    ticks, is_over = Ticks(), threading.Event()

    def in_thread() -> None:
        last = Moment.now()
        while not is_over.wait(0.001):
            last = ticks.note(last)

    async def on_loop() -> None:
        last = Moment.now()
        while not is_over.is_set():
            await asyncio.sleep(0.001)
            last = ticks.note(last)

    thread, task = threading.Thread(target=in_thread), asyncio.create_task(on_loop())
    thread.start()
    try:
        yield ticks
    finally:
        is_over.set()
        await task
        thread.join()


def filled(unit: bytes) -> bytes:
    return b"[" + b",".join([unit] * (ROOM // (len(unit) + 1))) + b"]"


def named() -> bytes:
    return b"{" + b",".join(b'"%x":1' % number for number in range(ROOM // 10)) + b"}"


def values() -> dict[str, bytes]:
    """What a field may be filled with; most of it is wrong for most fields."""
    text = b'"' + b"ab " * (ROOM // 3) + b'"'
    return {"text": text, "word": b'"' + b"a" * ROOM + b'"', "names": named()} | {
        name: filled(unit) for name, unit in LISTS.items()
    }


KINDS = itertools.cycle(values().items())


def is_long(schema: dict[str, Any]) -> bool:
    """Whether a field may hold much."""
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key, [])]
    return (
        any(map(is_long, parts))
        or bool({"$ref", "items"} & schema.keys())
        or schema.get("type") in ("object", "array")
        or (schema.get("type") == "string" and schema.get("maxLength", ROOM) >= ROOM)
    )


def bodies(schema: dict[str, Any], good: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Bodies at their limit: strange names, and each field that may be long filled with one of the values in turn."""
    yield "strange names", orjson.dumps(good)[:-1] + (b"," if good else b"") + named()[1:]
    for name, field in schema["properties"].items():
        if not is_long(field):
            continue
        rest = orjson.dumps({key: value for key, value in good.items() if key != name} | {ANY: 0})[
            :-1
        ]
        rest = rest.replace(b',"x":0', b"").replace(b'"x":0', b"")
        kind, value = next(KINDS)
        yield (
            f"{name}: {kind}",
            rest + (b"," if len(rest) > 1 else b"") + b'"%s":' % name.encode() + value + b"}",
        )


GOOD: dict[str, Any] = {
    "model": BASE,
    "prompt": "x",
    "messages": [{"role": "user", "content": "x"}],
    "input": "x",
    "tokens": [5],
    "name": "x",
    "max_tokens": 1,
    "lora_name": "x",
    "lora_path": "/x",
    "adapters": ["x"],
    "source": "x",
    "tenant": "x",
    "files": {},
    "input_file_id": "x",
    "endpoint": "/v1/completions",
    "completion_window": "24h",
}
"""Values of required fields by their names."""


@pytest.fixture
def interpreter() -> Iterator[None]:
    """The interpreter as servers set it."""
    thresholds, interval_s = gc.get_threshold(), sys.getswitchinterval()
    keep_interpreter_moving()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval_s)


@pytest.mark.usefixtures("interpreter")
async def test_no_body_at_its_limit_stops_the_others(api: Api) -> None:
    app = create_app(replace(api.services, ready=demo_ready(1 << 18)))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    page = app.openapi()
    key, too_long, count = await api.key("acme"), dict[str, float](), 0
    async with (
        new_client(key, "http://test", transport) as acme,
        new_client(ADMIN_KEY, "http://test", transport) as admin,
    ):
        for path, operations in page["paths"].items():
            for method, operation in operations.items():
                content = operation.get("requestBody", {}).get("content", {})
                if "application/json" not in content:
                    continue
                schema = page["components"]["schemas"][
                    content["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
                ]
                good = {name: GOOD[name] for name in schema.get("required", []) if name in GOOD}
                for kind, body in bodies(schema, good):
                    assert len(body) <= MIB
                    count += 1
                    for _ in range(TRIES):
                        async with ticking() as ticks:
                            for client in (acme, admin):
                                answer = await client.request(
                                    method,
                                    path.replace("{", "").replace("}", ""),
                                    content=body,
                                    headers={"content-type": "application/json"},
                                )
                                assert answer.status_code < 500, (path, kind, answer.text)
                                if answer.status_code not in (403, 404):
                                    break
                        if ticks.longest_s < LONGEST_S:
                            break
                    else:
                        too_long[f"{method} {path} {kind}"] = ticks.longest_s
    assert not too_long
    assert count > 60
