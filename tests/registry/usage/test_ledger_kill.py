"""The ledger's promise, tried: its process, or its database, is killed at random moments, and nothing acknowledged is
lost or doubled.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sqlalchemy import func, select

from manylora.config import environment
from manylora.errors import CapacityError
from manylora.registry.db.database import Database
from manylora.registry.db.models import UsageEventRow
from manylora.registry.usage.journal import Journal
from manylora.registry.usage.ledger import UsageLedger
from postgres_server import OwnPostgres
from registry_samples import NOON, usage_event
from usage_sums import wrong_sums

KILLS = 8
PATIENCE_S = 60.0
PROGRAM = Path(__file__).parents[2] / "support" / "ledger_under_load.py"


def _acknowledged_until_killed(data_dir: Path, run: int, events: int, seconds: float) -> set[str]:
    """Kill so many seconds after so many events were acknowledged."""
    command = [sys.executable, str(PROGRAM), str(data_dir), str(run)]
    env = {
        **environment(),
        "PYTHONPATH": str(PROGRAM.parent),
    }  # PYTHONSAFEPATH keeps a program's folder off the path
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        printed = "".join(process.stdout.readline().decode() for _ in range(events))
        time.sleep(seconds)
        process.kill()
        printed += process.stdout.read().decode()
    assert process.returncode == -9
    return {line for line in printed.split("\n")[:-1] if line}


@pytest.mark.slow
def test_killed_at_any_moment_every_acknowledged_event_counts_exactly_once(tmp_path: Path) -> None:
    moments = random.Random(7)
    acknowledged: set[str] = set()
    for run in range(KILLS):
        acknowledged |= _acknowledged_until_killed(
            tmp_path, run, moments.randrange(100), moments.uniform(0.0, 0.05)
        )
    assert len(acknowledged) > 200
    asyncio.run(_check(None, tmp_path, acknowledged))


@pytest.mark.slow
def test_whenever_the_database_dies_every_event_counts_exactly_once(tmp_path: Path) -> None:
    with OwnPostgres() as postgres:
        acknowledged = asyncio.run(_record_while_it_dies(postgres, tmp_path))
        assert len(acknowledged) > 200
        asyncio.run(_check(postgres.url, tmp_path, acknowledged))


async def _record_while_it_dies(postgres: OwnPostgres, data_dir: Path) -> set[str]:
    """Record without pause; each time the database is back, everything until its death is in it within seconds."""
    moments = random.Random(8)
    database = await Database.open(postgres.url, data_dir)
    journal = await Journal.open(data_dir / "usage")
    ledger = UsageLedger(database, journal, interval_s=0.02)
    await ledger.start()
    acknowledged: set[str] = set()
    is_over = asyncio.Event()

    async def write(writer: int) -> None:
        for number in itertools.count():
            if is_over.is_set():
                return
            event_id = f"use_{writer}_{number}"
            ledger.progress(usage_event(event_id, completion_tokens=64))
            await ledger.record(usage_event(event_id, completion_tokens=70))
            acknowledged.add(event_id)
            await asyncio.sleep(0.005)

    writers = [asyncio.create_task(write(writer)) for writer in range(4)]
    for kill in range(KILLS):
        await asyncio.sleep(moments.uniform(0.0, 0.2))
        await asyncio.to_thread(postgres.crash)
        if kill % 5 == 0:
            await asyncio.to_thread(postgres.kill)
            await asyncio.to_thread(postgres.start)
        due, back = len(acknowledged), time.monotonic()
        while (stored := await _count(database)) < due:
            back = time.monotonic() if stored < 0 else back
            assert time.monotonic() - back < PATIENCE_S
    is_over.set()
    await asyncio.gather(*writers)
    await ledger.close()
    await database.close()
    return acknowledged


async def _count(database: Database) -> int:
    """Events stored; negative while the database is away."""
    try:
        await asyncio.sleep(0.05)
        async with database.read() as session:
            return await session.scalar(select(func.count()).select_from(UsageEventRow)) or 0
    except CapacityError:
        return -1


async def _check(url: str | None, data_dir: Path, acknowledged: set[str]) -> None:
    database = await Database.open(url, data_dir)
    ledger = UsageLedger(database, await Journal.open(data_dir / "usage"), clock=lambda: NOON)
    await ledger.start()
    async with database.read() as session:
        rows = await session.scalars(select(UsageEventRow))
        stored = {row.id: (row.status, row.completion_tokens) for row in rows}
    assert acknowledged <= set(stored)
    assert {stored[event_id] for event_id in acknowledged} == {("stop", 70)}
    cut_off = {stored[event_id] for event_id in set(stored) - acknowledged}
    assert cut_off <= {("stop", 70), ("interrupted", 32), ("interrupted", 64)}
    assert await wrong_sums(database) == 0
    assert list((data_dir / "usage").glob("*.damaged")) == []
    await ledger.close()
    await database.close()
