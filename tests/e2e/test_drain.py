"""A server that is asked to stop: running requests end with an answer or an error, and new ones are refused."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from idleness import PATIENCE_S, wait_until
from manylora_server import DEMO_MODEL, ManyloraServer, manylora_server, stream_events

LONG: dict[str, Any] = {
    "model": DEMO_MODEL.name,
    "prompt": [5, 6, 7],
    "max_tokens": 400,
    "ignore_eos": True,
}


def outcome(server: ManyloraServer) -> str:
    """How a long stream ended: done, the code of an error, or cut."""
    with server.client(server.tenants["acme"]) as client:
        for event in stream_events(client, "/v1/completions", LONG):
            if event == "[DONE]":
                return "done"
            if isinstance(event, dict) and "error" in event:
                return str(event["error"]["code"])
    return "cut"


@contextmanager
def streams(server: ManyloraServer, count: int) -> Iterator[list[Future[str]]]:
    """So many streams, once all of them run."""
    server.tenant("acme")
    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(outcome, server) for _ in range(count)]
        wait_until(lambda: server.engine()["running"] == count)
        yield running


def test_sigterm_finishes_what_runs_and_refuses_what_is_new(tmp_path: Path) -> None:
    with manylora_server(tmp_path) as server:
        with streams(server, 4) as running:
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
            refused = None if all(job.done() for job in running) else new_answer(server)
            assert {job.result(timeout=PATIENCE_S) for job in running} == {"done"}
        assert server.process.wait(timeout=PATIENCE_S) == 0
        assert "Traceback" not in server.log.read_text()
        if refused is not None:
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1


def new_answer(server: ManyloraServer) -> httpx.Response | None:
    """None where the server takes no connections any more."""
    with server.client(server.tenants["acme"]) as client:
        try:
            return client.post("/v1/completions", json=LONG)
        except httpx.TransportError:
            return None


def test_a_drain_that_takes_too_long_ends_streams_with_an_error(tmp_path: Path) -> None:
    with manylora_server(tmp_path, MANYLORA_SERVER__DRAIN_S="0.2") as server:
        with streams(server, 24) as running:
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=PATIENCE_S) == 0
            ends = {job.result(timeout=PATIENCE_S) for job in running}
        assert ends <= {"server.draining", "done"}
        assert "server.draining" in ends
