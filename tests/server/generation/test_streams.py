"""What only a socket shows: chunks as they come, clients that leave, slow clients, and the server's end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from api_server import ADMIN_KEY, BASE, Api, Client, connect, eventually, new_client
from api_server import api as open_api
from fake_engine import demo_tokenizer
from manylora.engine.request import GenerationRequest
from manylora.engine.sampling_params import SamplingParams
from manylora.engine.text.text_stream import TextStream
from manylora.server.generation import choices as generation
from manylora.server.generation import meter as metering
from manylora.server.generation.prompts import Prompt
from manylora.server.http.body import Pace
from manylora.server.http.wire import IS_CLOSING
from raw_http import head_of, upload_head

pytestmark = pytest.mark.anyio
LONG = {"model": BASE, "prompt": "x", "max_tokens": 200, "ignore_eos": True}


async def wait_until_idle(api: Api) -> None:
    await eventually(lambda: not api.engine.running and not api.services.drain.num_running)


def head(key: str, length: int, path: str = "/v1/completions", method: str = "POST") -> bytes:
    if (method, path) == ("POST", "/v1/adapters"):
        return upload_head(key, length)
    return head_of(method, path, key, Content_Type="application/json", Content_Length=str(length))


async def raw(url: str, data: bytes) -> bytes:
    reader, writer = await connect(url)
    try:
        writer.write(data)
        await writer.drain()
        return await asyncio.wait_for(reader.read(65536), 60)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("mark_s", "first", "most"), [(1e9, range(128, 150), 1), (0.0, range(1, 20), 199)]
)
async def test_a_stream_leaves_a_mark_each_so_many_tokens_or_seconds(
    api: Api, acme: Client, monkeypatch: pytest.MonkeyPatch, mark_s: float, first: range, most: int
) -> None:
    marks: list[int] = []
    monkeypatch.setattr(metering, "MARK_S", mark_s)
    monkeypatch.setattr(
        api.services.registry.usage, "progress", lambda event: marks.append(event.completion_tokens)
    )
    api.engine.token_s = 0.0001  # one by one
    answer = await acme.post("/v1/completions", json={**LONG, "stream": True})
    assert answer.text.count("data: {") == 200
    assert marks[0] in first
    assert 1 <= len(marks) <= most
    assert most == 1 or len(marks) > 20


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_its_request_and_pays_for_what_was_computed(
    api: Api, url: str, stream: bool
) -> None:
    api.engine.token_s = 0.005
    received = 0
    async with new_client(await api.key("acme"), url) as client:
        if stream:
            async with client.stream(
                "POST", "/v1/completions", json={**LONG, "stream": True}
            ) as answer:
                async for line in answer.aiter_lines():
                    received += line.startswith("data: {")
                    if received == 5:
                        break
        else:
            task = asyncio.create_task(client.post("/v1/completions", json=LONG))
            await eventually(
                lambda: any(work.output_tokens >= 5 for work in api.engine.work.values())
            )
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    await wait_until_idle(api)
    assert len(api.engine.aborted) == 1
    await the_bill(api)
    used = await api.usage_totals()
    (work,) = api.engine.work.values()
    assert used["requests"] == 1
    assert max(received, 5) <= used["completion_tokens"] == work.output_tokens < 200
    assert used["prompt_tokens"] == work.prompt_tokens == len(demo_tokenizer().encode("x"))


async def the_bill(api: Api) -> dict[str, Any]:
    """The one usage event. It follows the end of the engine's work, and tells nobody."""
    async with asyncio.timeout(60):
        while not (events := (await api.admin.get("/v1/usage/events")).json()["data"]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    (event,) = events
    return dict(event)


async def cut(api: Api, url: str, when: Callable[[], object], **fields: Any) -> dict[str, int]:
    """Leave a request that does not stream at a moment; returns what is billed then."""
    async with new_client(await api.key("acme"), url) as client:
        task = asyncio.create_task(client.post("/v1/completions", json={**LONG, **fields}))
        await eventually(when)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await wait_until_idle(api)
    event = await the_bill(api)
    assert event["status"] == "aborted"
    return {name: event[f"{name}_tokens"] for name in ("prompt", "cached", "completion")}


def work_of(api: Api) -> int:
    """Prompt tokens computed for the only request."""
    return sum(work.prompt_tokens for work in api.engine.work.values())


async def test_a_silent_engine_is_waited_for_in_bounds_and_what_it_said_is_billed(
    api: Api, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "LAST_OUTPUT_S", 0.05)
    api.engine.token_s, api.engine.is_silent = 0.01, True
    api.engine.cached = lambda _: 2
    billed = await cut(api, url, lambda: work_of(api), prompt=[7] * 20)
    (work,) = api.engine.work.values()
    assert 1 <= billed["completion"] <= work.output_tokens
    assert (billed["prompt"], billed["cached"]) == (20, 2)


async def test_an_engine_that_dies_before_it_answers_an_abort_is_not_waited_for(
    api: Api, url: str
) -> None:
    api.engine.token_s, api.engine.is_silent, api.engine.failure_after = 0.3, True, 4
    billed = await cut(api, url, lambda: work_of(api), prompt=[7] * 20)
    assert (billed["prompt"], billed["completion"]) == (20, 4)


async def test_a_client_that_left_before_the_engine_was_asked_gives_it_no_work(api: Api) -> None:
    prompt = Prompt(token_ids=[7, 8, 9])
    request = GenerationRequest(
        request_id="x", prompt_token_ids=prompt.token_ids, params=SamplingParams(max_tokens=5)
    )
    text = TextStream(demo_tokenizer(), request.params)
    run = generation.Generation(
        api.engine,
        [generation.Choice(index=0, prompt_index=0, prompt=prompt, request=request, text=text)],
    )
    run.cut(ClientDisconnect())
    async with run:
        with pytest.raises(ClientDisconnect):
            await anext(run.steps())
        await run.abort()
    (choice,) = run.choices
    assert (choice.prompt_tokens, choice.cached_tokens, choice.text.num_tokens) == (0, 0, 0)
    assert api.engine.requests == []


async def test_a_closing_connection_is_a_cut_before_the_event_loop_tells_so(api: Api) -> None:
    """Many tokens can come before the event loop gets to tell that the client is gone."""
    sent: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_or_drop(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
            elif len(sent) < 5:
                sent.append(message["body"])

        await api.app(
            {**scope, "state": {IS_CLOSING: lambda: len(sent) == 5}}, receive, send_or_drop
        )
        await send({"type": "http.response.body", "body": b"".join(sent)})

    async with new_client(
        await api.key("acme"), "http://test", httpx.ASGITransport(app=app)
    ) as client:
        answer = await client.post("/v1/completions", json={**LONG, "stream": True})
    assert answer.text.count("data: {") == 5
    (work,) = api.engine.work.values()
    assert 5 <= (await api.usage_totals())["completion_tokens"] == work.output_tokens < 200
    assert len(api.engine.aborted) == 1


async def test_what_came_during_a_write_is_written_together(api: Api) -> None:
    writes: list[bytes] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_slowly(message: Message) -> None:
            if message["type"] == "http.response.body":
                writes.append(message["body"])
                await asyncio.sleep(0.05)
            await send(message)

        await api.app(scope, receive, send_slowly)

    body = {
        **LONG,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    async with new_client(
        await api.key("acme"), "http://test", httpx.ASGITransport(app=app)
    ) as client:
        answer = await client.post("/v1/completions", json=body)
    events = [
        json.loads(line.removeprefix("data: "))
        for line in answer.text.splitlines()
        if line.startswith("data: {")
    ]
    assert [event["usage"]["completion_tokens"] for event in events if event["choices"]] == list(
        range(1, 201)
    )
    assert len(writes) < 100
    assert (await api.usage_totals())["completion_tokens"] == 200


async def test_a_content_length_over_the_limit_is_refused_unread(api: Api, url: str) -> None:
    key = await api.key("acme")
    for path, length in (
        ("/v1/completions", 2 << 20),
        ("/v1/adapters", 1 << 40),
        ("/v1/completions", 10**30),
    ):
        answer = await raw(url, head(key, length, path))
        assert answer.startswith((b"HTTP/1.1 413", b"HTTP/1.1 400")), answer


@pytest.mark.parametrize(
    ("path", "method", "sent", "expected"),
    [
        ("/v1/completions", "POST", b"{", b"request_timeout"),
        ("/v1/adapters", "POST", b"--b\r\n", b"upload.timeout"),
        ("/v1/tenants", "POST", b"{", b"request_timeout"),
        ("/v1/tenants/acme", "PATCH", b"{", b"request_timeout"),
        ("/v1/tenants/acme/keys", "POST", b"{", b"request_timeout"),
        ("/v1/adapters/x?tenant=acme", "PATCH", b"{", b"request_timeout"),
    ],
)
async def test_a_client_that_stalls_is_answered_408(
    tmp_path: Path, path: str, method: str, sent: bytes, expected: bytes
) -> None:
    async with open_api(tmp_path, pace=Pace(stall_s=0.2)) as api, api.listening() as url:
        own = await api.key("acme")
        key = own if path in ("/v1/completions", "/v1/adapters") else ADMIN_KEY
        async with asyncio.timeout(Pace().stall_s / 2):
            answer = await raw(url, head(key, 5000, path, method) + sent)
        assert answer.startswith(b"HTTP/1.1 408"), answer
        assert expected in answer
        assert api.files() == []


async def test_a_client_that_trickles_is_answered_408(tmp_path: Path) -> None:
    async with (
        open_api(tmp_path, pace=Pace(grace_s=0.1, bytes_per_s=1e6)) as api,
        api.listening() as url,
    ):
        reader, writer = await connect(url)
        writer.write(head(await api.key("acme"), 900))
        reading = asyncio.create_task(reader.read(100))
        while not reading.done():
            writer.write(b" ")
            await asyncio.sleep(0.02)
        assert (await reading).startswith(b"HTTP/1.1 408")
        writer.close()


async def test_draining_refuses_new_requests_and_lets_running_ones_finish(
    api: Api, url: str
) -> None:
    api.engine.token_s = 0.01
    async with new_client(await api.key("acme"), url) as client:
        running = asyncio.create_task(
            client.post("/v1/completions", json={**LONG, "max_tokens": 30})
        )
        await eventually(lambda: api.engine.running)
        draining = asyncio.create_task(api.services.drain.drain(60))
        await eventually(lambda: api.services.drain.is_draining)
        refused = await client.post("/v1/completions", json=LONG)
        ready = await client.get("/ready")
        assert (await client.get("/health")).status_code == 200
        answer = await running
    assert refused.status_code == ready.status_code == 503
    assert refused.json()["error"]["code"] == ready.json()["error"]["code"] == "server.draining"
    assert int(refused.headers["retry-after"]) >= 1
    assert answer.status_code == 200
    assert await draining == 0


async def test_draining_ends_what_takes_too_long_with_an_error_event(api: Api, url: str) -> None:
    api.engine.token_s = 0.02
    events: list[Any] = []
    async with new_client(await api.key("acme"), url) as client:
        waiting = asyncio.create_task(client.post("/v1/completions", json=LONG))
        async with client.stream(
            "POST", "/v1/completions", json={**LONG, "stream": True}
        ) as answer:
            await eventually(lambda: len(api.engine.running) == 2)
            draining = asyncio.create_task(api.services.drain.drain(0.3))
            async for line in answer.aiter_lines():
                events += [line.removeprefix("data: ")] if line.startswith("data: ") else []
        assert await draining == 2
        whole = await waiting
    assert json.loads(events[-1])["error"]["code"] == "server.draining"
    assert whole.status_code == 503
    assert len(api.engine.aborted) == 2
    api.services.drain.is_draining = False
    assert (await api.usage_totals())["completion_tokens"] == len(events) - 1
