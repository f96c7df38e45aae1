"""What a running server shows of its memory: where adapters are, what is pinned, and which tokens were cached."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from idleness import wait_until
from manylora_server import (
    DEMO_ADAPTERS,
    DEMO_MODEL,
    MANYLORA,
    ManyloraServer,
    engines,
    manylora_server,
    stream_events,
)

BASE = DEMO_MODEL.name
PROMPT = [6 + index % 600 for index in range(200)]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyloraServer]:
    """A server with the adapters `pirate` and `shout` of tenant `acme`, which nobody has asked for."""
    with manylora_server(tmp_path_factory.mktemp("seen"), "--memory-gib", "0.1") as server:
        for name in ("pirate", "shout"):
            assert (
                server.upload(server.tenant("acme"), name, DEMO_ADAPTERS / name).status_code == 201
            )
        yield server


def complete(server: ManyloraServer, tenant: str, model: str, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, **fields}
    answer = server.tenant(tenant).post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def metric(server: ManyloraServer, name: str, **labels: str) -> float:
    families = text_string_to_metric_families(server.admin.get("/metrics").text)
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def test_a_pin_brings_an_adapter_to_the_device_before_its_first_request(
    fresh: ManyloraServer,
) -> None:
    client = fresh.tenant("acme")
    assert client.get("/v1/adapters/pirate").json()["residency"] == "stored"
    assert client.patch("/v1/adapters/pirate", json={"pinned": True}).json()["pinned"]
    wait_until(lambda: client.get("/v1/adapters/pirate").json()["residency"] == "device")
    answer = client.post(
        "/v1/completions", json={"model": "pirate", "prompt": "x", "max_tokens": 1}
    )
    assert answer.headers["x-manylora-adapter-state"] == "device"
    unasked = client.post(
        "/v1/completions", json={"model": "shout", "prompt": "x", "max_tokens": 1}
    )
    assert unasked.headers["x-manylora-adapter-state"] == "stored"


@pytest.mark.parametrize("model", [BASE, "pirate"])
def test_a_prompt_sent_again_is_cached_for_its_tenant_alone(
    fresh: ManyloraServer, model: str
) -> None:
    if model == "pirate":
        assert fresh.upload(
            fresh.tenant("rival"), "pirate", DEMO_ADAPTERS / "pirate"
        ).status_code in (200, 201)
    cold = complete(fresh, "acme", model)
    page_tokens = fresh.engine()["ready"]["geometry"]["page_tokens"]
    expected = (len(PROMPT) - 1) // page_tokens * page_tokens
    before = {
        name: metric(fresh, f"manylora_prefix_cache_{name}_total") for name in ("queries", "hits")
    }
    billed = metric(fresh, "manylora_tokens_total", kind="cached", tenant="acme")
    warm = complete(fresh, "acme", model)
    assert (cached(cold), cached(warm)) == (0, expected)
    assert warm["usage"]["prompt_tokens"] == len(PROMPT)
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    assert metric(fresh, "manylora_prefix_cache_hits_total") - before["hits"] == expected
    assert metric(fresh, "manylora_prefix_cache_queries_total") > before["queries"]
    assert metric(fresh, "manylora_tokens_total", kind="cached", tenant="acme") - billed == expected
    foreign = complete(fresh, "rival", model)
    assert cached(foreign) == 0
    assert foreign["choices"][0]["text"] == cold["choices"][0]["text"]


def test_streams_chats_and_choices_report_cached_tokens(fresh: ManyloraServer) -> None:
    prompt = [6 + (7 * index) % 600 for index in range(150)]
    client = fresh.tenant("acme")
    many = complete(fresh, "acme", BASE, prompt=[prompt], n=3)
    assert cached(many) == 0, (
        "choices find what the first computed, which is no discount on the prompt"
    )
    body = {
        "model": BASE,
        "prompt": prompt,
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage = [
        event for event in stream_events(client, "/v1/completions", body) if isinstance(event, dict)
    ][-1]
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    messages = [{"role": "user", "content": "Where is my order? " * 20}]
    chat = {"model": BASE, "messages": messages, "max_tokens": 4, "temperature": 0}
    first, second = (client.post("/v1/chat/completions", json=chat).json() for _ in range(2))
    assert cached(first) < cached(second) < second["usage"]["prompt_tokens"]
    totals = fresh.admin.get("/v1/usage?tenant=acme").json()["totals"]
    assert totals["cached_tokens"] == metric(
        fresh, "manylora_tokens_total", kind="cached", tenant="acme"
    )


def test_fit_plans_what_serve_then_has(fresh: ManyloraServer) -> None:
    engine = fresh.engine()
    body = {"adapters": ["pirate", "shout"]}
    answer = fresh.tenant("acme").post("/v1/adapters:fit", json=body).json()
    gib = engine["ready"]["memory"]["arena_bytes"] / (1 << 30)
    folders = [str(Path(DEMO_ADAPTERS) / name) for name in ("pirate", "shout")]
    command = [
        *MANYLORA,
        "fit",
        "--model",
        str(DEMO_MODEL),
        "--memory-gib",
        repr(gib),
        *folders,
        "--json",
    ]
    planned = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    )
    for part in ("pages", "slots", "kv_tokens_left", "fits"):
        assert planned[part] == answer[part]
    assert [item["waste"] for item in planned["adapters"]] == [
        item["waste"] for item in answer["adapters"]
    ]
    assert [item["digest"] for item in planned["adapters"]] == [
        item["digest"] for item in answer["adapters"]
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="the files that a process has mapped")
def test_the_engine_has_torch_and_the_api_which_computes_nothing_does_not(
    fresh: ManyloraServer,
) -> None:
    api, (engine,) = psutil.Process(fresh.process.pid), engines(fresh)
    files = [
        {Path(mapped.path).name for mapped in process.memory_maps()} for process in (api, engine)
    ]
    assert ["libtorch_cpu.so" in each for each in files] == [False, True]
    assert "PyTorch" not in fresh.log.read_text()
