"""After mixed traffic of several tenants, the usage API equals what the clients were told."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from weft_server import DEMO_ADAPTERS, DEMO_MODEL, WeftServer, engine_pid, stream_events, weft_server

NUM_REQUESTS = 500
BASE = DEMO_MODEL.name
FIGURES = ("requests", "prompt_tokens", "completion_tokens", "cached_tokens")
TENANTS = ("acme", "globex", "initech")


def one_request(
    client: httpx.Client, tenant: str, rng: random.Random, models: tuple[str, ...] = ("base", "pirate", "shout")
) -> tuple[tuple[str, str], Counter[str]]:
    """Send a random good request; returns tenant, model and usage as the client saw them."""
    model = rng.choice(models)
    body: dict[str, Any] = {
        "model": BASE if model == "base" else model,
        "max_tokens": rng.randint(1, 12),
        "temperature": rng.choice([0, 1]),
        "n": rng.choice([1, 1, 2]),
        "ignore_eos": rng.random() < 0.3,
        "stop": rng.choice([None, "e", ["zz", "a"]]),
    }
    path = "/v1/completions"
    if rng.random() < 0.5:
        body["prompt"] = rng.choice(["hello", [5, 6, 7], [[5, 6], [7]], "when do you open?"])
    else:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": rng.choice(["hello", "where is my order"])}]
    if rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
        events = list(stream_events(client, path, body))
        usage = next(event["usage"] for event in reversed(events) if isinstance(event, dict) and event.get("usage"))
    else:
        answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached <= usage["prompt_tokens"]
    seen = Counter({"requests": 1, "cached_tokens": cached, **{kind: usage[kind] for kind in FIGURES[1:3]}})
    return (tenant, model), seen


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with weft_server(tmp_path_factory.mktemp("usage")) as server:
        for tenant in TENANTS:
            for name in ("pirate", "shout"):
                assert server.upload(server.tenant(tenant), name, DEMO_ADAPTERS / name).status_code == 201
        expected: dict[tuple[str, str], Counter[str]] = {}
        clients = {tenant: server.tenant(tenant) for tenant in TENANTS}
        rng = random.Random(7)
        jobs = [(rng.choice(TENANTS), random.Random(seed)) for seed in range(NUM_REQUESTS)]
        with ThreadPoolExecutor(16) as pool:
            for key, seen in pool.map(lambda job: one_request(clients[job[0]], *job), jobs):
                expected[key] = expected.get(key, Counter()) + seen
        yield server, expected


def figures(row: dict[str, Any]) -> dict[str, int]:
    return {key: row[key] for key in FIGURES}


def total(rows: Any) -> dict[str, int]:
    return {key: sum(row[key] for row in rows) for key in FIGURES}


def test_totals_equal_the_sum_of_what_clients_saw(traffic: tuple[WeftServer, dict[Any, Counter[str]]]) -> None:
    server, expected = traffic
    usage = server.admin.get("/v1/usage").json()
    assert figures(usage["totals"]) == total(expected.values())
    assert usage["totals"]["requests"] == NUM_REQUESTS


def test_each_tenant_and_adapter_has_its_own_figures(traffic: tuple[WeftServer, dict[Any, Counter[str]]]) -> None:
    server, expected = traffic
    rows = server.admin.get("/v1/usage", params={"group_by": "tenant,adapter"}).json()["data"]
    got = {(row["tenant"], row["adapter"] or "base"): figures(row) for row in rows}
    assert got == {key: figures(seen) for key, seen in expected.items()}


def test_a_months_quota_knows_what_was_billed_before_the_server_and_the_engine_were_killed(tmp_path: Path) -> None:
    endless = {"model": BASE, "prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": True, "stream": True}

    def used(server: WeftServer, key: str) -> dict[str, int]:
        with server.client(key) as client:
            me = client.get("/v1/me").json()
        assert me["used"]["tenant"].items() >= me["used"]["key"].items()
        return dict(me["used"]["key"])

    with weft_server(tmp_path) as server:
        server.tenant("acme")
        key = server.new_key("acme", limits={"tokens_per_month": 100_000, "concurrent_requests": 4})
        with server.client(key) as client:
            one_request(client, "acme", random.Random(1), ("base",))
            with client.stream("POST", "/v1/completions", json=endless) as answer:
                lines = answer.iter_lines()
                next(lines)
                assert used(server, key)["concurrent_requests"] == 1
                os.kill(engine_pid(server), signal.SIGKILL)
                assert any("error" in line for line in lines)
        now = used(server, key)
        totals = server.admin.get("/v1/usage").json()["totals"]
        assert now["concurrent_requests"] == 0
        assert now["tokens_per_month"] == totals["prompt_tokens"] + totals["completion_tokens"] > 3
        server.process.kill()
        server.process.wait()
    with weft_server(tmp_path) as server:
        assert used(server, key)["tokens_per_month"] == now["tokens_per_month"]
