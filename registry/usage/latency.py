"""Latency: times to the first token, and how often the adapter was on the device when a request came.

The database has counts by hour and bin: two hours together are the sum of their counts. So a range is widened to whole
hours. Bins are equally wide on a logarithmic scale, 20 to a factor of ten: a bin ends at 10^(1/20) = 1.122 times its
begin, and a percentile is at most that factor off.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import RowMapping, select
from sqlalchemy.ext.asyncio import AsyncSession

from manylora.adapters.ref import AdapterTier
from manylora.errors import InvalidRequestError
from manylora.registry.db.clock import HOUR_US, from_micros, to_micros
from manylora.registry.db.models import UsageLatencyRow
from manylora.registry.records import GroupBy, LatencyFigures, LatencyReport, LatencyRow, UsageQuery
from manylora.registry.usage.buckets import Buckets
from manylora.registry.usage.query import (
    check_query,
    group_cells,
    group_columns,
    group_fields,
    matching,
    name_columns,
    sums_of,
)

LATENCY_GROUPS: tuple[GroupBy, ...] = ("tenant", "adapter", "version", "key")
PER_DECADE = 20
BOUNDS_S = tuple(
    round(0.001 * 10 ** (number / PER_DECADE), 9) for number in range(6 * PER_DECADE + 1)
)
"""From 1 ms to 1000 s. Bin n is from bound n - 1 to below bound n; bin 0 is below all bounds, the last bin above them.
Stored counts mean these bins: changing them needs a migration."""
NO_TOKEN = -1
"""The bin of requests that ended before their first token."""
MAX_COUNTS = 50_000
"""Most counts that one answer is made of."""
PERCENTS = (50, 95, 99)
PLACES: tuple[AdapterTier, ...] = ("device", "host", "stored")
"""Places of an adapter when a request for it arrives."""
STATES = (*PLACES, "base", "unknown")
"""Places, `base` for requests without an adapter, `unknown` for those that ended before the adapter was looked up."""

_LAST_HOUR = to_micros(datetime.max.replace(tzinfo=UTC)) // HOUR_US * HOUR_US
_counts = UsageLatencyRow.__table__


async def query(session: AsyncSession, query: UsageQuery) -> LatencyReport:
    """Latency of a range; rows are ordered by bucket, then by the ids of their groups.

    Takes the bucket, grouping and filters of usage, but no minutes, statuses or service classes. Ignores `limit` and
    `after`.

    Raises:
        InvalidRequestError: The query is wrong, or the answer would be too long.
    """
    check_query(query)
    start = to_micros(query.start) // HOUR_US * HOUR_US
    end = min(-(-to_micros(query.end) // HOUR_US) * HOUR_US, _LAST_HOUR)
    query = replace(query, start=from_micros(start), end=from_micros(end))
    buckets = Buckets(query.bucket, query.zone)
    columns = select(buckets.key(_counts.c.at).label("bucket"), *_counts.c)
    facts = matching(query, columns, _counts, start, end).subquery()
    cells = group_cells(query, facts, sums_of(facts, ["requests"]), "adapter_state", "bin")
    ids = ("bucket", *group_columns(query))
    counted = cells.order_by(*(facts.c[name] for name in ids)).limit(MAX_COUNTS + 1)
    found = (await session.execute(counted)).mappings().all()
    if len(found) > MAX_COUNTS:
        raise InvalidRequestError(
            "The answer would be too long. Ask for less: a shorter range, a wider bucket, fewer groups, or filters."
        )
    rows: dict[tuple[Any, ...], list[RowMapping]] = {}
    for each in found:
        rows.setdefault(tuple(each[name] for name in ids), []).append(each)
    return LatencyReport(
        start=query.start,
        end=query.end,
        rows=tuple(_row(query, buckets, of_row) for of_row in rows.values()),
        totals=LatencyFigures(**_figures(found)),
    )


def _row(query: UsageQuery, buckets: Buckets, counted: Sequence[RowMapping]) -> LatencyRow:
    names = {name: min(each[name] for each in counted) for name in name_columns(query)}
    group = group_fields(query, buckets, {**counted[0], **names})
    return LatencyRow(**group, **_figures(counted))


def _figures(counted: Sequence[RowMapping]) -> dict[str, Any]:
    states = Counter[str]()
    bins = Counter[int]()
    for each in counted:
        state = each["adapter_state"]
        states[state if state in STATES else "unknown"] += each["requests"]
        bins[each["bin"]] += each["requests"]
    placed = sum(states[place] for place in PLACES)
    times = {f"p{percent}": percentile(bins, percent) for percent in PERCENTS}
    return {
        "requests": states.total(),
        "states": {state: states[state] for state in STATES},
        "hit_rate": states["device"] / placed if placed else None,
        "ttft_s": None if None in times.values() else times,
    }


def bin_of(seconds: float | None) -> int:
    """The bin of a time to the first token; `NO_TOKEN` for None."""
    return NO_TOKEN if seconds is None else bisect_right(BOUNDS_S, seconds)


def percentile(counts: Mapping[int, int], percent: int) -> float | None:
    """Seconds within which `percent` of the requests had their first token, at most a bin off; None without requests.

    Assumes that the requests of a bin are spread evenly on the logarithmic scale. Times below the first or above the
    last bound count as that bound.

    Args:
        counts: Requests by bin; `NO_TOKEN` does not count.
        percent: 1 to 100.
    """
    bins = sorted(number for number, count in counts.items() if number != NO_TOKEN and count)
    wanted = sum(counts[number] for number in bins) * percent  # in hundredths, no float decides
    before = 0
    for number in bins:
        count = counts[number] * 100
        if before + count >= wanted:
            low = BOUNDS_S[max(number - 1, 0)]
            high = BOUNDS_S[min(number, len(BOUNDS_S) - 1)]
            return float(low * (high / low) ** ((wanted - before) / count))
        before += count
    return None
