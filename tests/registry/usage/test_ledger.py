from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from math import inf
from pathlib import Path
from unittest.mock import DEFAULT, AsyncMock, Mock

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import ProgrammingError

from manylora.errors import CapacityError, InvalidRequestError
from manylora.registry.db import database as database_module
from manylora.registry.db.clock import month_after
from manylora.registry.db.database import Database
from manylora.registry.db.models import UsageEventRow
from manylora.registry.records import UsageQuery
from manylora.registry.usage import ledger as ledger_module
from manylora.registry.usage import write as usage
from manylora.registry.usage.journal import Journal, JournalFiles, encode_line, read_lines
from manylora.registry.usage.ledger import UsageLedger
from postgres_server import fresh_database
from registry_samples import NOON, StandingClock, usage_event
from usage_sums import wrong_sums

pytestmark = pytest.mark.anyio

Restarted = Callable[[], Awaitable[dict[str, tuple[str, int]]]]
ALL = UsageQuery(start=NOON - timedelta(days=1), end=NOON + timedelta(days=1))


async def _open(
    database: Database,
    tmp_path: Path,
    clock: StandingClock,
    interval_s: float = 3600.0,
    journal: Journal | None = None,
) -> UsageLedger:
    journal = journal or await Journal.open(tmp_path / "usage")
    ledger = UsageLedger(
        database, journal, clock=clock, monotonic=clock.monotonic, interval_s=interval_s
    )
    await ledger.start()
    return ledger


@pytest.fixture
async def other_database(tmp_path: Path, database_url: str | None) -> AsyncIterator[Database]:
    """An empty one of the same kind, for a database that was lost."""
    (tmp_path / "other").mkdir()
    opened = await Database.open(
        None if database_url is None else fresh_database(), tmp_path / "other"
    )
    yield opened
    await opened.close()


@pytest.fixture
async def journal(tmp_path: Path) -> Journal:
    return await Journal.open(tmp_path / "usage")


@pytest.fixture
async def ledger(
    database: Database, tmp_path: Path, clock: StandingClock, journal: Journal
) -> AsyncIterator[UsageLedger]:
    opened = await _open(database, tmp_path, clock, journal=journal)
    yield opened
    if _movers():  # else it was killed
        await opened.close()


@pytest.fixture
def restarted(database: Database, tmp_path: Path, clock: StandingClock) -> Restarted:
    async def restarted() -> dict[str, tuple[str, int]]:
        """What the database holds after another process had the folder."""
        await (await _open(database, tmp_path, clock)).close()
        assert await wrong_sums(database) == 0
        return await _stored(database)

    return restarted


def _movers() -> list[asyncio.Task[None]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "manylora-usage-mover"]


async def _die(journal: Journal) -> None:
    """Let go of the folder as a killed process does: nothing is moved."""
    for mover in (movers := _movers()):
        mover.cancel()
    await asyncio.gather(*movers, return_exceptions=True)
    await journal.close()


async def _stored(database: Database) -> dict[str, tuple[str, int]]:
    async with database.read() as session:
        rows = await session.scalars(select(UsageEventRow))
        return {row.id: (row.status, row.completion_tokens) for row in rows}


async def _until_moved(database: Database, count: int) -> None:
    async with asyncio.timeout(60):
        while len(await _stored(database)) < count:  # noqa: ASYNC110 - the ledger tells nobody when it is done
            await asyncio.sleep(0.005)


def _files(tmp_path: Path, suffix: str = "journal") -> list[Path]:
    return sorted((tmp_path / "usage").glob(f"*.{suffix}"))


async def test_the_same_id_counts_once(ledger: UsageLedger, database: Database) -> None:
    await ledger.record(usage_event("use_1", completion_tokens=7))
    await ledger.record(usage_event("use_1", completion_tokens=8))
    await ledger.flush()
    await ledger.record(usage_event("use_1", completion_tokens=9))
    await ledger.flush()
    assert await _stored(database) == {"use_1": ("stop", 7)}
    assert (await ledger.query(ALL)).totals.completion_tokens == 7


