from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from fake_cluster import FakeCluster, FakeGateway
from manylora.errors import CapacityError
from manylora.registry.servers import Servers
from manylora.server.cluster import links as links_module
from manylora.server.cluster.links import Links
from manylora.server.cluster.router import Router, Target
from manylora.server.cluster.wire import cluster_token
from scripted_replica import Got, ScriptedReplica, scripted

pytestmark = pytest.mark.anyio
BASE = Target(adapter=None, units=1.0)
NEVER = 3600


async def idle(_: Got, __: asyncio.StreamReader, ___: asyncio.StreamWriter) -> None:
    await asyncio.sleep(NEVER)


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - links tell nobody
            await asyncio.sleep(0.01)


def _ready(router: Router) -> set[str]:
    return {replica.name for replica in router.order(BASE)}


async def test_requests_of_a_lost_replica_are_cut_and_it_comes_back(cluster: FakeCluster) -> None:
    router, cuts = Router(time.monotonic), list[str]()
    links = Links(cluster.registry.servers, router, cluster_token(cluster.registry.key_ring))
    async with scripted(cluster, idle, "one", "two") as replicas:
        await links.start()
        await _until(lambda: _ready(router) == {"one", "two"})
        with (
            links.using("one", lambda: cuts.append("one")),
            links.using("two", lambda: cuts.append("two")),
        ):
            with links.using("one", lambda: cuts.append("over")):
                pass
            replicas["one"].die()
            await _until(lambda: cuts)
        assert cuts == ["one"]
        assert _ready(router) == {"two"}
        replicas["one"].boot_id = "second"
        await replicas["one"].start(cluster.registry)
        await _until(lambda: _ready(router) == {"one", "two"})
        assert links.reports["one"].boot_id == "second"
        await links.close()


async def test_a_report_without_an_end_is_not_kept_in_memory(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links_module, "MAX_LINE", 1 << 16)
    num_connections = 0

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\n\r\n")
        with suppress(ConnectionError):
            while True:
                writer.write(b" " * (1 << 14))
                await writer.drain()

    links = Links(
        cluster.registry.servers, Router(time.monotonic), cluster_token(cluster.registry.key_ring)
    )
    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        row = ScriptedReplica("one", "", idle).row(
            url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        )
        await cluster.registry.servers.announce(row)
        await links.start()
        await _until(lambda: num_connections >= 2)  # it left, and looks whether that has passed
        await links.close()


async def test_requests_of_a_boot_that_another_one_replaces_are_cut(cluster: FakeCluster) -> None:
    """A machine that hangs, while its folder is used by another."""
    router, cuts = Router(time.monotonic), list[str]()
    token = cluster_token(cluster.registry.key_ring)
    links = Links(cluster.registry.servers, router, token)
    async with scripted(cluster, idle, "one") as replicas:
        await links.start()
        await _until(lambda: _ready(router))
        replicas["one"].is_silent = True
        again = ScriptedReplica("one", token, idle)
        again.boot_id = "second"
        with links.using("one", lambda: cuts.append("one")):
            await again.start(cluster.registry)
            await _until(lambda: cuts)
        await _until(lambda: _ready(router) and links.reports["one"].boot_id == "second")
        assert [each.url for each in router.order(BASE)] == [again.url]
        again.die()
        await links.close()


async def test_another_server_at_the_address_is_not_taken_for_the_replica(
    cluster: FakeCluster,
) -> None:
    router = Router(time.monotonic)
    links = Links(cluster.registry.servers, router, cluster_token(cluster.registry.key_ring))
    async with scripted(cluster, idle, "one", "two") as replicas:
        await cluster.registry.servers.announce(replicas["one"].row(name="liar", boot_id="other"))
        await links.start()
        await _until(lambda: _ready(router) == {"one", "two"})
        assert "liar" not in links.reports
        await links.close()


