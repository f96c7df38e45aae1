"""A server that is paused and goes on, with a real engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from idleness import PATIENCE_S, wait_until
from manylora_server import DEMO_MODEL, ManyloraServer, stream_events

BODY: dict[str, Any] = {
    "model": DEMO_MODEL.name,
    "prompt": [5, 6, 7],
    "temperature": 0,
    "ignore_eos": True,
}
LONG = BODY | {"max_tokens": 900, "return_token_ids": True}
SHORT = BODY | {"max_tokens": 2}


@pytest.fixture(autouse=True)
def resumed(server: ManyloraServer) -> Iterator[None]:
    server.tenant("acme")
    yield
    assert server.admin.post("/resume").status_code == 200
    wait_until(lambda: server.engine()["running"] == server.engine()["waiting"] == 0)


class Stream:
    """A long stream, read in a thread."""

    def __init__(self, server: ManyloraServer, pool: ThreadPoolExecutor) -> None:
        self.tokens: list[int] = []
        self.error: str | None = None
        self._server = server
        self.done: Future[None] = pool.submit(self._read)

    def _read(self) -> None:
        with self._server.client(self._server.tenants["acme"]) as client:
            for event in stream_events(client, "/v1/completions", LONG):
                if isinstance(event, dict) and "error" in event:
                    self.error = event["error"]["code"]
                elif isinstance(event, dict):
                    self.tokens += event["choices"][0]["token_ids"]


def ask(server: ManyloraServer, **headers: str) -> httpx.Response:
    with server.client(server.tenants["acme"]) as client:
        return client.post("/v1/completions", json=SHORT, headers=headers)


def test_kept_streams_stand_still_and_go_on_with_the_same_tokens(server: ManyloraServer) -> None:
    with ThreadPoolExecutor() as pool:
        whole = Stream(server, pool)
        whole.done.result(PATIENCE_S)
        kept = Stream(server, pool)
        wait_until(lambda: len(kept.tokens) > 5)
        assert server.admin.post("/pause?mode=keep").json() == {"status": "paused"}
        wait_until(lambda: server.engine()["pause"] == "keep")
        time.sleep(0.5)  # what was on its way has come
        num_tokens, steps = len(kept.tokens), server.engine()["num_steps"]
        assert num_tokens < 900
        later, late = (
            pool.submit(ask, server),
            pool.submit(ask, server, **{"x-manylora-ttft-ms": "300"}),
        )
        expired = late.result(PATIENCE_S)
        assert (expired.status_code, expired.json()["error"]["code"]) == (503, "deadline.queue")
        status = server.engine()
        assert (len(kept.tokens), status["num_steps"], status["running"]) == (num_tokens, steps, 1)
        assert not later.done()
        assert server.admin.get("/ready").json() == {"status": "paused"}
        server.admin.post("/resume")
        assert later.result(PATIENCE_S).status_code == 200
        kept.done.result(PATIENCE_S)
        assert kept.tokens == whole.tokens
        assert len(kept.tokens) == 900


def test_a_pause_that_waits_answers_when_streams_have_ended(server: ManyloraServer) -> None:
    with ThreadPoolExecutor() as pool:
        running = Stream(server, pool)
        wait_until(lambda: len(running.tokens) > 5)
        assert server.admin.post("/pause?mode=wait").status_code == 200
        running.done.result(PATIENCE_S)
        assert (len(running.tokens), running.error) == (900, None)
        assert server.engine()["running"] == 0


def test_an_abort_ends_streams_and_waiting_requests(server: ManyloraServer) -> None:
    with ThreadPoolExecutor() as pool:
        running = Stream(server, pool)
        wait_until(lambda: len(running.tokens) > 5)
        assert server.admin.post("/pause").status_code == 200
        running.done.result(PATIENCE_S)
        assert running.error == "server.paused"
        waiting = pool.submit(ask, server)
        wait_until(lambda: server.engine()["waiting"] == 1)
        assert server.admin.post("/pause").status_code == 200
        refused = waiting.result(PATIENCE_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server.paused")
        assert "retry-after" in refused.headers
        assert server.engine()["pages"]["kv"] == 0


def test_a_reset_cache_has_nothing_for_the_next_request(server: ManyloraServer) -> None:
    body = BODY | {"prompt": [9] * 200, "max_tokens": 1}
    client = server.tenant("acme")

    def cached() -> int:
        answer = client.post("/v1/completions", json=body)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0
    assert cached() > 100
    assert server.admin.post("/reset_prefix_cache").json() == {"success": True}
    assert server.engine()["pages"]["prefix"] == 0
    assert cached() == 0