async def test_the_journal_is_not_emptied_into_a_database_that_was_deleted(
    tmp_path: Path, clock: StandingClock, caplog: pytest.LogCaptureFixture
) -> None:
    database = await Database.open(None, tmp_path)
    ledger = await _open(database, tmp_path, clock)
    await ledger.record(usage_event("use_1", completion_tokens=7))
    (tmp_path / "registry.sqlite").unlink()
    for _ in range(2):
        with pytest.raises(CapacityError) as refusal:
            await ledger.flush()
        assert refusal.value.code == "db.lost"
    with pytest.raises(CapacityError):
        ledger.check()
    await ledger.close()
    assert len(caplog.records) == 1
    await database.close()
    restarted = await Database.open(None, tmp_path)
    await (await _open(restarted, tmp_path, clock)).close()
    assert await _stored(restarted) == {"use_1": ("stop", 7)}
    await restarted.close()


async def test_a_deleted_file_is_noticed_without_a_write(
    tmp_path: Path, clock: StandingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "LOOK_S", 0.01)
    database = await Database.open(None, tmp_path)
    ledger = await _open(database, tmp_path, clock)
    path = tmp_path / "registry.sqlite"

    async def until(is_lost: bool) -> None:
        async with asyncio.timeout(60):
            while is_lost != bool(database._files._lost):  # type: ignore[union-attr]  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0.01)

    ledger.check()
    path.rename(tmp_path / "away")
    await until(True)
    with pytest.raises(CapacityError):
        ledger.check()
    (tmp_path / "away").rename(path)
    await until(False)
    ledger.check()
    await ledger.close()
    await database.close()


async def test_a_closed_file_that_was_deleted_does_not_keep_the_others_back(
    ledger: UsageLedger, database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await ledger.record(usage_event("use_1"))
    await ledger.journal.seal()
    (path,) = _files(tmp_path)
    path.unlink()
    await ledger.record(usage_event("use_2"))
    await ledger.flush()
    assert (await _stored(database)).keys() == {"use_2"}
    assert "its usage is lost" in caplog.text


async def test_ids_are_distinct_and_sort_by_time(ledger: UsageLedger, clock: StandingClock) -> None:
    early = {ledger.mint_id() for _ in range(1000)}
    clock.advance(1)
    late = ledger.mint_id()
    assert len(early) == 1000
    assert all(one < late for one in early)


async def test_what_cannot_be_stored_is_refused(ledger: UsageLedger) -> None:
    with pytest.raises(InvalidRequestError):
        await ledger.record(usage_event("use_1", prompt_tokens=-1))
    with pytest.raises(InvalidRequestError):
        ledger.progress(usage_event("use_1", prompt_tokens=-1))


async def test_closing_moves_the_rest(ledger: UsageLedger, database: Database) -> None:
    await ledger.record(usage_event("use_1"))
    await ledger.close()
    assert list(await _stored(database)) == ["use_1"]
    with pytest.raises(CapacityError):
        await ledger.record(usage_event("use_2"))
    ledger.progress(usage_event("use_3"))


async def test_a_request_that_was_cut_off_is_billed_from_its_last_mark(
    ledger: UsageLedger, journal: Journal, restarted: Restarted
) -> None:
    for tokens in (32, 96, 64):
        ledger.progress(usage_event("use_cut", status="running", completion_tokens=tokens))
    ledger.progress(usage_event("use_done", status="running", completion_tokens=32))
    await ledger.record(usage_event("use_done", completion_tokens=40))
    await _die(journal)
    assert await restarted() == {"use_cut": ("interrupted", 96), "use_done": ("stop", 40)}


async def test_marks_of_running_requests_outlive_the_files_that_held_them(
    ledger: UsageLedger, journal: Journal, tmp_path: Path, restarted: Restarted
) -> None:
    ledger.progress(usage_event("use_long", completion_tokens=32))
    ledger.progress(usage_event("use_ends", completion_tokens=32))
    for number in range(3):
        await ledger.record(usage_event(f"use_{number}"))
        await ledger.flush()
    await ledger.record(usage_event("use_ends", completion_tokens=33))
    await ledger.flush()
    assert len(_files(tmp_path)) == 1
    await _die(journal)
    others = {f"use_{number}": ("stop", 20) for number in range(3)}
    assert await restarted() == {
        **others,
        "use_long": ("interrupted", 32),
        "use_ends": ("stop", 33),
    }


async def test_a_file_that_comes_back_changes_nothing(
    ledger: UsageLedger, tmp_path: Path, restarted: Restarted
) -> None:
    ledger.progress(usage_event("use_1", completion_tokens=1))
    await ledger.record(usage_event("use_1", completion_tokens=2))
    (path,) = _files(tmp_path)
    content = path.read_bytes()
    await ledger.close()
    for leftover in (content.splitlines(keepends=True)[0], content):
        path.write_bytes(leftover)
        assert await restarted() == {"use_1": ("stop", 2)}


@pytest.mark.parametrize(
    "damage", [b"00000000 3 abc\n", encode_line(b"{}"), encode_line(b"not json")]
)
async def test_a_damaged_file_gives_what_it_can_and_is_kept(
    ledger: UsageLedger, journal: Journal, tmp_path: Path, restarted: Restarted, damage: bytes
) -> None:
    await ledger.record(usage_event("use_1"))
    await ledger.record(usage_event("use_2"))
    await _die(journal)
    (path,) = _files(tmp_path)
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + damage + second)
    assert sorted(await restarted()) == ["use_1", "use_2"]
    assert (_files(tmp_path), len(_files(tmp_path, "damaged"))) == ([], 1)


