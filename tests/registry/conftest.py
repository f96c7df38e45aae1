from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from manylora.registry.db.database import Database
from manylora.registry.db.models import TenantRow
from manylora.registry.registry import Registry
from postgres_server import KINDS, database_of
from ready_registry import put_registry
from registry_samples import StandingClock


@pytest.fixture
def clock() -> StandingClock:
    return StandingClock()


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest) -> str | None:
    """A database of its own for the test: SQLite in its folder, or in a real PostgreSQL."""
    return database_of(request.param)


@pytest.fixture
async def database(tmp_path: Path, database_url: str | None) -> AsyncIterator[Database]:
    opened = await Database.open(database_url, tmp_path)
    yield opened
    await opened.close()


@pytest.fixture
async def registry(
    tmp_path: Path, clock: StandingClock, database_url: str | None
) -> AsyncIterator[Registry]:
    if database_url is None:
        put_registry(tmp_path)
    opened = await Registry.open(
        database_url, tmp_path, "admin-secret", clock=clock, monotonic=clock.monotonic
    )
    yield opened
    await opened.close()


@pytest.fixture
async def acme(registry: Registry) -> TenantRow:
    return await registry.tenants.create_tenant("acme")


@pytest.fixture
async def other(registry: Registry) -> TenantRow:
    return await registry.tenants.create_tenant("other")
