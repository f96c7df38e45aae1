"""A real server with more requests than it can compute: the flooding tenant is refused, and others are served."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from manylora_server import DEMO_MODEL, ManyloraServer, manylora_server

SETTINGS = {"scheduler.max_running": 4, "scheduler.max_wait_s": 0.5}
LONG = 300
FLOODERS = 24


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyloraServer]:
    with manylora_server(tmp_path_factory.mktemp("overload"), settings=SETTINGS) as running:
        yield running


def completion(client: httpx.Client, number: int, max_tokens: int) -> httpx.Response:
    body = {
        "model": DEMO_MODEL.name,
        "prompt": f"tell {number}",
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    return client.post("/v1/completions", json=body)


def test_a_flooding_tenant_is_told_when_to_come_and_a_quiet_one_is_served(
    server: ManyloraServer,
) -> None:
    flood, quiet = server.tenant("flood"), server.tenant("quiet")
    assert completion(quiet, 0, 4).status_code == 200
    answers: list[httpx.Response] = []
    is_over = threading.Event()

    def keep_asking(number: int) -> None:
        while not is_over.is_set():
            answer = completion(flood, number, LONG)
            answers.append(answer)
            if answer.is_error:
                is_over.wait(float(answer.headers["retry-after-ms"]) / 1000)

    with ThreadPoolExecutor(FLOODERS) as pool:
        asking = [pool.submit(keep_asking, number) for number in range(FLOODERS)]
        try:
            served = 0
            while served < 10 or sum(answer.is_error for answer in answers) < 30:
                answer = completion(quiet, served, 4)
                assert answer.status_code == 200, answer.text
                served += 1
                is_over.wait(0.1)
        finally:
            is_over.set()
        for one in asking:
            one.result()
    refused = [answer for answer in answers if answer.is_error]
    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in refused} <= {
        (429, "limit.queue"),
        (503, "server.overloaded"),
    }
    assert any(answer.status_code == 429 for answer in refused)
    assert all(1 <= int(answer.headers["retry-after"]) <= 3600 for answer in refused)
    assert sum(answer.status_code == 200 for answer in answers) >= 4
    page = server.admin.get("/metrics").text
    told = [
        line
        for line in page.splitlines()
        if line.startswith("manylora_refused_total{") and 'tenant="flood"' in line
    ]
    assert sum(float(line.rpartition(" ")[2]) for line in told) == len(refused)
    assert not [
        line
        for line in page.splitlines()
        if line.startswith("manylora_refused_total{") and 'tenant="quiet"' in line
    ]
