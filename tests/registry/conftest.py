from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from registry_samples import StandingClock
from weft.registry.database import Database
from weft.registry.registry import Registry


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def clock() -> StandingClock:
    return StandingClock()


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await Database.open(None, tmp_path)
    yield opened
    await opened.close()


@pytest.fixture
async def registry(tmp_path: Path, clock: StandingClock) -> AsyncIterator[Registry]:
    opened = await Registry.open(None, tmp_path, "admin-secret", clock=clock, monotonic=clock.monotonic)
    yield opened
    await opened.close()
