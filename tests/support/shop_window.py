"""A small OpenAI-shaped server over a real socket, for what sends loads."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN_DELAY_S = 0.01


class ShopWindow(ThreadingHTTPServer):
    """Answers completions with numbered tokens; `fault` spoils every answer in one way."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Visit)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.fault = ""
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.authorizations: set[str] = set()
        self.connections = self.in_flight = self.most_in_flight = 0
        self.counting = threading.Lock()

    def handle_error(self, *_: object) -> None:
        """A client that leaves is no error."""


class Visit(BaseHTTPRequestHandler):
    """One connection."""

    server: ShopWindow
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    has_answered = False

    def setup(self) -> None:
        super().setup()
        with self.server.counting:
            self.server.connections += 1

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.counting:
            self.server.bodies.append(body)
            self.server.paths.append(self.path)
            self.server.authorizations.add(self.headers.get("Authorization", ""))
            self.server.in_flight += 1
            self.server.most_in_flight = max(self.server.most_in_flight, self.server.in_flight)
        try:
            self.answer(body, self.server.fault)
        finally:
            with self.server.counting:
                self.server.in_flight -= 1

    def answer(self, body: dict[str, Any], fault: str) -> None:
        if fault == "unanswered" or (fault == "one answer" and self.has_answered):
            self.close_connection = True
            return
        self.has_answered = True
        if fault == "503":
            self.wfile.write(
                b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 7\r\nContent-Length: 4\r\n\r\nbusy"
            )
            return
        if fault == "no http":
            self.wfile.write(b"220 mail.example ESMTP\r\n\r\n")
            return
        is_chunked = fault != "no length"
        head = b"Transfer-Encoding: chunked\r\n" if is_chunked else b""
        head += b"Connection: close\r\n" if fault == "close" else b""
        self.wfile.write(b"HTTP/1.1 200 OK\r\n%b\r\n" % head)
        for event in self.events(body):
            if event is None:
                self.close_connection = True
                return
            payload = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
            half = len(payload) // 2
            for piece in (payload[:half], payload[half:]):
                self.wfile.write(
                    f"{len(piece):x}\r\n".encode() + piece + b"\r\n" if is_chunked else piece
                )
            time.sleep(TOKEN_DELAY_S)
        if is_chunked:
            self.wfile.write(b"0\r\n\r\n" + b"HTTP/1.1 200 OK\r\n" * (fault == "more"))
        else:
            self.close_connection = True

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any] | str | None]:
        fault, wanted = self.server.fault, body["max_tokens"]
        is_chat = "messages" in body
        if is_chat:
            yield {"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]}
        for i in range(wanted):
            if fault == "cut" and i == 1:
                yield None
            if fault == "error event" and i == 1:
                yield {"error": {"message": "engine restarted"}}
                return
            text = {"delta": {"content": f"t{i}"}} if is_chat else {"text": f"t{i}"}
            yield {
                "choices": [
                    {"index": 0, "finish_reason": "length" if i + 1 == wanted else None, **text}
                ]
            }
        prompt = body["messages"][0]["content"].split() if is_chat else body["prompt"]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": wanted - (fault == "short")}
        if fault != "no usage":
            yield {"choices": [], "usage": usage}
        if fault != "no end":
            yield "[DONE]"


@contextmanager
def shop_window() -> Iterator[ShopWindow]:
    """Serve until the block is left."""
    with ShopWindow() as window:
        threading.Thread(target=window.serve_forever, args=(0.01,)).start()
        try:
            yield window
        finally:
            window.shutdown()
