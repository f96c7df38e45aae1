"""The questions of a dashboard over a quarter of usage: what the database reads for them, and that they add up."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession

from manylora.registry.db.clock import to_micros
from manylora.registry.db.database import Database
from manylora.registry.records import UsageEvent, UsageQuery, UsageReport
from manylora.registry.usage import query as usage_query
from manylora.registry.usage.prices import Price, PriceTable
from postgres_server import KINDS, database_of
from quarter_of_usage import END, START, quarter
from registry_samples import insert

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
PRICES = PriceTable(
    currency="EUR", prices={"default": Price(prompt=2000, cached=500, completion=6000)}
)
WHOLE = UsageQuery(start=START, end=END)
HOUR = timedelta(hours=1)
NEW_YORK = ZoneInfo("America/New_York")
QUESTIONS = {
    "the totals": WHOLE,
    "by status": replace(WHOLE, group_by=("status",)),
    "by adapter": replace(WHOLE, group_by=("adapter",)),
    "by tenant and adapter": replace(WHOLE, group_by=("tenant", "adapter")),
    "days": replace(WHOLE, bucket="1d"),
    "days of the top 8 adapters": replace(WHOLE, bucket="1d", group_by=("adapter",), top=8),
    "days in New York": replace(WHOLE, bucket="1d", group_by=("adapter",), top=8, zone=NEW_YORK),
    "hours of two weeks in New York": replace(
        WHOLE, start=END - timedelta(days=14), bucket="1h", group_by=("status",), zone=NEW_YORK
    ),
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def events() -> list[UsageEvent]:
    return quarter()


@pytest.fixture(scope="module", params=KINDS)
async def filled(
    request: pytest.FixtureRequest,
    events: list[UsageEvent],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Database]:
    """A database with the quarter in it."""
    opened = await Database.open(database_of(request.param), tmp_path_factory.mktemp("quarter"))
    await insert(opened, events)
    if request.param == "postgresql":
        async with opened.write() as session:
            await session.execute(text("ANALYZE"))
    yield opened
    await opened.close()


async def _ask(database: Database, query: UsageQuery) -> UsageReport:
    async with database.read() as session:
        return await usage_query.query(session, query, PRICES)


async def _plans(session: AsyncSession, query: UsageQuery) -> str:
    """How the database goes about all statements that a question takes."""
    connection = await session.connection()
    statements: list[tuple[str, Any]] = []

    def keep(
        _connection: object, _cursor: object, statement: str, parameters: Any, *_: object
    ) -> None:
        statements.append((statement, parameters))

    event.listen(connection.sync_connection, "before_cursor_execute", keep)
    await usage_query.query(session, query, PRICES)
    event.remove(connection.sync_connection, "before_cursor_execute", keep)
    assert statements
    how = "EXPLAIN QUERY PLAN" if connection.dialect.name == "sqlite" else "EXPLAIN"
    lines: list[str] = []
    for statement, parameters in statements:
        plan = await connection.exec_driver_sql(f"{how} {statement}", parameters)
        lines += [str(row[-1]) for row in plan]
    return "\n".join(lines)


@pytest.mark.parametrize("question", QUESTIONS)
async def test_a_range_of_the_hours_is_read_and_of_the_events_only_by_time(
    filled: Database, question: str
) -> None:
    # A part of the quarter, for a database may well read all of a table where all of it is asked for.
    part = replace(
        QUESTIONS[question], start=END - timedelta(days=9), end=END - timedelta(days=2, minutes=3)
    )
    async with filled.read() as session:
        plan = await _plans(session, part)
    if "SEARCH" in plan:  # SQLite
        hours = re.findall(r".* usage_rollups .*", plan)
        assert hours == ["SEARCH usage_rollups USING PRIMARY KEY (at>? AND at<?)"]
        reads = set(re.findall(r".* usage_events .*", plan))
        assert {re.sub("COVERING ", "", read) for read in reads} <= {
            "SEARCH usage_events USING INDEX ix_usage_events_at (at>? AND at<?)"
        }
    else:
        assert (
            len(
                re.findall(
                    r"(Index|Bitmap).* on pk_usage_rollups|Index Scan using pk_usage_rollups", plan
                )
            )
            == 1
        )
        assert "Seq Scan" not in plan
        assert (
            len(re.findall(r"on usage_events", plan))
            == len(re.findall(r"ix_usage_events_at\b", plan))
            > 0
        )


@pytest.mark.parametrize("question", QUESTIONS)
async def test_no_event_inside_the_range_is_read(filled: Database, question: str) -> None:
    query = QUESTIONS[question]
    before = await _ask(filled, query)
    async with filled.write() as session:
        inside = "DELETE FROM usage_events WHERE at >= :first AND at < :last"
        first, last = query.start.replace(minute=0) + HOUR, query.end.replace(minute=0)
        # The first and the last hour stay, to tell for which time the zone's history is wanted.
        span = {"first": to_micros(first), "last": to_micros(last)}
        assert (await session.execute(text(inside), span)).rowcount > 2_000  # type: ignore[attr-defined]
        after = await usage_query.query(session, query, PRICES)
        await session.rollback()
    assert after == before
