"""A small HTTP server that is not Manylora."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Recorder:
    """A server that answers what a test says and remembers what it was asked."""

    def __init__(self) -> None:
        self.status, self.body = 200, {"object": "list", "data": [], "next": None, "totals": {}}  # type: Any, Any
        self.headers = {"content-type": "application/json"}
        self.pages: list[Any] = []
        """Bodies of the next answers, before `body`."""
        self.calls: list[tuple[str, str, str | None, bytes]] = []
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                sent = self.rfile.read(int(self.headers.get("content-length") or 0))
                recorder.calls.append(
                    (self.command, self.path, self.headers.get("authorization"), sent)
                )
                body = recorder.pages.pop(0) if recorder.pages else recorder.body
                text = body if isinstance(body, str) else json.dumps(body)
                payload = b"" if recorder.status == 204 else text.encode()
                self.send_response(recorder.status)
                for name, value in recorder.headers.items():
                    self.send_header(name, value)
                if recorder.pages:
                    self.send_header("x-manylora-next", "n")
                self.send_header("content-length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815 - names of http.server

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
