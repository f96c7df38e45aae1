from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from api_server import eventually
from fake_cluster import FakeCluster
from manylora.errors import CapacityError
from manylora.registry.servers import Server
from manylora.server.cluster import membership
from manylora.server.cluster.membership import Membership
from registry_samples import server_sample

pytestmark = pytest.mark.anyio
OWN = server_sample()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "BEAT_S", 0.01)


async def test_a_server_is_listed_from_start_to_stop(cluster: FakeCluster) -> None:
    servers = cluster.registry.servers
    member = Membership(servers, OWN)
    await member.start()
    assert await servers.listed() == [OWN]
    assert 1 <= member.drain() < Membership(servers, replace(OWN, role="gateway")).drain()
    await asyncio.sleep(0.1)
    assert [each.state for each in await servers.listed()] == ["draining"]
    await member.stop()
    assert await servers.listed() == []


async def test_a_drain_is_told_at_once_and_waits_for_no_database(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "BEAT_S", 1_000_000.0)
    told: asyncio.Queue[str] = asyncio.Queue()
    member = Membership(cluster.registry.servers, OWN)
    await member.start()

    async def hang(server: Server) -> None:
        told.put_nowait(server.state)
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(cluster.registry.servers, "announce", hang)
        member.drain()
        assert await asyncio.wait_for(told.get(), 60) == "draining"
    await member.stop()


async def test_beats_outlive_an_outage_of_the_database(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, num_failed = cluster.registry.servers, 0
    member = Membership(servers, OWN)
    await member.start()

    async def away(_: Server) -> None:
        nonlocal num_failed
        num_failed += 1
        raise CapacityError("The database is away.")

    with monkeypatch.context() as patch:
        patch.setattr(servers, "announce", away)
        patch.setattr(servers, "leave", away)
        async with asyncio.timeout(60):
            while num_failed < 3:  # noqa: ASYNC110 - beats tell nobody
                await asyncio.sleep(0.01)
        await servers.database.check()
    await cluster.registry.servers.leave(OWN)
    async with asyncio.timeout(60):
        while await servers.listed() != [OWN]:  # noqa: ASYNC110 - the same
            await asyncio.sleep(0.01)
    with monkeypatch.context() as patch:
        patch.setattr(servers, "leave", away)
        await member.stop()  # its row ages
    assert await servers.listed() == [OWN]


async def test_two_servers_with_one_name_say_so(cluster: FakeCluster) -> None:
    one, other = (
        Membership(cluster.registry.servers, replace(OWN, boot_id=boot_id))
        for boot_id in ("one", "other")
    )
    with capture_logs() as logs:
        await one.start()
        await asyncio.sleep(0.1)
        assert logs == []
        await other.start()
        await eventually(lambda: {log["boot_id"] for log in logs} == {"one", "other"})
        assert {log["event"] for log in logs} == {"server_name_taken"}
        assert "data folder" in logs[0]["hint"]
    for each in (other, one):
        await each.stop()


async def test_a_start_without_a_database_fails(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(_: Server) -> None:
        raise CapacityError("The database is away.")

    monkeypatch.setattr(cluster.registry.servers, "announce", away)
    with pytest.raises(CapacityError):
        await Membership(cluster.registry.servers, OWN).start()
