"""Limits across servers, in virtual time: several processes over one real database, with demand at twice the limit."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from postgres_server import KINDS, database_of
from shared_limits import World
from weft.registry.limits import Limits

pytestmark = pytest.mark.anyio
SECONDS = {"sqlite": 90.0, "postgresql": 25.0}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def world(kind: str, tmp_path: Path) -> AsyncIterator[World]:
    async with World.open(database_of(kind), tmp_path, 4) as opened:
        yield opened


async def test_requests_per_minute_at_twice_the_demand(world: World, kind: str) -> None:
    limit, seconds = 600, SECONDS[kind]
    await world.load(Limits(requests_per_minute=limit), seconds, 60 if kind == "postgresql" else 35, random.Random(1))
    admitted = [(each.at_s, 1.0) for each in world.requests]
    assert world.excess(admitted, limit, limit / 60) <= 1e-6
    assert len(admitted) >= 0.99 * (limit + limit / 60 * seconds) or kind == "postgresql"
    print(len(admitted) / (limit + limit / 60 * seconds), [s.leases.num_exchanges / seconds for s in world.servers])
