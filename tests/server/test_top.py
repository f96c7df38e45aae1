"""`weft top`: one frame, the stream of lines, and what it does when the server is gone."""

from __future__ import annotations

import asyncio
import io
import re
import signal
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from api_server import ADMIN_KEY, BASE, Api, eventually
from weft.adapters.resident import ResidentAdapter
from weft.cli import make_app
from weft.config import environment
from weft.server.commands import top
from weft.server.commands.top_frame import frame, shares, token_rates
from weft_server import DEMO_ADAPTERS, WEFT, weft_server


async def run(*arguments: str, **environ: str) -> Any:
    env = {"NO_COLOR": "1", "COLUMNS": "100", "FORCE_COLOR": None, **environ}
    return await asyncio.to_thread(CliRunner().invoke, make_app(), ("top", *arguments), env=env)


async def body_of(api: Api, **changes: Any) -> dict[str, Any]:
    return {**(await api.admin.get("/v1/engine")).json(), **changes}


def drawn(body: dict[str, Any], width: int, height: int, age_s: float = 0.0, trouble: str | None = None) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(frame(body, age_s, console.size, trouble))
    return str(console.file.getvalue()).splitlines()  # type: ignore[attr-defined]


@pytest.mark.anyio
async def test_once_prints_one_frame(api: Api) -> None:
    api.engine.waiting_by_tenant = {"": 2}
    api.engine.residents = [
        ResidentAdapter(
            digest="sha256:0123456789ab", tier="device", pages=7, running=2, uses=1234, loads=3, load_p95_s=0.5
        )
    ]
    async with api.listening() as url:
        done = await run("--once", "--url", url, "--key", ADMIN_KEY)
    assert done.exit_code == 0, done.output
    assert [line.rstrip() for line in done.output.splitlines()] == [
        f"{BASE} on cpu, float32",
        "requests   0 running (0 base), 0 waiting",
        "waiting    (admin) 2",
        "steps      10.0 ms, p95 10.0 ms; 0 since start",
        "tokens/s   0 generated, 0 of prompts",
        "pages      10: 10 free, 0 kv, 0 prefix, 0 adapter, 0 quarantine",
        " " * 11 + "·" * 89,
        "loads      3 stored>device:ok; stored>device p95 250.0 ms",
        "adapters   1 of 256 slots in use, 1 in memory",
        "",
        "ADAPTER              TIER    PAGES  RUNNING  WAITING   HITS  LOADS  LOAD P95",
        "sha256:0123456789ab  device      7        2        0  1,234      3  500.0 ms",
    ]


@pytest.mark.anyio
@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (70, 14)])
async def test_a_frame_fits_the_terminal_and_shows_the_busiest(api: Api, width: int, height: int) -> None:
    residents = [
        ResidentAdapter(digest=f"sha256:{index:064}", tier="device", pages=1, running=int(index == 77))
        for index in range(100)
    ]
    body = await body_of(
        api,
        residents=[{**asdict(resident), "adapters": [f"t/{resident.digest[-3:]}@1"]} for resident in residents],
        waiting=900,
        waiting_by_tenant={f"a-tenant-of-a-long-name-{index}": 100 for index in range(9)},
        pages={"free": 1, "kv": 800, "prefix": 3, "adapter": 100, "quarantine": 0},
    )
    lines = drawn(body, width, height, trouble="The engine stopped and is being restarted; send the request again.")
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    bar = next(line for line in lines if "█" in line).strip()
    assert (len(bar), bar.count("·"), set(bar)) == (width - 11, 1, set("█▓▒·"))
    first, *others, last = lines[lines.index(next(line for line in lines if line.startswith("ADAPTER"))) + 1 :]
    assert first.startswith("t/077@1")
    assert last.strip() == f"and {100 - 1 - len(others)} more"


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
        await eventually(lambda: api.services.engine_feed._poller is None)
    done = await watching
    assert done.exit_code == 1
    assert "0 running (0 base), 0 waiting; step 10.0 ms" in done.stdout
    said = [line for line in done.stderr.splitlines() if line]
    assert said[0] == "weft: The engine restarts."
    assert said[1].startswith("weft: The server is away, trying for")
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
        assert (unreachable.exit_code, "weft serve" in unreachable.output) == (1, True)
        assert len(unreachable.output.splitlines()) == 1


@pytest.mark.slow
def test_a_pipe_gets_a_line_at_each_look_and_ctrl_c_is_a_good_end(tmp_path: Path) -> None:
    with weft_server(tmp_path, "--memory-gib", "0.25", "--dtype", "float32", "--set", "model.threads=1") as server:
        acme = server.tenant("acme")
        assert server.upload(acme, "pirate", DEMO_ADAPTERS / "pirate").status_code == 201
        arguments = ["--url", server.url, "--key", ADMIN_KEY]
        command = [*WEFT, "top", "--interval", "0.2", *arguments]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
        ) as watch:
            assert watch.stdout is not None
            assert watch.stderr is not None
            assert "0 running (0 base), 0 waiting; step -;" in watch.stdout.readline()
            seen = ""
            deadline = time.monotonic() + 60
            while not re.search(r" [1-9]\d* kv, \d+ prefix, [1-9]\d* adapter", seen):
                assert time.monotonic() < deadline
                body = {"model": "pirate", "prompt": "We are", "max_tokens": 200, "ignore_eos": True, "n": 4}
                with acme.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                    for _ in answer.iter_lines():
                        pass
                seen = watch.stdout.readline()
            watch.send_signal(signal.SIGINT)
            assert watch.wait(timeout=20) == 0
            assert watch.stderr.read() == ""
        shown = subprocess.run([*WEFT, "top", "--once", *arguments], capture_output=True, text=True, env=environment())
        assert shown.returncode == 0, shown.stderr
        assert re.search(r"acme/pirate@1 +device +\d+ +0 +0 +[1-9]\d* +1 +\d", shown.stdout), shown.stdout
        assert httpx.get(f"{server.url}/health").status_code == 200
