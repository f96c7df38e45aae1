"""A small OpenAI-shaped server over a real socket, for what sends loads."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

TOKEN_DELAY_S = 0.01


@dataclass
class ShopWindow:
    """Answers completions with numbered tokens; `fault` spoils every answer in one way."""

    url: str = ""
    fault: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    authorizations: set[str] = field(default_factory=set)
    connections: int = 0
    in_flight: int = 0
    most_in_flight: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                await self.answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = json.loads(await reader.readexactly(int(headers["Content-Length"])))
        self.bodies.append(body)
        self.paths.append(head.split(" ")[1])
        self.authorizations.add(headers.get("Authorization", ""))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await self.write_answer(writer, body)
        finally:
            self.in_flight -= 1

    async def write_answer(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        if self.fault == "503":
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 7\r\nContent-Length: 4\r\n\r\nbusy")
            return
        if self.fault == "no http":
            writer.write(b"220 mail.example ESMTP\r\n\r\n")
            return
        is_chunked = self.fault != "no length"
        head = b"Transfer-Encoding: chunked\r\n" if is_chunked else b""
        head += b"Connection: close\r\n" if self.fault == "close" else b""
        writer.write(b"HTTP/1.1 200 OK\r\n%b\r\n" % head)
        for event in self.events(body):
            if event is None:
                writer.close()
                return
            payload = (
                f"data: {event if isinstance(event, str) else json.dumps(event, separators=(',', ':'))}\n\n".encode()
            )
            half = len(payload) // 2
            for piece in (payload[:half], payload[half:]):
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" if is_chunked else piece)
            await writer.drain()
            await asyncio.sleep(TOKEN_DELAY_S)
        if is_chunked:
            writer.write(b"0\r\n\r\n" + b"HTTP/1.1 200 OK\r\n" * (self.fault == "more"))
        else:
            writer.close()

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any] | str | None]:
        wanted = body["max_tokens"]
        is_chat = "messages" in body
        if is_chat:
            yield {"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]}
        for i in range(wanted):
            if self.fault == "cut" and i == 1:
                yield None
            if self.fault == "error event" and i == 1:
                yield {"error": {"message": "engine restarted"}}
                return
            text = {"delta": {"content": f"t{i}"}} if is_chat else {"text": f"t{i}"}
            yield {"choices": [{"index": 0, "finish_reason": "length" if i + 1 == wanted else None, **text}]}
        prompt = body["messages"][0]["content"].split() if is_chat else body["prompt"]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": wanted - (self.fault == "short")}
        if self.fault != "no usage":
            yield {"choices": [], "usage": usage}
        if self.fault != "no end":
            yield "[DONE]"


@contextmanager
def shop_window() -> Iterator[ShopWindow]:
    """Serve until the block is left."""
    window = ShopWindow()
    started = threading.Event()
    stopping: list[Any] = []

    async def run() -> None:
        stop = asyncio.Event()
        listener = await asyncio.start_server(window.serve, "127.0.0.1", 0)
        window.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
        stopping.extend([asyncio.get_running_loop(), stop])
        started.set()
        await stop.wait()
        listener.close()

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert started.wait(10)
    try:
        yield window
    finally:
        loop, stop = stopping
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
