"""A server with little room: what can never be served is refused with the numbers, and what cannot now, with a time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from weft_server import DEMO_ADAPTERS, DEMO_MODEL, WeftServer, weft_server

PAGES = 70
PAGE_BYTES = 16 * 1024
SETTINGS = {
    "memory.gib": PAGES * PAGE_BYTES / (1 << 30),
    "scheduler.max_running": 1,
    "scheduler.max_waiting": 2,
    "server.max_upload_bytes": 150_000,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WeftServer]:
    arguments = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    with weft_server(tmp_path_factory.mktemp("limits"), "--dtype", "bfloat16", *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def acme(server: WeftServer) -> httpx.Client:
    client = server.tenant("acme")
    assert server.upload(client, "json", DEMO_ADAPTERS / "json").status_code == 201
    return client


def completion(client: httpx.Client, model: str, prompt_tokens: int, max_tokens: int) -> httpx.Response:
    body = {"model": model, "prompt": [7] * prompt_tokens, "max_tokens": max_tokens, "ignore_eos": True}
    return client.post("/v1/completions", json=body)


def test_a_request_that_no_empty_pool_could_hold_beside_its_adapter_is_refused_with_the_numbers(
    server: WeftServer, acme: httpx.Client
) -> None:
    longest = min(server.engine()["ready"]["max_model_len"], 16 * (PAGES - 2))
    assert completion(acme, "json", 8, 8).status_code == 200
    assert completion(acme, DEMO_MODEL.name, longest - 8, 8).status_code == 200
    pages = acme.get("/v1/adapters/json").json()["pages"]
    if longest <= 16 * (PAGES - 1 - pages):
        pytest.fail("the pool is too roomy for this test")
    refused = completion(acme, "json", longest - 8, 8)
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["code"] == "request_too_large"
    assert str(pages) in refused.json()["error"]["message"]
    assert completion(acme, "json", 8, 8).status_code == 200


def test_a_full_queue_is_answered_with_a_time_and_everybody_else_is_served(
    server: WeftServer, acme: httpx.Client
) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: completion(acme, DEMO_MODEL.name, 8, 500), range(8)))
    assert {answer.status_code for answer in answers} == {200, 503}
    for answer in answers:
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "engine_overloaded"
            assert int(answer.headers["retry-after"]) >= 1
        else:
            assert answer.json()["usage"]["completion_tokens"] == 500
    assert sum(answer.status_code == 200 for answer in answers) >= 3


def test_an_upload_over_the_limit_is_refused_and_leaves_nothing(server: WeftServer, acme: httpx.Client) -> None:
    def blobs() -> set[Path]:
        return {path for path in (server.data_dir / "blobs").rglob("*") if path.is_file()}

    before = blobs()
    refused = server.upload(acme, "french", DEMO_ADAPTERS / "french")
    assert refused.status_code == 413, refused.text
    assert acme.get("/v1/adapters/french").status_code == 404
    assert blobs() == before
