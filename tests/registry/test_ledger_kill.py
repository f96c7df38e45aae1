"""The ledger's promise, tried: a process is killed at random moments, and nothing acknowledged is lost or doubled."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sqlalchemy import func, select

from registry_samples import NOON
from weft.config import environment
from weft.registry.database import Database
from weft.registry.ledger import UsageLedger
from weft.registry.models import UsageEventRow, UsageRollupRow

KILLS = 20
PROGRAM = Path(__file__).parents[1] / "support" / "ledger_under_load.py"


def _acknowledged_until_killed(data_dir: Path, run: int, events: int, seconds: float) -> set[str]:
    """Kill so many seconds after so many events were acknowledged."""
    command = [sys.executable, str(PROGRAM), str(data_dir), str(run)]
    env = {**environment(), "PYTHONPATH": str(PROGRAM.parent)}  # PYTHONSAFEPATH keeps a program's folder off the path
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
        acknowledged |= _acknowledged_until_killed(tmp_path, run, moments.randrange(100), moments.uniform(0.0, 0.05))
    assert len(acknowledged) > 500
    asyncio.run(_check(tmp_path, acknowledged))


async def _check(data_dir: Path, acknowledged: set[str]) -> None:
    database = await Database.open(None, data_dir)
    ledger = await UsageLedger.open(database, data_dir / "usage", clock=lambda: NOON)
    async with database.read() as session:
        stored = {
            event_id: (status, tokens)
            for event_id, status, tokens in await session.execute(
                select(UsageEventRow.id, UsageEventRow.status, UsageEventRow.completion_tokens)
            )
        }
        requests, tokens = (
            await session.execute(select(func.sum(UsageRollupRow.requests), func.sum(UsageRollupRow.completion_tokens)))
        ).one()
    assert acknowledged <= set(stored)
    assert {stored[event_id] for event_id in acknowledged} == {("stop", 70)}
    cut_off = {stored[event_id] for event_id in set(stored) - acknowledged}
    assert cut_off <= {("stop", 70), ("interrupted", 32), ("interrupted", 64)}
    assert (requests, tokens) == (len(stored), sum(tokens for _, tokens in stored.values()))
    assert await ledger.check() == 0
    assert list((data_dir / "usage").glob("*.damaged")) == []
    await ledger.close()
    await database.close()
