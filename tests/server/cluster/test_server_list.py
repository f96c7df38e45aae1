"""GET /v1/servers of a gateway, and that docs/cluster.md describes it: no OpenAPI page does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from api_server import ADMIN_KEY, SERVER, Api
from fake_cluster import gateway_before
from manylora.adapters.ref import ResidentAdapter
from metric_names import families_of

pytestmark = pytest.mark.anyio
DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "cluster.md"


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
    async with gateway_before(api) as (gateway, replica):
        await gateway.list_server("gate", "gateway")
        await gateway.list_server("away", "replica")
        seen = await gateway.servers()
    fields = {
        name: set(of.split())
        for cell, of, _ in documented("| field |")
        for name in re.findall(r"`(\w+)`", cell)
    }
    assert set(seen[SERVER]) == set(fields)
    assert {name for name, of in fields.items() if "all" in of} <= set(seen["gate"])
    assert seen["gate"]["state"] == "ready"
    assert seen["away"]["state"] == "lost"
    assert "running" not in seen["away"].keys() | seen["gate"].keys()
    assert seen[SERVER]["adapters"] == {"device": 1, "host": 2}
    assert (seen[SERVER]["url"], seen[SERVER]["in_flight"]) == (replica.url, 0)


async def test_a_replica_is_ready_or_down_or_lost(api: Api) -> None:
    async with gateway_before(api) as (gateway, _):
        ready, api.engine.ready = api.engine.ready, None
        await gateway.sees(**{SERVER: "down"})
        api.engine.ready = ready
        await gateway.sees(**{SERVER: "ready"})
        api.services.drain.is_draining = True  # the reports end, as they do when the replica goes
        await gateway.sees()
        assert (await gateway.servers())[SERVER]["state"] == "lost"


async def test_a_gateway_that_drains_is_alive_and_not_ready(api: Api) -> None:
    async with gateway_before(api) as (gateway, _):
        gateway.drain.is_near = True
        async with gateway.client(ADMIN_KEY) as admin:
            answers = [
                (await admin.get(path)).status_code for path in ("/health", "/ready", "/v1/servers")
            ]
        assert answers == [200, 503, 200]
        gateway.drain.is_draining = True
        async with gateway.client(ADMIN_KEY) as admin:
            answers = [
                (await admin.get(path)).status_code for path in ("/health", "/ready", "/v1/servers")
            ]
    assert answers == [200, 503, 503]


async def test_tenants_see_no_servers(api: Api) -> None:
    async with gateway_before(api) as (gateway, _), gateway.client(await api.key("acme")) as tenant:
        assert (await tenant.get("/v1/servers")).status_code == 403


async def test_metrics_are_those_of_the_document(api: Api) -> None:
    async with gateway_before(api) as (gateway, replica):
        page = await gateway.metrics_page()
    rows = {re.findall(r"`(\w+)`", name)[0] for name, *_ in documented("| metric |")}
    assert rows | {"manylora_build_info"} == {
        name for names in families_of(page).values() for name in names
    }
    assert f'manylora_replica_ready{{replica="{SERVER}",url="{replica.url}"}} 1.0' in page