async def test_a_line_of_a_newer_manylora_is_understood(
    ledger: UsageLedger, journal: Journal, tmp_path: Path, restarted: Restarted
) -> None:
    await ledger.record(usage_event("use_1"))
    await _die(journal)
    (path,) = _files(tmp_path)
    (payload,), _ = read_lines(path, bytes)
    path.write_bytes(encode_line(payload.replace(b'"event":{', b'"event":{"later_field":1,')))
    assert list(await restarted()) == ["use_1"]
    assert _files(tmp_path, "damaged") == []


async def test_a_full_disk_refuses_the_end_and_bills_the_last_mark(
    ledger: UsageLedger,
    database: Database,
    tmp_path: Path,
    journal: Journal,
    restarted: Restarted,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ledger.progress(usage_event("use_1", completion_tokens=32))
    await ledger.record(usage_event("use_0"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", Mock(side_effect=OSError(errno.ENOSPC, "full")))
        with pytest.raises(CapacityError) as caught:
            await ledger.record(usage_event("use_1", completion_tokens=50))
        await ledger.flush()
        assert _files(tmp_path)[0].stem.endswith("1"), (
            "the mark of a running request has no other place"
        )
    assert caught.value.code == "storage.full"
    expected = {"use_0": ("stop", 20), "use_1": ("interrupted", 32)}
    assert await _stored(database) == expected
    await ledger.record(usage_event("use_2"))
    await ledger.flush()
    assert _files(tmp_path) == []
    await _die(journal)
    assert await restarted() == {**expected, "use_2": ("stop", 20)}


async def test_a_caller_that_gives_up_waiting_has_recorded(
    ledger: UsageLedger, database: Database, tmp_path: Path
) -> None:
    ledger.progress(usage_event("use_1", completion_tokens=1))
    recording = asyncio.create_task(ledger.record(usage_event("use_1")))
    await asyncio.sleep(0)
    recording.cancel()
    with pytest.raises(asyncio.CancelledError):
        await recording
    await ledger.flush()
    assert await _stored(database) == {"use_1": ("stop", 20)}
    assert _files(tmp_path) == [], "no mark is written again"


async def test_a_database_that_fails_delays_events_and_loses_none(
    database: Database, tmp_path: Path, clock: StandingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = await _open(database, tmp_path, clock, interval_s=0.0)
    has_failed = asyncio.Event()

    async def unavailable(*_: object) -> int:
        has_failed.set()
        raise CapacityError("down", code="db.unavailable")

    insert_events = usage.insert_events
    monkeypatch.setattr(usage, "insert_events", unavailable)
    await ledger.record(usage_event("use_1"))
    await asyncio.wait_for(has_failed.wait(), 60)
    await ledger.record(usage_event("use_2"))
    clock.advance(90)
    assert ledger.lag_s() == 90
    assert await _stored(database) == {}
    monkeypatch.setattr(usage, "insert_events", insert_events)
    await _until_moved(database, 2)
    await ledger.record(usage_event("use_3"))
    await _until_moved(database, 3)
    await ledger.close()


async def test_a_journal_that_cannot_be_read_is_unavailable_and_stays(
    ledger: UsageLedger, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ledger.record(usage_event("use_1"))
    with monkeypatch.context() as patched:
        patched.setattr(ledger_module, "read_lines", Mock(side_effect=OSError(errno.EIO, "broken")))
        with pytest.raises(CapacityError) as caught:
            await ledger.flush()
    assert caught.value.code == "storage.unavailable"
    assert len(_files(tmp_path)) == 1
    await ledger.flush()
    assert list(await _stored(database)) == ["use_1"]


async def test_the_lag_is_the_age_of_the_oldest_event_not_moved(
    ledger: UsageLedger, clock: StandingClock
) -> None:
    assert ledger.lag_s() == 0
    await ledger.record(usage_event("use_1"))
    clock.advance(3)
    await ledger.record(usage_event("use_2"))
    clock.advance(4)
    assert ledger.lag_s() == 7
    await ledger.flush()
    assert ledger.lag_s() == 0


async def test_an_event_is_moved_though_a_flush_begins_just_before_it_is_written(
    ledger: UsageLedger, database: Database
) -> None:
    """The flush has looked into the journal by then: the event waits for the next one, and counts as waiting."""
    await asyncio.gather(ledger.record(usage_event("use_1")), ledger.flush())
    assert (ledger.unmoved_since < inf) != ("use_1" in await _stored(database))
    await ledger.flush()
    assert list(await _stored(database)) == ["use_1"]
    assert ledger.unmoved_since == inf


async def test_a_failed_move_is_tried_again_whoever_else_fails_meanwhile(
    database: Database, tmp_path: Path, clock: StandingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = await _open(database, tmp_path, clock, interval_s=0.05)
    has_failed = asyncio.Event()

    async def unavailable(*_: object) -> int:
        has_failed.set()
        raise CapacityError("down", code="db.unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(usage, "insert_events", unavailable)
        await ledger.record(usage_event("use_1"))
        await asyncio.wait_for(has_failed.wait(), 60)
        await asyncio.sleep(0)  # the task that moves events waits before it tries again
        with pytest.raises(CapacityError):
            await ledger.flush()
    await _until_moved(database, 1)
    await ledger.close()


async def test_many_flushes_at_once_move_each_event_once(
    ledger: UsageLedger, database: Database
) -> None:
    async def record_and_flush(number: int) -> None:
        await ledger.record(usage_event(f"use_{number}"))
        await ledger.flush()
        assert f"use_{number}" in await _stored(database)

    await asyncio.gather(*(record_and_flush(number) for number in range(30)))
    assert (await ledger.query(ALL)).totals.requests == 30
    assert await wrong_sums(database) == 0


async def test_flushes_asked_for_during_one_share_the_next(
    ledger: UsageLedger, journal: Journal, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal = AsyncMock(wraps=journal.seal)
    monkeypatch.setattr(journal, "seal", seal)
    await ledger.record(usage_event("use_1"))
    first = asyncio.create_task(ledger.flush())
    await asyncio.sleep(0)
    await ledger.record(usage_event("use_2"))
    later = [asyncio.create_task(ledger.flush()) for _ in range(20)]
    await asyncio.gather(first, *later)
    assert seal.await_count == 2
    assert set(await _stored(database)) == {"use_1", "use_2"}


async def test_a_flush_that_failed_serves_nobody_else(
    ledger: UsageLedger, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ledger.record(usage_event("use_1"))
    away = CapacityError("The database cannot answer now; try again.")
    insert = AsyncMock(wraps=usage.insert_events, side_effect=[away, away, DEFAULT])
    monkeypatch.setattr(usage, "insert_events", insert)
    ended = await asyncio.gather(*(ledger.flush() for _ in range(3)), return_exceptions=True)
    assert [type(end) for end in ended] == [CapacityError, CapacityError, type(None)]
    assert set(await _stored(database)) == {"use_1"}


async def test_tokens_are_those_of_one_holder_and_of_one_month(ledger: UsageLedger) -> None:
    month = NOON.replace(day=1, hour=0)
    after = month_after(month)
    others = {"tenant_id": "ten_rival", "key_id": "key_2"}
    for event in (
        usage_event("use_before", at=month - timedelta(microseconds=1), prompt_tokens=1_000_000),
        usage_event("use_first", at=month, prompt_tokens=1, cached_tokens=1, completion_tokens=2),
        usage_event("use_again", at=NOON, prompt_tokens=10, completion_tokens=20, adapter_id=None),
        usage_event(
            "use_last",
            at=after - timedelta(microseconds=1),
            prompt_tokens=100,
            completion_tokens=200,
            status="aborted",
        ),
        usage_event("use_after", at=after, prompt_tokens=1_000_000),
        usage_event("use_other", prompt_tokens=1_000_000, **others),
    ):
        await ledger.record(event)
    for holder_id in ("ten_acme", "key_1"):
        assert await ledger.month_tokens(holder_id, month) == 333
        left_out = ["use_again", "use_other", "use_before"]
        assert await ledger.month_tokens(holder_id, month, left_out) == 303
        assert await ledger.month_tokens(holder_id, month_after(after)) == 0
    assert await ledger.month_tokens("ten_nobody", month) == 0


async def test_a_replay_that_fails_lets_go_of_the_folder(
    ledger: UsageLedger, database: Database, journal: Journal, restarted: Restarted
) -> None:
    await ledger.record(usage_event("use_1"))
    await _die(journal)
    async with database.write() as session:
        await session.execute(text("ALTER TABLE usage_rollups RENAME TO away"))
    with pytest.raises((CapacityError, ProgrammingError)):
        await restarted()
    async with database.write() as session:
        await session.execute(text("ALTER TABLE away RENAME TO usage_rollups"))
    assert list(await restarted()) == ["use_1"]


async def test_closing_before_the_mover_was_started_is_safe(
    database: Database, tmp_path: Path, clock: StandingClock
) -> None:
    ledger = UsageLedger(database, Journal(JournalFiles(tmp_path / "usage")), clock=clock)
    await ledger.record(usage_event("use_1"))
    await ledger.close()
    assert list(await _stored(database)) == ["use_1"]


async def test_an_older_backup_gets_what_it_lacks_and_nothing_twice(
    ledger: UsageLedger,
    database: Database,
    other_database: Database,
    tmp_path: Path,
    clock: StandingClock,
) -> None:
    """The process died after the move and before the file went; then the database of a while ago was given back."""
    for number in range(3):
        await ledger.record(usage_event(f"use_{number}"))
    (path,) = _files(tmp_path)
    content = path.read_bytes()
    await ledger.close()
    path.write_bytes(content)
    async with other_database.write() as session:
        await usage.insert_events(session, [usage_event(f"use_{number}") for number in range(2)])
    for restored in (other_database, database):
        ledger = await _open(restored, tmp_path, clock)
        assert sorted(await _stored(restored)) == ["use_0", "use_1", "use_2"]
        assert (await ledger.latency(ALL)).totals.requests == 3
        assert await wrong_sums(restored) == 0
        await ledger.close()
        path.write_bytes(content)


async def test_after_a_long_outage_one_file_at_a_time_is_in_memory(
    ledger: UsageLedger, journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk: list[int] = []

    def read(path: Path, decode: Callable[[bytes], object]) -> object:
        on_disk.append(len(_files(tmp_path)))
        return read_lines(path, decode)

    for number in range(3):
        await ledger.record(usage_event(f"use_{number}"))
        await journal.seal()
    monkeypatch.setattr(ledger_module, "read_lines", read)
    await ledger.flush()
    assert on_disk == [3, 2, 1]


async def test_who_asks_for_a_flush_does_not_wait_for_a_database_that_hangs(
    ledger: UsageLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "TURN_S", 0.05)
    hangs, go_on = asyncio.Event(), asyncio.Event()

    async def hang(*_: object) -> None:
        hangs.set()
        await go_on.wait()

    await ledger.record(usage_event("use_1"))
    monkeypatch.setattr(usage, "insert_events", hang)
    first = asyncio.create_task(ledger.flush())
    await hangs.wait()
    with pytest.raises(CapacityError) as caught:
        await ledger.flush()
    assert caught.value.code == "db.unavailable"
    go_on.set()
    await first
