"""GET /v1/servers of a gateway, and that docs/cluster.md describes it: no OpenAPI page does."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from api_cluster import Gateway, gateway_before
from api_server import SERVER, Api, new_client
from metric_names import families_of
from weft.adapters.ref import ResidentAdapter

pytestmark = pytest.mark.anyio
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "cluster.md"


async def servers(gateway: Gateway) -> dict[str, dict[str, Any]]:
    async with gateway.admin as admin:
        answer = await admin.get("/v1/servers")
    assert answer.status_code == 200, answer.text
    return {each["name"]: each for each in answer.json()["data"]}


async def seen_as(gateway: Gateway, state: str) -> dict[str, Any]:
    """The replica, once the gateway has heard of this state."""
    for _ in range(3_000):
        seen = (await servers(gateway))[SERVER]
        if seen["state"] == state:
            return seen
        await asyncio.sleep(0.02)
    raise AssertionError(f"the replica is {seen['state']}, not {state}")


def documented(head: str) -> list[tuple[str, ...]]:
    """The rows of a table of the document, below a head."""
    text = DOCUMENT.read_text()
    rows = text[text.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [tuple(cell.strip() for cell in row.strip("| ").split("|")) for row in rows]


async def test_the_fields_are_those_of_the_document(api: Api) -> None:
    tiers = ["device", "host", "host", "loading"]
    api.engine.residents = [
        ResidentAdapter(digest=f"sha256:{index:064}", tier=tier, pages=1, running=0)  # type: ignore[arg-type]
        for index, tier in enumerate(tiers)
    ]
    async with gateway_before(api) as gateway:
        await gateway.list_server("gate", "gateway")
        await gateway.list_server("away", "replica")
        seen = await servers(gateway)
    fields = {name: set(of.split()) for cell, of, _ in documented("| field |") for name in re.findall(r"`(\w+)`", cell)}
    assert set(seen[SERVER]) == set(fields)
    assert {name for name, of in fields.items() if "all" in of} <= set(seen["gate"])
    assert seen["gate"]["state"] == "ready"
    assert seen["away"]["state"] == "lost"
    assert "running" not in seen["away"].keys() | seen["gate"].keys()
    assert seen[SERVER]["adapters"] == {"device": 1, "host": 2}
    assert (seen[SERVER]["url"], seen[SERVER]["in_flight"]) == (gateway.replica_url, 0)


async def test_a_replica_is_ready_or_down_or_lost(api: Api) -> None:
    async with gateway_before(api) as gateway:
        ready, api.engine.ready = api.engine.ready, None
        assert "running" in await seen_as(gateway, "down")
        api.engine.ready = ready
        await seen_as(gateway, "ready")
        api.services.drain.is_draining = True  # the reports end, as they do when the replica goes
        assert "running" not in await seen_as(gateway, "lost")


async def test_a_gateway_that_drains_is_alive_and_not_ready(api: Api) -> None:
    async with gateway_before(api) as gateway:
        gateway.drain.is_near = True
        async with gateway.admin as admin:
            answers = [(await admin.get(path)).status_code for path in ("/health", "/ready", "/v1/servers")]
        assert answers == [200, 503, 200]
        gateway.drain.is_draining = True
        async with gateway.admin as admin:
            answers = [(await admin.get(path)).status_code for path in ("/health", "/ready", "/v1/servers")]
    assert answers == [200, 503, 503]


async def test_tenants_see_no_servers(api: Api) -> None:
    async with gateway_before(api) as gateway, new_client(await api.key("acme"), gateway.url) as tenant:
        assert (await tenant.get("/v1/servers")).status_code == 403


async def test_metrics_are_those_of_the_document(api: Api) -> None:
    async with gateway_before(api) as gateway:
        page = await gateway.metrics_page()
    rows = {re.findall(r"`(\w+)`", name)[0] for name, *_ in documented("| metric |")}
    assert rows | {"weft_build_info"} == {name for names in families_of(page).values() for name in names}
    assert f'weft_replica_ready{{replica="{SERVER}",url="{gateway.replica_url}"}} 1.0' in page
