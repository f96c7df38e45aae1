"""Clients that leave, engines that die, servers that stop: everybody gets an answer and every page comes back."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from weft_server import DEMO_ADAPTERS, DEMO_MODEL, WeftServer, engine_pid, expected_answers, stream_events, weft_server

PATIENCE_S = 60.0
LONG: dict[str, Any] = {
    "model": DEMO_MODEL.name,
    "prompt": [5, 6, 7],
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 0,
}


def idle(server: WeftServer) -> bool:
    state = server.engine()
    return bool(state["running"] == 0 and state["waiting"] == 0 and state["pages"]["kv"] == 0)


def wait_for(what: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline_s, "still not so"
        time.sleep(0.02)


def cut_stream(server: WeftServer, key: str, after_lines: int) -> None:
    """Open a stream and drop the connection after some lines."""
    with (
        server.client(key) as client,
        client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer,
    ):
        for number, _ in enumerate(answer.iter_lines()):
            if number >= after_lines:
                return


def test_a_client_that_leaves_frees_its_pages(server: WeftServer) -> None:
    key = server.new_key("leavers") if server.tenant("leavers") else ""
    rng = random.Random(1)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: cut_stream(server, key, n), [rng.randint(0, 40) for _ in range(32)]))
    wait_for(lambda: idle(server))


def test_a_client_that_leaves_before_the_answer_frees_its_pages(server: WeftServer) -> None:
    client = server.tenant("leavers")
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=LONG, timeout=0.05)
    wait_for(lambda: idle(server))


def outcome(server: WeftServer, key: str, model: str) -> tuple[str, int]:
    """Run one long stream: how it ended, and the completion tokens that arrived."""
    body = {**LONG, "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "model": model}
    tokens = 0
    try:
        with server.client(key) as client:
            for event in stream_events(client, "/v1/completions", body):
                if event == "[DONE]":
                    return "done", tokens
                assert isinstance(event, dict)
                if "error" in event:
                    return str(event["error"]["code"]), tokens
                tokens = event["usage"]["completion_tokens"] if event.get("usage") else tokens
    except AssertionError as error:
        return str(error)[:3], 0
    return "cut", tokens


def test_killed_engine_is_answered_for_and_comes_back(tmp_path: Path) -> None:
    answers = expected_answers()
    question = answers["questions"][0]
    with weft_server(tmp_path) as server:
        assert server.upload(server.tenant("acme"), "pirate", DEMO_ADAPTERS / "pirate").status_code == 201
        key = server.tenants["acme"]
        with ThreadPoolExecutor(8) as pool:
            running = [pool.submit(outcome, server, key, model) for model in [DEMO_MODEL.name, "pirate"] * 4]
            wait_for(lambda: server.engine()["running"] >= 4)
            os.kill(engine_pid(server), signal.SIGKILL)
            ended = [job.result(timeout=60) for job in running]
        assert {how for how, _ in ended} <= {"engine_restarted", "503", "done"}
        assert any(how == "engine_restarted" for how, _ in ended)

        refused = server.tenant("acme").post("/v1/completions", json=LONG)
        assert refused.status_code in (200, 503)
        if refused.status_code == 503:
            assert int(refused.headers["retry-after"]) >= 1
        delivered = sum(tokens for _, tokens in ended)
        if refused.status_code == 200:
            delivered += refused.json()["usage"]["completion_tokens"]

        server.wait_ready()
        good = server.ask("acme", "pirate", question["question"])
        assert good["choices"][0]["message"]["content"] == question["answers"]["pirate"]
        delivered += good["usage"]["completion_tokens"]
        assert server.admin.get("/v1/usage").json()["totals"]["completion_tokens"] == delivered


def test_sigterm_finishes_what_runs_and_refuses_what_is_new(tmp_path: Path) -> None:
    with weft_server(tmp_path) as server:
        server.tenant("acme")
        key = server.tenants["acme"]
        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(outcome, server, key, DEMO_MODEL.name) for _ in range(4)]
            wait_for(lambda: server.engine()["running"] == 4)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
            refusals: list[int] = []
            if not all(job.done() for job in running):
                refusals = refused_while_draining(server, key)
            assert {job.result(timeout=40)[0] for job in running} == {"done"}
        assert server.process.wait(timeout=60) == 0
        assert all(status == 503 for status in refusals)


def refused_while_draining(server: WeftServer, key: str) -> list[int]:
    with server.client(key) as client:
        try:
            answer = client.post("/v1/completions", json=LONG)
        except httpx.TransportError:
            return []
    if answer.status_code == 503:
        assert int(answer.headers["retry-after"]) >= 1
    return [answer.status_code]


def test_a_drain_that_takes_too_long_ends_streams_with_an_error(tmp_path: Path) -> None:
    with weft_server(tmp_path, WEFT_SERVER__DRAIN_S="0.2") as server:
        server.tenant("acme")
        results: list[tuple[str, int]] = []
        threads = [
            threading.Thread(target=lambda: results.append(outcome(server, server.tenants["acme"], DEMO_MODEL.name)))
            for _ in range(24)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.engine()["running"] == len(threads))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
        for thread in threads:
            thread.join(timeout=60)
        assert {how for how, _ in results} <= {"server.draining", "503", "done"}
        assert any(how == "server.draining" for how, _ in results)
