"""Requests that a server was killed under: another server may say first what their clients got."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import select

from manylora.errors import CapacityError
from manylora.registry.db.database import Database
from manylora.registry.db.models import UsageEventRow
from manylora.registry.usage.journal import Journal
from manylora.registry.usage.ledger import UsageLedger
from registry_samples import StandingClock, usage_event
from usage_sums import wrong_sums

pytestmark = pytest.mark.anyio
LONG_S = 3600.0
Stored = dict[str, tuple[str, int]]
Opened = Callable[..., Awaitable[UsageLedger]]


async def _stored(database: Database) -> Stored:
    assert await wrong_sums(database) == 0
    async with database.read() as session:
        rows = await session.scalars(select(UsageEventRow))
        return {row.id: (row.status, row.completion_tokens) for row in rows}


@pytest.fixture
async def opened(database: Database, tmp_path: Path, clock: StandingClock) -> AsyncIterator[Opened]:
    ledgers: list[UsageLedger] = []

    async def opened(
        grace_s: float = LONG_S, interval_s: float = LONG_S, folder: str = "usage"
    ) -> UsageLedger:
        """A ledger of this folder, as a server that starts opens it."""
        journal = await Journal.open(tmp_path / folder)
        ledger = UsageLedger(
            database, journal, clock=clock, monotonic=clock.monotonic, interval_s=interval_s
        )
        await ledger.start(grace_s)
        ledgers.append(ledger)
        return ledger

    yield opened
    for ledger in ledgers:
        if not all(task.done() for task in ledger._tasks):  # neither killed nor closed
            await ledger.close()


async def _die(ledger: UsageLedger) -> None:
    """Let go of the folder as a killed process does: nothing is moved."""
    for task in ledger._tasks:
        task.cancel()
    await asyncio.gather(*ledger._tasks, return_exceptions=True)
    await ledger.journal.close()


@asynccontextmanager
async def _witness(opened: Opened) -> AsyncIterator[UsageLedger]:
    """The ledger of another server over the same database."""
    ledger = await opened(folder="witness")
    yield ledger
    await ledger.flush()


@pytest.fixture
async def killed(opened: Opened) -> None:
    """A server that died under one request, and had ended another."""
    ledger = await opened()
    for tokens in (32, 96, 64):
        ledger.progress(usage_event("use_cut", completion_tokens=tokens))
    ledger.progress(usage_event("use_done", completion_tokens=32))
    await ledger.record(usage_event("use_done", completion_tokens=40))
    await _die(ledger)


DONE = {"use_done": ("stop", 40)}
BILLED = {**DONE, "use_cut": ("interrupted", 96)}


@pytest.mark.usefixtures("killed")
async def test_marks_are_billed_when_the_grace_is_over(opened: Opened, database: Database) -> None:
    await opened(grace_s=0.05, interval_s=0.01)
    async with asyncio.timeout(60):
        while await _stored(database) != BILLED:  # noqa: ASYNC110 - the ledger tells nobody
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("killed")
async def test_within_the_grace_only_ends_are_billed(opened: Opened, database: Database) -> None:
    ledger = await opened()
    for number in range(3):
        assert await _stored(database) == DONE | {
            f"use_{each}": ("stop", 20) for each in range(number)
        }
        await ledger.record(usage_event(f"use_{number}"))
        await ledger.flush()


@pytest.mark.usefixtures("killed")
@pytest.mark.parametrize("is_early", [True, False])
async def test_another_servers_word_counts(
    opened: Opened, database: Database, is_early: bool
) -> None:
    """It may come before the server starts again, or within the grace."""
    ledger = None if is_early else await opened(grace_s=0.2, interval_s=0.01)
    async with _witness(opened) as witness:
        await witness.record(usage_event("use_cut", status="error", completion_tokens=90))
    ledger = ledger or await opened(grace_s=0.05, interval_s=0.01)
    async with asyncio.timeout(60):
        while ledger._open_marks:  # noqa: ASYNC110 - the same
            await asyncio.sleep(0.01)
    assert await _stored(database) == {**DONE, "use_cut": ("error", 90)}


@pytest.mark.usefixtures("killed")
async def test_a_late_word_of_another_server_changes_nothing(
    opened: Opened, database: Database
) -> None:
    await opened(grace_s=0.0)
    async with _witness(opened) as witness:
        await witness.record(usage_event("use_cut", status="error", completion_tokens=90))
    assert await _stored(database) == BILLED


@pytest.mark.usefixtures("killed")
@pytest.mark.parametrize("has_flushed", [True, False])
@pytest.mark.parametrize("ends", ["dies", "closes"])
async def test_an_end_within_the_grace_loses_nothing(
    opened: Opened, database: Database, ends: str, has_flushed: bool
) -> None:
    for number in range(3):
        ledger = await opened()
        await ledger.record(usage_event(f"use_{number}"))
        if has_flushed:
            await ledger.flush()
        await (_die(ledger) if ends == "dies" else ledger.close())
        assert "use_cut" not in await _stored(database)
    await opened(grace_s=0.0)
    assert await _stored(database) == BILLED | {
        f"use_{number}": ("stop", 20) for number in range(3)
    }


@pytest.mark.usefixtures("killed")
async def test_a_death_between_the_bill_and_the_end_of_its_file_bills_once(
    opened: Opened, database: Database
) -> None:
    ledger = await opened()
    await ledger._bill_later(["use_cut"], 0.0)
    await ledger._bill_unwritten()
    await _die(ledger)
    await opened(grace_s=0.0)
    assert await _stored(database) == BILLED


@pytest.mark.usefixtures("killed")
async def test_a_start_that_cannot_write_the_marks_again_keeps_their_file(
    opened: Opened, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: bytes) -> None:
        raise CapacityError("The disk is full.", code="storage.full")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", full)
        await _die(await opened())
        assert await _stored(database) == DONE
    await opened(grace_s=0.0)
    assert await _stored(database) == BILLED
