"""`manylora top`: one frame, the stream of lines, and what it does when the server is gone."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from api_server import ADMIN_KEY, BASE, SERVER, Api, at_rest, eventually
from fake_cluster import gateway_before
from manylora.adapters.ref import ResidentAdapter
from manylora.cli import make_app, top
from manylora.cli.top.frame import cells, frame, shares, tenant_rows, token_rates
from manylora.config import environment
from manylora.engine.fairness.tenant_load import TenantLoad
from manylora_server import DEMO_ADAPTERS, MANYLORA, manylora_server


async def run(*arguments: str, **environ: str) -> Any:
    env = {"NO_COLOR": "1", "COLUMNS": "100", "FORCE_COLOR": None, **environ}
    return await asyncio.to_thread(CliRunner().invoke, make_app(), ("top", *arguments), env=env)


async def body_of(api: Api, **changes: Any) -> dict[str, Any]:
    return {**(await api.admin.get("/v1/engine")).json(), **changes}


def waiting_load(waiting: int, **fields: Any) -> dict[str, Any]:
    return asdict(TenantLoad(waiting=waiting, reasons={"NEW": waiting}, **fields))


def drawn(
    body: dict[str, Any], width: int, height: int, age_s: float = 0.0, trouble: str | None = None
) -> list[str]:
    console = Console(
        width=width, height=height, file=io.StringIO(), force_terminal=True, color_system=None
    )
    console.print(frame(body, age_s, console.size, trouble))
    return str(console.file.getvalue()).splitlines()  # type: ignore[attr-defined]


@pytest.mark.anyio
async def test_once_prints_one_frame(api: Api) -> None:
    api.engine.tenants = {
        "": TenantLoad(running=3, paused=1, waiting=2, reasons={"NEW": 2}, rate=70.0)
    }
    resident = ResidentAdapter(digest="sha256:0123456789ab", tier="device", pages=7, running=2)
    api.engine.residents = [replace(resident, uses=1234, loads=3, load_p95_s=0.5)]
    async with api.listening() as url:
        done = await run("--once", "--url", url, "--key", ADMIN_KEY)
    assert done.exit_code == 0, done.output
    assert [line.rstrip() for line in done.output.splitlines()] == [
        f"{BASE} on cpu, float32",
        "requests   0 running (0 base, 1 paused), 2 waiting (2 in line)",
        "steps      10.0 ms, p95 10.0 ms; 0 since start",
        "tokens/s   0 generated, 0 of prompts",
        "pages      10: 10 free, 0 kv, 0 prefix, 0 adapter, 0 quarantine",
        " " * 11 + "·" * 89,
        "loads      3 stored>device:ok; stored>device p95 250.0 ms",
        "adapters   1 of 256 slots in use, 1 in memory",
        "",
        "TENANT   WEIGHT   DUE  SERVED  IN STEP  PAUSED  WAITING  WAIT  WHY        REFUSED",
        "(admin)       1  100%    100%        2       1        2     -  2 in line  none",
        "",
        "ADAPTER              TIER    PAGES  RUNNING  WAITING   HITS  LOADS  LOAD P95",
        "sha256:0123456789ab  device      7        2        0  1,234      3  500.0 ms",
    ]


@pytest.mark.anyio
@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (70, 14)])
async def test_a_frame_fits_the_terminal_and_shows_the_busiest(
    api: Api, width: int, height: int
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
        tenants={
            f"a-tenant-of-a-long-name-{index}": waiting_load(100, rate=float(index))
            for index in range(9)
        },
        pages={"free": 1, "kv": 800, "prefix": 3, "adapter": 100, "quarantine": 0},
    )
    lines = drawn(
        body,
        width,
        height,
        trouble="The engine stopped and is being restarted; send the request again.",
    )
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    bar = next(line for line in lines if "█" in line).strip()
    assert (len(bar), bar.count("·"), set(bar)) == (width - 11, 1, set("█▓▒·"))
    first, *others, last = lines[
        lines.index(next(line for line in lines if line.startswith("ADAPTER"))) + 1 :
    ]
    assert first.startswith("t/077@1")
    assert last.strip() == f"and {100 - 1 - len(others)} more"
    tenants = [line.split()[0] for line in lines if line.startswith("a-tenant")]
    expected = {14: [], 24: [8, 7, 6, 5], 50: list(reversed(range(9)))}[height]
    assert tenants == [f"a-tenant-of-a-long-name-{index}" for index in expected]
    assert any(line.startswith("5 others") for line in lines) is (height == 24)


def test_a_thousand_tenants_are_the_most_served_and_the_sum_of_the_others() -> None:
    tenants = {
        f"t{index}": waiting_load(2, rate=float(index % 500), weight=0.5) for index in range(1_000)
    }
    tenants["t3"] |= {"running": 9, "paused": 4, "rate": 501.0}
    admission = {
        "t0": {"wait_s": 3.25, "refused": {"limit.queue": 7}},
        "t1": {
            "wait_s": 40.0,
            "refused": {"limit.queue": 1, "server.overloaded": 5, "limit.new": 1},
        },
        "left": {"wait_s": 0.0, "refused": {}},
        "turned away": {"wait_s": 0.0, "refused": {"limit.queue": 2}},
    }
    rows = tenant_rows({"tenants": tenants, "admission": admission})
    assert [row.name for row in rows[:3]] == ["t3", "t499", "t999"]
    assert (rows[-1].name, len(rows)) == ("turned away", 1_001)
    first, second, others = cells(rows, 2)
    assert list(first.values()) == [
        "t3",
        "0.5",
        "<1%",
        "<1%",
        "5",
        "4",
        "2",
        "-",
        "2 in line",
        "none",
    ]
    assert second["TENANT"] == "t499"
    figures = ["999 others", "499", "100%", "100%", "0", "0", "1,996", "40.0 s", "1,996 in line"]
    assert list(others.values()) == [*figures, "10 over share, 5 overload, 1 limit.new"]


def test_nobody_in_the_engine_gives_no_rows_and_no_rate_no_share() -> None:
    assert tenant_rows({"tenants": {}, "admission": {}}) == []
    (row,) = cells(tenant_rows({"tenants": {"t": waiting_load(0)}, "admission": {}}), 1)
    assert (row["DUE"], row["SERVED"], row["WHY"]) == ("100%", "-", "")
    (row,) = cells(
        tenant_rows({"tenants": {}, "admission": {"t": {"wait_s": 0.04, "refused": {"x": 1}}}}), 1
    )
    assert (row["WEIGHT"], row["DUE"], row["WAIT"], row["REFUSED"]) == ("-", "-", "none", "1 x")


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=6), st.integers(6, 200))
def test_shares_fill_the_width_and_leave_out_nothing(counts: list[int], width: int) -> None:
    parts = shares(counts, width)
    assert sum(parts) == (width if any(counts) else 0)
    assert [part > 0 for part in parts] == [count > 0 for count in counts]
    for part, count in zip(parts, counts, strict=True):
        assert abs(part - count * width / max(sum(counts), 1)) <= len(counts)


def test_rates_are_of_the_last_second_of_computing_and_zero_when_nothing_is() -> None:
    slow = {"seconds": 10.0, "tokens": 1, "prefill_tokens": 0}
    steps = [slow, *[{"seconds": 0.25, "tokens": 12, "prefill_tokens": 2}] * 4]
    body = {"last_steps": steps, "last_step_age_s": 0.1}
    assert token_rates(body, 0.0) == (40.0, 8.0)
    assert token_rates(body, 60.0) == (0.0, 0.0)
    assert token_rates({"last_steps": [], "last_step_age_s": None}, 0.0) == (0.0, 0.0)


@pytest.mark.anyio
async def test_an_engine_that_restarts_and_a_server_that_goes_are_told(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "GIVE_UP_S", 0.5)
    monkeypatch.setattr(top, "RETRY_S", 0.1)
    ready = api.engine.ready
    assert ready is not None
    async with api.listening() as url:
        watching = asyncio.create_task(run("--interval", "0.1", "--url", url, "--key", ADMIN_KEY))
        await eventually(lambda: api.engine.num_asked > 2)
        api.engine.ready = None
        await asyncio.sleep(1.5)
        api.engine.ready = replace(ready, boot_id="boot-2")
        num_asked = api.engine.num_asked
        await eventually(lambda: api.engine.num_asked > num_asked + 3)
        api.services.drain.is_draining = True  # ends the stream, as the end of the process would
        await at_rest(lambda: api.engine.num_asked, 1.2)
    done = await watching
    assert done.exit_code == 1
    assert "0 running (0 base, 0 paused), 0 waiting; step 10.0 ms" in done.stdout
    said = [line for line in done.stderr.splitlines() if line]
    assert said[0] == "manylora: The engine restarts."
    assert said[1].startswith("manylora: The server is away, trying for")
    assert "has been away for" in said[-1]


@pytest.mark.anyio
async def test_without_the_admin_key_or_a_server_the_reason_is_one_line(api: Api) -> None:
    async with api.listening() as url:
        for once in ([], ["--once"]):
            refused = await run(*once, "--url", url, "--key", await api.key("acme"))
            assert (refused.exit_code, "admin key" in refused.output) == (1, True)
        assert len(refused.output.splitlines()) == 1
    for once in ([], ["--once"]):
        unreachable = await run(*once, "--url", "http://127.0.0.1:9")
        assert (unreachable.exit_code, "manylora serve" in unreachable.output) == (1, True)
        assert len(unreachable.output.splitlines()) == 1


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
    monkeypatch.setattr(top, "GIVE_UP_S", 0.5)
    monkeypatch.setattr(top, "RETRY_S", 0.1)
    monkeypatch.setattr(top, "POLL_S", 0.1)
    async with gateway_before(api) as (gateway, _):
        await gateway.list_server("away", "replica")
        asked = ("--url", gateway.url, "--key", ADMIN_KEY)
        once = await run("--once", *asked, *chosen)
        none = await run(*asked, "--server", "away")
        watching = asyncio.create_task(run("--interval", "0.1", *asked, *chosen))
        num_asked = api.engine.num_asked
        await eventually(lambda: api.engine.num_asked > num_asked + 4)
    done = await watching
    first, *others = once.output.splitlines()
    if chosen:
        assert first.rstrip() == f"{BASE} on cpu, float32"
    else:
        assert first.startswith("1 of 2 replicas ready, 0 gateways; 0 running")
        assert [line.split()[:3] for line in others[2:]] == [
            ["away", "replica", "lost"],
            [SERVER, "replica", "ready"],
        ]
    assert (none.exit_code, "does not reach away" in none.output) == (1, True)
    assert (done.exit_code, "has been away for" in done.stderr, shown in done.stdout) == (
        1,
        True,
        True,
    )


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
    for width in (60, 120):
        lines = drawn({"object": "list", "data": servers}, width, 24, trouble="The server is away.")
        assert (len(lines), max(map(len, lines)) <= width) == (24, True)
    assert (
        lines[0]
        == "40 of 40 replicas ready, 0 gateways; 120 running, 40 waiting, longest backlog 1.5 s"
    )
    assert lines[1] == "The server is away."
    assert lines[-1].split()[2:] == [
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


IGNORING = ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")
"""Starts a command as a script starts its background jobs."""


@pytest.mark.anyio
@pytest.mark.parametrize(("start", "free"), [(IGNORING, 4096), ((), 300)])
async def test_ctrl_c_ends_one_that_was_started_with_it_ignored_or_waits_for_its_reader(
    api: Api, start: tuple[str, ...], free: int
) -> None:
    """Nothing is read from its pipe: of the two, the second has room for the first line alone."""
    there, here = os.pipe()
    fcntl.fcntl(here, fcntl.F_SETPIPE_SZ, 4096)
    os.write(here, b" " * (4096 - free))

    def num_written() -> int:
        waiting = fcntl.ioctl(there, termios.FIONREAD, bytes(4))
        return int(struct.unpack("i", waiting)[0]) - (4096 - free)

    async with api.listening() as url:
        command = [*start, *MANYLORA, "top", "--interval", "0.1", "--url", url, "--key", ADMIN_KEY]
        watch = await asyncio.create_subprocess_exec(
            *command, stdout=here, stderr=subprocess.PIPE, env=environment()
        )
        os.close(here)
        try:
            await eventually(lambda: num_written() > 0)
            num_asked = api.engine.num_asked
            await eventually(lambda: api.engine.num_asked > num_asked + 1)
            watch.send_signal(signal.SIGINT)
            async with asyncio.timeout(60):
                _, said = await watch.communicate()
            assert (watch.returncode, said) == (0, b"")
        finally:
            if watch.returncode is None:
                watch.kill()
            os.close(there)


@pytest.mark.slow
def test_a_pipe_gets_a_line_at_each_look_and_ctrl_c_is_a_good_end(tmp_path: Path) -> None:
    with manylora_server(
        tmp_path, "--memory-gib", "0.25", "--dtype", "float32", "--set", "model.threads=1"
    ) as server:
        acme = server.tenant("acme")
        assert server.upload(acme, "pirate", DEMO_ADAPTERS / "pirate").status_code == 201
        arguments = ["--url", server.url, "--key", ADMIN_KEY]
        command = [*MANYLORA, "top", "--interval", "0.2", *arguments]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        ) as watch:
            assert watch.stdout is not None
            assert watch.stderr is not None
            assert "0 running (0 base, 0 paused), 0 waiting; step -;" in watch.stdout.readline()
            is_seen = threading.Event()

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

            with ThreadPoolExecutor(1) as pool:
                asking = pool.submit(keep_asking)
                try:
                    deadline = time.monotonic() + 60
                    while not re.search(
                        r" [1-9]\d* kv, \d+ prefix, [1-9]\d* adapter", watch.stdout.readline()
                    ):
                        assert time.monotonic() < deadline
                finally:
                    is_seen.set()
                asking.result()
            watch.send_signal(signal.SIGINT)
            assert watch.wait(timeout=60) == 0
            assert watch.stderr.read() == ""
        shown = subprocess.run(
            [*MANYLORA, "top", "--once", *arguments],
            capture_output=True,
            text=True,
            env=environment(),
        )
        assert shown.returncode == 0, shown.stderr
        assert re.search(r"acme/pirate@1 +device +\d+ +0 +0 +[1-9]\d* +1 +\d", shown.stdout), (
            shown.stdout
        )
        assert httpx.get(f"{server.url}/health").status_code == 200
