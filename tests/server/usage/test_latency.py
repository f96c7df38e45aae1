from __future__ import annotations

from typing import Any

import pytest

from api_adapters import upload
from api_server import BASE, Api
from manylora.server.usage.schemas import LatencyList

pytestmark = pytest.mark.anyio
LATENCY = "/v1/usage/latency"
NOTHING = {"device": 0, "host": 0, "stored": 0, "base": 0, "unknown": 0}


async def latency(api: Api, tenant: str | None = None, **params: Any) -> dict[str, Any]:
    client = api.admin if tenant is None else await api.tenant(tenant)
    answer = await client.get(LATENCY, params=params)
    assert answer.status_code == 200, answer.text
    LatencyList.model_validate(answer.json())
    return dict(answer.json())


async def test_rows_tell_what_they_are_about_and_how_requests_began(api: Api) -> None:
    await upload(await api.tenant("acme"), "pirate")
    for tenant, model in (("acme", "pirate"), ("acme", "pirate"), ("acme", BASE), ("rival", BASE)):
        await api.ask(tenant, model=model)
    body = await latency(api, group_by="version,tenant", bucket="1h")
    rows = {(row["tenant"], row["adapter"], row["version"]): row for row in body["data"]}
    assert set(rows) == {("acme", None, None), ("acme", "pirate", 1), ("rival", None, None)}
    assert all("key" not in row for row in body["data"])
    pirate = rows["acme", "pirate", 1]
    assert (pirate["requests"], pirate["states"], pirate["hit_rate"]) == (
        2,
        {**NOTHING, "stored": 2},
        0.0,
    )
    assert 0 < pirate["ttft_s"]["p50"] <= pirate["ttft_s"]["p95"] <= pirate["ttft_s"]["p99"] < 60
    assert (rows["rival", None, None]["states"], rows["rival", None, None]["hit_rate"]) == (
        {**NOTHING, "base": 1},
        None,
    )
    assert body["totals"]["requests"] == 4
    assert body["totals"]["states"] == {**NOTHING, "stored": 2, "base": 2}
    ungrouped = await latency(api)
    assert set(ungrouped["data"][0]) == {"start", "end", "requests", "states", "hit_rate", "ttft_s"}
    assert ungrouped["totals"] == body["totals"]


async def test_a_tenant_sees_only_how_its_own_requests_began(api: Api) -> None:
    await api.ask("acme")
    await api.ask("rival")
    await api.ask("rival")
    assert [row["tenant"] for row in (await latency(api, "rival", group_by="tenant"))["data"]] == [
        "rival"
    ]
    assert (await latency(api, "rival"))["totals"]["requests"] == 2
    assert (await latency(api, tenant="acme"))["totals"]["requests"] == 1
    assert (await latency(api))["totals"]["requests"] == 3


async def test_filters_and_range(api: Api) -> None:
    await upload(await api.tenant("acme"), "pirate")
    await api.ask("acme", model="pirate")
    await api.ask("acme")
    (row,) = (await latency(api, "acme", group_by="key", adapter=["pirate", "other"], version=1))[
        "data"
    ]
    assert row["requests"] == 1
    assert (await latency(api, "acme", key=row["key"], adapter=""))["totals"]["requests"] == 1
    assert (await latency(api, "acme", key="key_none"))["totals"]["requests"] == 0
    body = await latency(
        api, start="2026-05-01T10:59:59.999999Z", end="2026-05-01T12:00:00.000001Z"
    )
    assert (body["start"], body["end"]) == ("2026-05-01T10:00:00.000Z", "2026-05-01T13:00:00.000Z")
    nothing = {"requests": 0, "states": NOTHING, "hit_rate": None, "ttft_s": None}
    assert (body["data"], body["totals"]) == ([], nothing)


@pytest.mark.parametrize(
    "params",
    [
        {"bucket": "1m"},
        {"group_by": "status"},
        {"status": "stop"},
        {"start": "now"},
        {"limit": "5"},
    ],
)
async def test_what_latency_cannot_answer_is_refused(api: Api, params: dict[str, str]) -> None:
    answer = await api.admin.get(LATENCY, params=params)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(params))
