"""What a socket may send before anybody knows who it is: little, and not slowly."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from api_server import BASE, Api, connect, eventually, new_client
from manylora.server.http.wire import MAX_HEAD_BYTES, BoundedProtocol
from raw_http import head_of

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Both event loops: the server takes the one that is there."""
    return "asyncio", {"use_uvloop": request.param}


HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"


async def exchange(url: str, *pieces: bytes) -> tuple[bytes, dict[str, dict[str, str]]]:
    """Send, and read until the server closes; the status line, and the body as JSON."""
    reader, writer = await connect(url)
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
    answer = b""
    with contextlib.suppress(ConnectionError):
        answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0], json.loads(body or b"{}")


@pytest.mark.parametrize(
    "pieces",
    [
        (HEAD + b"".join(b"X-%d: y\r\n" % number for number in range(3000)) + b"\r\n",),
        (HEAD + b"X: ", *[b"y" * 8192] * 8),
        (b"GET /health?", *[b"y" * 8192] * 8),
        (b"GET /health?" + b"y" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n",),
        (b"\r\n" * MAX_HEAD_BYTES,),
    ],
    ids=["many headers", "an endless header", "an endless path", "a long path", "empty lines"],
)
async def test_a_long_head_is_431_and_the_end(url: str, pieces: tuple[bytes, ...]) -> None:
    status, body = await exchange(url, *pieces)
    assert status == b"HTTP/1.1 431 Request Header Fields Too Large"
    assert body["error"]["code"] == "headers_too_large"
    assert str(MAX_HEAD_BYTES) in body["error"]["message"]


@pytest.mark.parametrize("endless", [b"0\r\nX: ", b"1;x="], ids=["trailer", "chunk extension"])
async def test_what_surrounds_a_chunk_is_bounded_too(api: Api, url: str, endless: bytes) -> None:
    head = head_of("POST", "/v1/completions", await api.key("acme"), Transfer_Encoding="chunked")
    await asyncio.wait_for(exchange(url, head, endless, *[b"y" * 65536] * 16), 60)


async def test_a_head_up_to_the_limit_and_long_bodies_pass(api: Api, url: str) -> None:
    async with new_client(await api.key("acme"), url) as client:
        for _ in range(2):
            wide = await client.get("/v1/models", headers={"x-wide": "y" * (MAX_HEAD_BYTES - 1024)})
            assert wide.status_code == 200
            body = {
                "model": BASE,
                "prompt": "x",
                "max_tokens": 2,
                "metadata": {"long": "y" * 20 * MAX_HEAD_BYTES},
            }
            assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_what_is_not_http_gets_an_error_in_the_usual_shape(url: str) -> None:
    status, body = await exchange(url, b"\x16\x03\x01\x02\x00\x01\r\n\r\n")
    assert (status, body["error"]["code"]) == (b"HTTP/1.1 400 Bad Request", "invalid_http")


async def test_a_head_has_its_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "head_s", 0.5)
    status, body = await exchange(url, HEAD)
    assert (status, body["error"]["code"]) == (b"HTTP/1.1 408 Request Timeout", "request_timeout")
    assert await exchange(url) == (b"", {})
    status, _ = await exchange(url, HEAD + b"\r\n" + HEAD)
    assert status == b"HTTP/1.1 200 OK"


async def test_the_time_of_a_head_does_not_run_for_what_follows_it(
    api: Api, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "head_s", 0.5)
    async with new_client(await api.key("acme"), url) as client:
        for _ in range(2):
            assert (await client.get("/health")).status_code == 200
            await asyncio.sleep(0.8)
        body = {"model": BASE, "prompt": "x", "max_tokens": 64, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            await asyncio.sleep(0.8)
            assert (await answer.aread()).endswith(b"data: [DONE]\n\n")
    await eventually(lambda: not api.services.drain.num_running)


@pytest.mark.parametrize("framing", ["Content-Length: 1073741824", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("who", ["nobody", "somebody wrong", "somebody who may not"])
async def test_of_a_gigabyte_that_is_refused_little_is_read(
    api: Api, url: str, who: str, framing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"nobody": "", "somebody wrong": "manylora_0123456789ab_" + "x" * 43}
    key = keys.get(who) or await api.key("acme", "infer")
    credential = f"Authorization: Bearer {key}\r\n" if who != "nobody" else ""
    head = f"POST /v1/adapters HTTP/1.1\r\nHost: x\r\n{credential}{framing}\r\n\r\n".encode()
    piece = b"x" * 65536 if "Length" in framing else b"10000\r\n" + b"x" * 65536 + b"\r\n"
    taken = 0
    whole = BoundedProtocol.data_received

    def data_received(self: BoundedProtocol, data: bytes) -> None:
        nonlocal taken
        taken += len(data)
        whole(self, data)

    monkeypatch.setattr(BoundedProtocol, "data_received", data_received)
    reader, writer = await connect(url)
    writer.write(head)
    answer = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
    with contextlib.suppress(ConnectionError):
        for _ in range(1 << 14):
            writer.write(piece)
            await writer.drain()
    refusal = await asyncio.wait_for(answer, 60)
    writer.close()
    assert refusal.split()[1] == (b"403" if who.endswith("may not") else b"401")
    assert (b"connection: close" in refusal.lower()) or who.endswith("may not")
    # One read takes what came before anybody looked. Behind the answer to a known key a little more is dropped.
    assert taken <= (64 << 10 if who != "somebody who may not" else 192 << 10)
    assert api.files() == []
