"""`manylora ps` against the app on a real port."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from api_adapters import sound, upload
from api_server import ADMIN_KEY, BASE, SERVER, Api
from fake_cluster import gateway_before
from manylora.cli import make_app
from manylora.engine.fairness.service import TenantLoad
from manylora.engine.status import ResidentAdapter

pytestmark = pytest.mark.anyio
UNKNOWN = "sha256:" + "ab" * 32


async def run(*arguments: str, **environ: str) -> Any:
    env = {"NO_COLOR": "1", "COLUMNS": "100", "FORCE_COLOR": None, **environ}
    return await asyncio.to_thread(CliRunner().invoke, make_app(), arguments, env=env)


async def test_residents_stand_in_a_table_over_a_summary(api: Api) -> None:
    client, rival = await api.tenant("acme"), await api.tenant("rival")
    pirate = (await upload(client, "pirate")).json()["digest"]
    await upload(rival, "corsair")
    shout = (await upload(client, "shout", sound(alpha=8))).json()["digest"]
    used = ResidentAdapter(
        digest=pirate, tier="device", pages=2345, running=2, pinned=True, holds=1
    )
    api.engine.residents = [
        ResidentAdapter(digest=UNKNOWN, tier="host", pages=1, running=0),
        ResidentAdapter(digest=shout, tier="loading", pages=7, running=0, holds=3),
        replace(used, uses=12, prefix_pages=9),
    ]
    api.engine.tenants = {
        "": TenantLoad(waiting=4, reasons={"LOADING": 3, "NEW": 1}),
        "ten_gone": TenantLoad(running=3, paused=2, waiting=1, reasons={"LOADING": 1}),
    }
    async with api.listening() as url:
        done = await run("ps", "--url", url, "--key", ADMIN_KEY)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        "ADAPTER              TIER     PAGES  PREFIX  RUNNING  HOLDS  HITS  PINNED",
        "acme/pirate@1 (+1)   device   2,345       9        2      1    12  yes",
        "acme/shout@1         loading      7       0        0      3     0",
        "sha256:abababababab  host         1       0        0      0     0",
        "",
        "TENANT    WEIGHT  DUE  SERVED  IN STEP  PAUSED  WAITING  WAIT  WHY                   REFUSED",
        "ten_gone       1  50%       -        1       2        1     -  1 loading             none",
        "(admin)        1  50%       -        0       0        4     -  3 loading, 1 in line  none",
        "",
        f"{BASE} on cpu, float32: 0 running (0 base, 2 paused), 5 waiting, 1 of 256 adapter slots in use",
        "waiting     4 loading, 1 in line",
        "steps       10.0 ms, p95 10.0 ms; 0 since start",
        "tokens/s    0 generated, 0 of prompts",
        "pages       4,096: 10 free, 0 kv, 0 prefix, 0 adapter, 0 quarantine",
        "host pages  1: 1 free, 0 adapter, 0 kv",
        "prefix      25 of 100 prompt tokens found (25.0%)",
        "evictions   2 adapter, 7 prefix",
        "preemptions 4 recompute, 1 swap",
        "loads       3 stored>device:ok; stored>device p95 250.0 ms",
    ]


async def test_an_idle_engine_has_a_summary_alone_and_a_restart_is_told(api: Api) -> None:
    async with api.listening() as url:
        idle = await run("ps", "--url", url, "--key", ADMIN_KEY)
        printed = await run("ps", "--url", url, "--key", ADMIN_KEY, "--json")
        api.engine.ready = None
        away = await run("ps", "--url", url, "--key", ADMIN_KEY)
    assert idle.output.startswith(f"{BASE} on cpu")
    assert json.loads(printed.output)["object"] == "engine"
    assert (away.exit_code, "restarts" in away.output, len(away.output.splitlines())) == (
        1,
        True,
        1,
    )


async def test_a_gateway_lists_its_servers(api: Api) -> None:
    pirate = (await upload(await api.tenant("acme"), "pirate")).json()["digest"]
    api.engine.residents = [
        ResidentAdapter(digest=UNKNOWN, tier="host", pages=1, running=0, holds=3),
        ResidentAdapter(digest=pirate, tier="device", pages=2345, running=1200),
    ]
    async with gateway_before(api) as (gateway, replica):
        await gateway.list_server("gate", "gateway")
        await gateway.list_server("away", "replica")
        asked = ("--url", gateway.url, "--key", ADMIN_KEY)
        shown, printed = await run("ps", *asked), await run("ps", *asked, "--json")
        one = await run("ps", *asked, "--server", SERVER)
        none = await run("ps", *asked, "--server", "away")
        refused = await run("ps", "--url", gateway.url, "--key", await api.key("acme"))
        api.engine.ready = None
        dead = await run("ps", *asked)
    assert shown.exit_code == 0, shown.output
    url = replica.url
    *_, summary = [line for line in shown.output.splitlines() if "replicas" in line]
    assert (
        summary == "1 of 2 replicas ready, 1 gateways; 0 running, 0 waiting, longest backlog 0.0 ms"
    )
    assert [line.split() for line in shown.output.splitlines() if line != summary] == [
        [
            "SERVER",
            "ROLE",
            "STATE",
            "RUNNING",
            "WAITING",
            "BACKLOG",
            "IN",
            "FLIGHT",
            "DEVICE",
            "HOST",
            "URL",
        ],
        ["gate", "gateway", "ready", *"------", "http://127.0.0.1:9"],
        ["away", "replica", "lost", *"------", "http://127.0.0.1:9"],
        [SERVER, "replica", "ready", "0", "0", "0.0", "ms", "0", "1", "1", url],
        [],
    ]
    assert {each["name"]: each["state"] for each in json.loads(printed.output)["data"]} == {
        "gate": "ready",
        "away": "lost",
        SERVER: "ready",
    }
    assert f"\n{BASE} on cpu, float32: 0 running" in one.output
    rows = [line.split()[:2] for line in one.output.splitlines()]
    assert ["acme/pirate@1", "device"] in rows
    assert ["sha256:abababababab", "host"] in rows
    assert (none.exit_code, "does not reach away" in none.output) == (1, True)
    assert (refused.exit_code, "Only the admin key" in refused.output) == (1, True)
    assert (dead.exit_code, f"{SERVER}" in dead.output, "pirate" in dead.output) == (0, True, False)


async def test_a_single_server_takes_no_other_name(api: Api) -> None:
    async with api.listening() as url:
        own = await run("ps", "--url", url, "--key", ADMIN_KEY, "--server", SERVER)
        other = await run("ps", "--url", url, "--key", ADMIN_KEY, "--server", "srv_other")
    assert own.exit_code == 0, own.output
    assert (other.exit_code, f"This server is {SERVER}" in other.output) == (1, True)
