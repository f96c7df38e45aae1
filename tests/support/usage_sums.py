"""The sums of usage in a database, counted again from its events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from sqlalchemy import select

from manylora.registry.db.clock import HOUR_US, from_micros, month_of, to_micros
from manylora.registry.db.database import Database
from manylora.registry.db.models import (
    UsageAdapterRow,
    UsageEventRow,
    UsageLatencyRow,
    UsageMonthRow,
    UsageRollupRow,
)
from manylora.registry.usage.latency import bin_of

SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
TABLES: dict[
    type[UsageRollupRow | UsageLatencyRow | UsageAdapterRow | UsageMonthRow],
    Callable[[UsageEventRow], bool],
] = {
    UsageRollupRow: lambda _: True,
    UsageLatencyRow: lambda event: event.service_class != "batch",
    UsageAdapterRow: lambda event: event.adapter_id != "",
    UsageMonthRow: lambda _: True,
}
"""With the events that count there."""


async def wrong_sums(database: Database) -> int:
    """How many figures differ from the sum of their events."""
    num_wrong = 0
    async with database.read() as session:
        events = (await session.scalars(select(UsageEventRow))).all()
        for table, counts in TABLES.items():
            keys = [column.name for column in table.__table__.primary_key]
            sums = [name for name in SUMS if name in table.__table__.columns]
            expected: Counter[tuple[object, ...]] = Counter()
            for event in filter(counts, events):
                facts = {
                    **vars(event),
                    "at": event.at - event.at % HOUR_US,
                    "bin": bin_of(event.ttft_s),
                }
                facts["requests"] = int(event.status != "retried")
                facts["month"] = to_micros(month_of(from_micros(event.at)))
                expected.update(
                    {(*(facts[key] for key in keys), name): facts[name] for name in sums}
                )
            stored = {
                (*(getattr(row, key) for key in keys), name): getattr(row, name)
                for row in await session.scalars(select(table))
                for name in sums
            }
            num_wrong += sum(
                expected[figure] != stored.get(figure) for figure in {*expected, *stored}
            )
    return num_wrong
