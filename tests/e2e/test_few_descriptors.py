"""A server that may open few files, and strangers who open many connections."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from limited_server import HARD
from manylora_server import DEMO_ADAPTERS, engines, manylora_server

STRANGERS = 250


def test_idle_connections_keep_no_tenant_out_where_few_files_may_be_open(tmp_path: Path) -> None:
    settings: dict[str, object] = {"memory.gib": 0.1, "memory.host_gib": 0.05}
    with (
        manylora_server(tmp_path, program="limited_server", settings=settings) as server,
        ExitStack() as stack,
    ):
        for pid in (server.process.pid, engines(server)[0].pid):
            assert psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE) == (HARD, HARD)
        client = server.publish("acme", "pirate")
        address = urlsplit(server.url)
        for _ in range(STRANGERS):
            stack.enter_context(socket.create_connection((address.hostname, address.port or 0), 30))
        assert psutil.Process(server.process.pid).num_fds() < HARD - 32
        server.ask("acme", "pirate", "hello")
        with server.client(server.tenants["acme"]) as late:
            assert server.upload(late, "shout", DEMO_ADAPTERS / "shout").status_code == 201
            body = {"model": "shout", "prompt": "x", "max_tokens": 2}
            assert late.post("/v1/completions", json=body).status_code == 200
        assert client.get("/v1/adapters").status_code == 200
        assert "connections_give_way" in server.log.read_text()
