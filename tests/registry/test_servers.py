from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from manylora.registry import servers
from manylora.registry.db.clock import to_micros
from manylora.registry.db.models import ServerRow
from manylora.registry.registry import Registry
from manylora.registry.servers import GONE, server_name
from registry_samples import StandingClock, server_sample

pytestmark = pytest.mark.anyio
ONE = server_sample(url="http://10.0.0.1:8000")
TWO = replace(ONE, name="srv_2", url="http://10.0.0.2:8000")
GATEWAY = replace(ONE, name="srv_0", role="gateway", model="", base="")


@pytest.fixture(autouse=True)
def database_clock(monkeypatch: pytest.MonkeyPatch) -> StandingClock:
    """The database's clock, which is not the server's own."""
    standing = StandingClock()

    async def now(_: AsyncSession) -> int:
        return to_micros(standing())

    monkeypatch.setattr(servers, "database_us", now)
    return standing


async def test_servers_are_listed_by_name_and_role(registry: Registry) -> None:
    for each in (TWO, GATEWAY, ONE):
        await registry.servers.announce(each)
    assert await registry.servers.listed() == [GATEWAY, ONE, TWO]
    assert await registry.servers.listed("replica") == [ONE, TWO]
    assert await registry.servers.listed("gateway") == [GATEWAY]


async def test_the_newest_word_of_a_server_counts(registry: Registry) -> None:
    await registry.servers.announce(ONE)
    changed = replace(ONE, boot_id="b2", url="http://10.0.0.9:1", state="draining", version="2")
    await registry.servers.announce(changed)
    assert await registry.servers.listed() == [changed]
    await registry.servers.leave(ONE)
    assert await registry.servers.listed() == [changed], "an earlier boot leaves"
    await registry.servers.leave(changed)
    assert await registry.servers.listed() == []
    await registry.servers.leave(changed)


async def test_the_boot_before_is_told(registry: Registry) -> None:
    assert await registry.servers.announce(ONE) is None
    assert await registry.servers.announce(replace(ONE, boot_id="b2")) == "b1"
    assert await registry.servers.announce(TWO) is None
    assert await registry.servers.announce(ONE) == "b2"


@pytest.mark.parametrize("seconds", [-100, 100])
async def test_a_servers_own_clock_may_be_wrong(
    registry: Registry, clock: StandingClock, seconds: float
) -> None:
    await registry.servers.announce(ONE)
    clock.advance(seconds)
    await registry.servers.announce(TWO)
    assert await registry.servers.listed() == [ONE, TWO]
    clock.advance(-seconds)
    assert await registry.servers.listed() == [ONE, TWO]


async def test_a_server_without_a_beat_is_not_listed_and_then_forgotten(
    registry: Registry, database_clock: StandingClock
) -> None:
    await registry.servers.announce(ONE)
    database_clock.advance(GONE.total_seconds())
    assert await registry.servers.listed() == [ONE]
    database_clock.advance(1)
    assert await registry.servers.listed() == []
    await registry.servers.announce(TWO)
    assert len(await _rows(registry)) == 2
    database_clock.advance(GONE.total_seconds())
    await registry.servers.announce(TWO)
    assert await _rows(registry) == ["srv_2"]
    await registry.servers.announce(ONE)
    assert await registry.servers.listed() == [ONE, TWO]


async def _rows(registry: Registry) -> list[str]:
    from sqlalchemy import select

    async with registry.database.read() as session:
        return sorted(await session.scalars(select(ServerRow.name)))


def test_a_servers_name_stays_with_its_folder(tmp_path: Path) -> None:
    names = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        names.append(server_name(tmp_path / folder))
        assert server_name(tmp_path / folder) == names[-1]
        assert [path.name for path in (tmp_path / folder).iterdir()] == ["server-id"]
    assert names[0] != names[1]
    assert all(name.startswith("srv_") and len(name) == 28 for name in names)