async def test_a_replica_with_another_pepper_is_not_ready(
    cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    router = Router(time.monotonic)
    links = Links(cluster.registry.servers, router, cluster_token(cluster.registry.key_ring))
    stranger = ScriptedReplica("stranger", "another token", idle)
    await stranger.start(cluster.registry)
    printed = ""
    async with scripted(cluster, idle, "one"):
        await links.start()
        await _until(lambda: _ready(router) == {"one"})
        async with asyncio.timeout(60):
            while "replica_refuses" not in printed:
                await asyncio.sleep(0.01)
                printed += capsys.readouterr().out
        await links.close()
    stranger.die()
    assert "MANYLORA_PEPPER" in printed
    assert cluster_token(cluster.registry.key_ring) not in printed
    assert _ready(router) == {"one"}


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "nothing",
            "file:///etc/passwd",
            "http://",
            "http://[::1",
            "http://a b",
            "http://x:99999",
        ),
        *(
            "http://user:secret@127.0.0.1:9",
            "http://127.0.0.1:1/\r\nx: y",
            "unix:/x",
            "http://\u4e2d.invalid",
        ),
    ],
)
async def test_a_row_with_a_bad_address_harms_no_others(
    cluster: FakeCluster, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router(time.monotonic)
    servers: Servers = cluster.registry.servers
    links = Links(servers, router, cluster_token(cluster.registry.key_ring))
    async with scripted(cluster, idle, "one") as replicas:
        await servers.announce(replicas["one"].row(name="bad", url=url))
        await links.start()
        await _until(lambda: _ready(router) == {"one"})
        await servers.announce(
            replicas["one"].row(name="bad", boot_id="second", url="http://127.0.0.1:1")
        )
        followers = {task.get_name() for task in asyncio.all_tasks()}
        await asyncio.sleep(0.2)
        assert "manylora-bad" in followers
        assert _ready(router) == {"one"}
        await links.close()


async def test_what_is_known_goes_on_while_the_database_is_away_and_after_a_row_is_gone(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, servers = Router(time.monotonic), cluster.registry.servers
    links = Links(servers, router, cluster_token(cluster.registry.key_ring))
    num_failed = 0

    async def away(_: object = None) -> None:
        nonlocal num_failed
        num_failed += 1
        raise CapacityError("The database is away.")

    async with scripted(cluster, idle, "one") as replicas:
        await links.start()
        await _until(lambda: _ready(router))
        with monkeypatch.context() as patch:
            patch.setattr(servers, "listed", away)
            await _until(lambda: num_failed > 3)
            assert _ready(router) == {"one"}
        await servers.leave(replicas["one"].row())
        listed = [each.name for each in await servers.listed()]
        await asyncio.sleep(0.3)
        assert (listed, _ready(router)) == ([], {"one"})
        replicas["one"].die()
        await _until(lambda: not links.listed)
        assert _ready(router) == set()
        await links.close()


@pytest.mark.parametrize(
    ("state", "cut"), [("draining", []), ("ready", ["one"]), ("down", ["one"])]
)
async def test_reports_that_end_are_a_loss_unless_the_replica_has_drained(
    cluster: FakeCluster, state: str, cut: list[str]
) -> None:
    router, cuts = Router(time.monotonic), list[str]()
    links = Links(cluster.registry.servers, router, cluster_token(cluster.registry.key_ring))
    async with scripted(cluster, idle, "one") as replicas:
        await links.start()
        await _until(lambda: _ready(router))
        replicas["one"].state = state
        await _until(lambda: links.reports["one"].state == state)
        with links.using("one", lambda: cuts.append("one")):
            replicas["one"].ends_reports = True
            await _until(lambda: "one" not in links.reports)
        assert (_ready(router), cuts) == (set(), cut)
        await links.close()


async def test_a_gateway_that_stood_still_loses_no_replica_but_one_that_is_silent(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped, or swapped out: its timers are due before it reads what came meanwhile."""
    monkeypatch.setattr(links_module, "SILENT_S", 0.5)
    router, cuts = Router(time.monotonic), list[str]()
    links = Links(cluster.registry.servers, router, cluster_token(cluster.registry.key_ring))
    async with scripted(cluster, idle, "one", "two") as replicas:
        await links.start()
        await _until(lambda: _ready(router) == {"one", "two"})
        with (
            links.using("one", lambda: cuts.append("one")),
            links.using("two", lambda: cuts.append("two")),
        ):
            for _ in range(3):
                time.sleep(1.0)  # noqa: ASYNC251 - this blocks the loop as SIGSTOP does
                await asyncio.sleep(0.1)
            assert cuts == []
            replicas["two"].is_silent = True
            await _until(lambda: cuts)
            assert cuts == ["two"]
        assert _ready(router) == {"one"}
        await links.close()


@pytest.mark.parametrize("trouble", ["replica_refuses", "replica_not_reached"])
async def test_a_replica_that_is_not_reached_is_logged_at_once_and_then_at_times(
    cluster: FakeCluster,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    trouble: str,
) -> None:
    router, printed, tries = Router(time.monotonic), "", 0
    links = Links(cluster.registry.servers, router, cluster_token(cluster.registry.key_ring))
    stranger, get = ScriptedReplica("stranger", "another token", idle), links.session.get
    facts = {"url": "http://127.0.0.1:1"} if trouble == "replica_not_reached" else {}
    await stranger.start(cluster.registry, **facts)

    def count(*args: Any, **options: Any) -> Any:
        nonlocal tries
        tries += 1
        return get(*args, **options)

    monkeypatch.setattr(links.session, "get", count)
    await links.start()
    await _until(lambda: tries > 5)
    printed += capsys.readouterr().out
    assert [
        line for line in printed.splitlines() if trouble in line and "hint" in line
    ] == printed.splitlines()
    assert printed.count(trouble) == 1
    monkeypatch.setattr(links_module, "TROUBLE_S", 0.0)
    await _until(lambda: tries > 10)
    assert capsys.readouterr().out.count(trouble) > 1
    await links.close()
    stranger.die()


async def test_a_report_that_is_no_report_counts_as_lost(
    cluster: FakeCluster, gateway: FakeGateway
) -> None:
    async with scripted(cluster, idle, "one") as replicas:
        await gateway.sees(one="ready")
        replicas["one"].state = "unheard of"
        await gateway.sees()
        assert (await gateway.servers())["one"]["state"] == "lost"
        replicas["one"].state = "ready"
        await gateway.sees(one="ready")
