from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from fake_cluster import FakeCluster, FakeGateway, fake_cluster
from manylora.server.cluster import links


@pytest.fixture(autouse=True)
def quick_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways look often at the list of servers."""
    monkeypatch.setattr(links, "LIST_S", 0.05)
    monkeypatch.setattr(links, "RECONNECT_S", 0.02)


@pytest.fixture
async def cluster(tmp_path: Path, database_url: str | None) -> AsyncIterator[FakeCluster]:
    async with fake_cluster(tmp_path, database_url) as opened:
        yield opened


@pytest.fixture
async def gateway(cluster: FakeCluster) -> FakeGateway:
    return await cluster.gateway()


@pytest.fixture
async def key(cluster: FakeCluster) -> str:
    return await cluster.key("acme")


@pytest.fixture
async def client(gateway: FakeGateway, key: str) -> AsyncIterator[httpx.AsyncClient]:
    async with gateway.client(key) as opened:
        yield opened
