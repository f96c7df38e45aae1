"""`manylora ps --watch`: what fits the screen, and what it does when the server is gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import re
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from api_server import ADMIN_KEY, BASE, SERVER, Api, eventually
from fake_cluster import gateway_before
from manylora.adapters.ref import ResidentAdapter
from manylora.cli import make_app
from manylora.cli.ps import watch
from manylora.cli.ps.tables import TENANTS, blocks, tenant_rows, token_rates
from manylora.cli.ps.watch import screen_lines
from manylora.config import environment
from manylora.engine.fairness.service import TenantLoad
from manylora_server import DEMO_ADAPTERS, MANYLORA, manylora_server


async def run(*arguments: str, **environ: str) -> Any:
    """Run the command as on a terminal."""
    env = {"NO_COLOR": "1", "COLUMNS": "300", "FORCE_COLOR": "1", **environ}
    return await asyncio.to_thread(
        CliRunner().invoke, make_app(), ("ps", "--watch", *arguments), env=env
    )


async def body_of(api: Api, **changes: Any) -> dict[str, Any]:
    return {**(await api.admin.get("/v1/engine")).json(), **changes}


def waiting_load(waiting: int, **fields: Any) -> dict[str, Any]:
    return asdict(TenantLoad(waiting=waiting, reasons={"NEW": waiting}, **fields))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("height", "num_tenants", "num_adapters"), [(12, 0, 0), (24, 4, 4), (50, 9, 26)]
)
async def test_a_screen_has_the_summary_and_the_busiest_that_fit(
    api: Api, height: int, num_tenants: int, num_adapters: int
) -> None:
    residents = [
        ResidentAdapter(
            digest=f"sha256:{index:064}", tier="device", pages=1, running=int(index == 77)
        )
        for index in range(100)
    ]
    body = await body_of(
        api,
        residents=[
            {**asdict(resident), "adapters": [f"t/{resident.digest[-3:]}@1"]}
            for resident in residents
        ],
        waiting=900,
        waiting_reasons={"NEW": 900},
        tenants={f"tenant-{index}": waiting_load(100, rate=float(index)) for index in range(9)},
    )
    lines = screen_lines(blocks(body), height)
    assert len(lines) <= height
    assert lines[0].startswith(f"{BASE} on cpu, float32")
    assert "waiting     900 in line" in lines
    tenants = [line.split()[0] for line in lines if line.startswith("tenant-")]
    assert tenants == [f"tenant-{index}" for index in reversed(range(9))][:num_tenants]
    adapters = [line.split()[0] for line in lines if line.startswith("t/")]
    assert (len(adapters), adapters[:1]) == (num_adapters, ["t/077@1"][:num_adapters])
    more = [int(line.split()[1]) for line in lines if line.startswith("and ")]
    left = (9 - num_tenants, 100 - num_adapters)
    assert more == [each for each in left if each and num_adapters]


def test_a_thousand_tenants_stand_by_what_they_were_served() -> None:
    tenants = {
        f"t{index}": waiting_load(2, rate=float(index % 500), weight=0.5) for index in range(1_000)
    }
    tenants["t3"] |= {"running": 9, "paused": 4, "rate": 501.0}
    admission = {
        "t0": {"wait_s": 3.25, "refused": {"limit.queue": 7}},
        "t499": {"wait_s": 40.0, "refused": {"server.overloaded": 5, "limit.new": 1}},
        "left": {"wait_s": 0.0, "refused": {}},
        "turned away": {"wait_s": 0.0, "refused": {"limit.queue": 2}},
    }
    rows = list(tenant_rows({"tenants": tenants, "admission": admission}))
    assert [row[0] for row in rows[:3]] == ["t3", "t499", "t999"]
    assert (rows[-1][0], len(rows)) == ("turned away", 1_001)
    figures = ["0.5", "<1%", "<1%", "5", "4", "2", "-", "2 in line", "none"]
    assert list(rows[0][1:]) == figures
    assert rows[1][7:] == ("40.0 s", "2 in line", "5 overload, 1 limit.new")
    assert next(row for row in rows if row[0] == "t0")[7:] == ("3.2 s", "2 in line", "7 over share")


def test_nobody_in_the_engine_gives_no_rows_and_no_rate_no_share() -> None:
    def row(tenants: dict[str, Any], admission: dict[str, Any]) -> dict[str, str]:
        (found,) = tenant_rows({"tenants": tenants, "admission": admission})
        return dict(zip(TENANTS, found, strict=True))

    assert list(tenant_rows({"tenants": {}, "admission": {}})) == []
    idle = row({"t": waiting_load(0)}, {})
    assert (idle["DUE"], idle["SERVED"], idle["WHY"]) == ("100%", "-", "")
    refused = row({}, {"t": {"wait_s": 0.04, "refused": {"x": 1}}})
    assert (refused["WEIGHT"], refused["DUE"], refused["WAIT"], refused["REFUSED"]) == (
        "-",
        "-",
        "none",
        "1 x",
    )


def test_rates_are_of_the_last_second_of_computing_and_zero_when_nothing_is() -> None:
    slow = {"seconds": 10.0, "tokens": 1, "prefill_tokens": 0}
    steps = [slow, *[{"seconds": 0.25, "tokens": 12, "prefill_tokens": 2}] * 4]
    body = {"last_steps": steps, "last_step_age_s": 0.1}
    assert token_rates(body) == (40.0, 8.0)
    assert token_rates({**body, "last_step_age_s": 60.0}) == (0.0, 0.0)
    assert token_rates({"last_steps": [], "last_step_age_s": None}) == (0.0, 0.0)


@pytest.mark.anyio
async def test_an_engine_that_restarts_and_a_server_that_goes_are_told(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "GIVE_UP_S", 2.5)
    ready = api.engine.ready
    assert ready is not None
    async with api.listening() as url:
        watching = asyncio.create_task(run("--interval", "0.1", "--url", url, "--key", ADMIN_KEY))
        await eventually(lambda: api.engine.num_asked > 2)
        api.engine.ready = None
        await asyncio.sleep(1)
        api.engine.ready = replace(ready, boot_id="boot-2")
        num_asked = api.engine.num_asked
        await eventually(lambda: api.engine.num_asked > num_asked + 3)
    done = await watching
    assert done.exit_code == 1
    assert "0 running (0 base, 0 paused), 0 waiting" in done.stdout
    assert re.search(r"The server is away, trying for \S+ s: .*restarts", done.stdout)
    assert re.search(r"The server is away, trying for \S+ s: Cannot reach", done.stdout)
    assert done.stderr.startswith("manylora: Cannot reach")


@pytest.mark.anyio
async def test_without_the_admin_key_or_a_server_the_reason_is_one_line(api: Api) -> None:
    async with api.listening() as url:
        refused = await run("--url", url, "--key", await api.key("acme"))
        as_json = await run("--url", url, "--json")
        piped = await run("--url", url, FORCE_COLOR="")
    assert (refused.exit_code, "admin key" in refused.output) == (1, True)
    assert len(refused.output.splitlines()) == 1
    unreachable = await run("--url", "http://127.0.0.1:9")
    assert (unreachable.exit_code, "manylora serve" in unreachable.output) == (1, True)
    assert len(unreachable.output.splitlines()) == 1
    for refused in (as_json, piped):
        assert (refused.exit_code, "--watch draws on a terminal" in refused.output) == (2, True)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("chosen", "shown"),
    [
        ((), "1 of 2 replicas ready, 0 gateways"),
        (("--server", SERVER), "0 running (0 base, 0 paused)"),
    ],
    ids=["servers", "engine"],
)
async def test_a_gateway_shows_its_servers_or_the_engine_of_one(
    api: Api, monkeypatch: pytest.MonkeyPatch, chosen: tuple[str, ...], shown: str
) -> None:
    monkeypatch.setattr(watch, "GIVE_UP_S", 0.5)
    async with gateway_before(api) as (gateway, _):
        await gateway.list_server("away", "replica")
        asked = ("--url", gateway.url, "--key", ADMIN_KEY)
        none = await run(*asked, "--server", "away")
        watching = asyncio.create_task(run("--interval", "0.1", *asked, *chosen))
        num_asked = api.engine.num_asked
        await eventually(lambda: api.engine.num_asked > num_asked + 4)
    done = await watching
    assert (none.exit_code, "does not reach away" in none.output) == (1, True)
    assert (done.exit_code, "Cannot reach" in done.stderr, shown in done.stdout) == (1, True, True)


def test_many_servers_are_those_that_there_is_room_for() -> None:
    load = {
        "backlog_s": 1.5,
        "running": 3,
        "waiting": 1,
        "in_flight": 4,
        "adapters": {"device": 5, "host": 6},
    }
    servers = [
        {
            "name": f"srv_{index:024x}",
            "role": "replica",
            "state": "ready",
            "url": "http://10.0.0.1:8000",
            **load,
        }
        for index in range(40)
    ]
    lines = screen_lines(blocks({"object": "list", "data": servers}), 24)
    assert len(lines) == 24
    assert (
        lines[0]
        == "40 of 40 replicas ready, 0 gateways; 120 running, 40 waiting, longest backlog 1.5 s"
    )
    assert lines[-1] == "and 20 more"
    assert lines[-2].split()[2:] == [
        "ready",
        "3",
        "1",
        "1.5",
        "s",
        "4",
        "5",
        "6",
        "http://10.0.0.1:8000",
    ]


@pytest.mark.anyio
async def test_a_terminal_gets_the_whole_screen_anew(api: Api) -> None:
    here, there = pty.openpty()
    async with api.listening() as url:
        command = [
            *MANYLORA,
            "ps",
            "--watch",
            "--interval",
            "0.1",
            "--url",
            url,
            "--key",
            ADMIN_KEY,
        ]
        env = {**environment(), "TERM": "xterm", "COLUMNS": "60", "LINES": "20"}
        shown = await asyncio.create_subprocess_exec(*command, stdout=there, stderr=there, env=env)
        os.close(there)
        try:
            await eventually(lambda: api.engine.num_asked > 3)
            shown.send_signal(signal.SIGINT)
            printed = b""
            with contextlib.suppress(OSError):  # the end of a terminal that nobody writes to
                while piece := await asyncio.to_thread(os.read, here, 1 << 16):
                    printed += piece
            assert await shown.wait() == 0
        finally:
            if shown.returncode is None:
                shown.kill()
            os.close(here)
    assert printed.count(f"{BASE} on cpu".encode()) > 1
    assert b"steps       10.0 ms" in printed


@pytest.mark.slow
def test_adapters_and_pages_in_use_are_listed(tmp_path: Path) -> None:
    with manylora_server(
        tmp_path, "--memory-gib", "0.25", "--dtype", "float32", "--set", "model.threads=1"
    ) as server:
        acme = server.tenant("acme")
        assert server.upload(acme, "pirate", DEMO_ADAPTERS / "pirate").status_code == 201
        command = [*MANYLORA, "ps", "--url", server.url, "--key", ADMIN_KEY]
        is_seen = threading.Event()

        def shown() -> str:
            done = subprocess.run(command, capture_output=True, text=True, env=environment())
            assert (done.returncode, done.stderr) == (0, "")
            return done.stdout

        def keep_asking() -> None:
            body = {
                "model": "pirate",
                "prompt": "We are",
                "max_tokens": 200,
                "ignore_eos": True,
                "n": 4,
            }
            while not is_seen.is_set():
                assert acme.post("/v1/completions", json=body).status_code == 200

        assert "0 running (0 base, 0 paused), 0 waiting" in shown()
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(keep_asking)
            try:
                deadline = time.monotonic() + 60
                while not re.search(r" [1-9]\d* kv, \d+ prefix, [1-9]\d* adapter", shown()):
                    assert time.monotonic() < deadline
            finally:
                is_seen.set()
            asking.result()
        assert re.search(r"acme/pirate@1 +device +\d+ +\d+ +0 +0 +[1-9]\d*", shown())
        assert httpx.get(f"{server.url}/health").status_code == 200
