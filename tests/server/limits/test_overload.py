"""Refusals by predicted wait, over the real app with an engine that needs no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

import httpx
import pytest

from api_server import BASE, Api, eventually
from manylora.engine.fairness.service import TenantLoad
from manylora.engine.request import ErrorInfo
from manylora.engine.status import EngineLoad

pytestmark = pytest.mark.anyio

SLOW_S = 30.0
"""No token comes while a test runs."""


def body(number: int = 0, **fields: object) -> dict[str, object]:
    return {"model": BASE, "prompt": f"hello {number}", "max_tokens": 50, **fields}


def say(api: Api, rate: float = 100.0, **tenants: float) -> None:
    """What the engine says of itself: units per second in all, and of each tenant."""
    loads = {name: TenantLoad(rate=rate) for name, rate in tenants.items()}
    api.engine.load = EngineLoad(rate=rate, tenants=loads)


@asynccontextmanager
async def flood(api: Api, tenant: str, count: int) -> AsyncIterator[httpx.AsyncClient]:
    """So many requests of a tenant that wait in the engine, of more than 100 units each."""
    api.engine.token_s = SLOW_S
    client = await api.tenant(tenant)
    before = len(api.engine.running)
    waiting = [
        asyncio.create_task(client.post("/v1/completions", json=body(number)))
        for number in range(count)
    ]
    await eventually(lambda: len(api.engine.running) == before + count)
    try:
        yield client
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def tenant_id(api: Api, name: str) -> str:
    return (await api.services.registry.tenants.get_tenant(name)).id


async def test_a_flooding_tenant_is_refused_with_a_time_and_a_quiet_one_is_served(api: Api) -> None:
    async with flood(api, "quiet", 1), flood(api, "flood", 20) as client:
        say(api, 200, **{await tenant_id(api, "flood"): 190, await tenant_id(api, "quiet"): 10})
        requests = len(api.engine.requests)
        refused = await client.post("/v1/completions", json=body(99))
        assert refused.status_code == 429
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("limit.queue", "rate_limit_error")
        seconds = int(refused.headers["retry-after"])
        assert 1 <= seconds <= 3600
        assert seconds - 1 < int(refused.headers["retry-after-ms"]) / 1000 <= seconds
        assert f"Try again in {seconds} s" in error["message"]
        assert len(api.engine.requests) == requests  # the engine does not hear of it
        other = await api.tenant("third")
        api.engine.token_s = 0
        assert (await other.post("/v1/completions", json=body())).status_code == 200


async def test_a_refusal_counts_against_no_limit_and_is_in_the_metrics(api: Api) -> None:
    async with flood(api, "alone", 20) as client:
        say(api)
        await api.services.registry.tenants.update_tenant("alone", {"requests_per_minute": 40})
        for number in range(30):
            assert (
                await client.post("/v1/completions", json=body(number + 100))
            ).status_code == 503
        me = (await client.get("/v1/me")).json()
        assert me["used"]["tenant"]["requests_per_minute"] == 20
        assert me["used"]["tenant"]["concurrent_requests"] == 20
        page = api.services.metrics.render(None, 0).decode()
        assert 'manylora_refused_total{code="server.overloaded",tenant="alone"} 30.0' in page
        state = api.services.limits.gate.snapshot()[await tenant_id(api, "alone")]
        assert state["refused"] == {"server.overloaded": 30}
        assert state["wait_s"] > 9


async def test_all_that_was_let_in_leaves_the_gate_again(api: Api) -> None:
    client = await api.tenant("acme")
    assert (await client.post("/v1/completions", json=body(n=3, max_tokens=5))).status_code == 200
    assert (await client.post("/v1/completions", json=body(stream=True))).status_code == 200
    assert (await client.post("/v1/completions", json=body(prompt=[70_000]))).status_code == 400
    assert (await client.post("/v1/completions", json=body(max_tokens=100_000))).status_code == 400
    await api.services.registry.tenants.update_tenant("acme", {"tokens_per_minute": 1})
    assert (await client.post("/v1/completions", json=body())).status_code == 429
    await api.services.registry.tenants.update_tenant("acme", {})
    async with flood(api, "acme", 3):
        assert api.services.limits.gate.num_waiting == 3
    await eventually(lambda: api.services.limits.gate.num_waiting == 0)
    state = api.services.limits.gate.tenants[await tenant_id(api, "acme")]
    assert (state.live, state.live_units, state.waiting, state.waiting_units, state.adapters) == (
        0,
        0.0,
        0,
        0.0,
        {},
    )


@pytest.mark.parametrize("header", ["x-manylora-ttft-ms", "x-slo-ttft-ms"])
async def test_a_deadline_bounds_the_wait_and_goes_to_the_engine(api: Api, header: str) -> None:
    client = await api.tenant("acme")
    assert (
        await client.post("/v1/completions", json=body(), headers={header: "1500"})
    ).status_code == 200
    assert api.engine.requests[-1].flow.deadline_s == 1.5
    async with flood(api, "acme", 2):
        say(api, 100)
        refused = await client.post("/v1/completions", json=body(), headers={header: "100"})
        assert refused.status_code == 503
        api.engine.token_s = 0
        assert (
            await client.post("/v1/completions", json=body(), headers={header: "60000"})
        ).status_code == 200


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "soon", "", "9999999999", "٣"])
async def test_a_deadline_that_is_no_number_of_milliseconds_is_refused(
    api: Api, value: str
) -> None:
    client = await api.tenant("acme")
    headers = {b"x-manylora-ttft-ms": value.encode()}
    refused = await client.post("/v1/completions", json=body(), headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "x-manylora-ttft-ms"
    assert not api.engine.requests


async def test_a_deadline_that_passes_in_the_queue_is_503_and_costs_nothing(api: Api) -> None:
    client = await api.tenant("acme")
    api.engine.refusal = ErrorInfo(
        message="The deadline passed before the first token.",
        code="deadline.queue",
        kind="capacity",
    )
    refused = await client.post(
        "/v1/completions", json=body(), headers={"x-manylora-ttft-ms": "50"}
    )
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "deadline.queue"
    assert int(refused.headers["retry-after"]) >= 1
    usage = (await client.get("/v1/usage")).json()
    assert usage["totals"]["prompt_tokens"] == usage["totals"]["completion_tokens"] == 0
    assert api.services.limits.gate.snapshot()[await tenant_id(api, "acme")]["refused"] == {
        "deadline.queue": 1
    }
    assert api.services.limits.gate.num_waiting == 0


async def test_weight_and_priority_go_to_the_engine(api: Api) -> None:
    client = await api.tenant("acme")
    assert (await client.post("/v1/completions", json=body())).status_code == 200
    assert (api.engine.requests[-1].flow.weight, api.engine.requests[-1].flow.priority) == (1.0, 0)
    await api.services.registry.tenants.update_tenant("acme", weight=2.5)
    assert (await client.post("/v1/completions", json=body(priority=-7))).status_code == 200
    assert (api.engine.requests[-1].flow.weight, api.engine.requests[-1].flow.priority) == (2.5, -7)
    as_admin = await api.admin.post("/v1/completions?tenant=acme", json=body())
    assert as_admin.status_code == 200
    assert api.engine.requests[-1].flow.weight == 2.5
    for wrong in (101, -101, 1.5, "1", True):
        assert (await client.post("/v1/completions", json=body(priority=wrong))).status_code == 400


async def test_a_new_tenant_gets_the_default_limits_unless_the_request_says_otherwise(
    api: Api,
) -> None:
    defaults = {
        name: value
        for name, value in asdict(api.services.config.tenant_defaults).items()
        if value is not None
    }
    assert defaults["pinned_pages"] == 1024
    async with api.admin as admin:
        made = await admin.post("/v1/tenants", json={"name": "plain"})
        assert (made.status_code, made.json()["limits"], made.json()["weight"]) == (
            201,
            defaults,
            1,
        )
        chosen = {"pinned_pages": None, "adapters": 7}
        made = await admin.post(
            "/v1/tenants", json={"name": "chosen", "limits": chosen, "weight": 3}
        )
        expected = {**defaults, "adapters": 7}
        del expected["pinned_pages"]
        assert (made.json()["limits"], made.json()["weight"]) == (expected, 3)
        assert (await admin.get("/v1/tenants/chosen")).json()["limits"] == expected


async def test_a_tenants_weight_is_set_by_patch_and_limits_stay(api: Api) -> None:
    async with api.admin as admin:
        await admin.post("/v1/tenants", json={"name": "acme", "limits": {"adapters": 7}})
        before = (await admin.get("/v1/tenants/acme")).json()
        changed = await admin.patch("/v1/tenants/acme", json={"weight": 0.25})
        assert (changed.status_code, changed.json()) == (200, {**before, "weight": 0.25})
        changed = await admin.patch("/v1/tenants/acme", json={"limits": {}})
        assert (changed.json()["limits"], changed.json()["weight"]) == ({}, 0.25)
        for wrong in (
            {},
            {"weight": 0},
            {"weight": 101},
            {"weight": "1"},
            {"weight": True},
            {"weight": None},
        ):
            assert (await admin.patch("/v1/tenants/acme", json=wrong)).status_code == 400
