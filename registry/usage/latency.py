"""How long requests took to their first token, and how often their adapter was on the device when they came.

Answered from hourly counts alone, so a range is widened to whole hours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, RowMapping, cast, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from weft.adapters.ref import AdapterTier
from weft.errors import InvalidRequestError
from weft.registry.db.clock import DAY_US, HOUR_US, from_micros, to_micros
from weft.registry.db.models import UsageLatencyRow
from weft.registry.records import GroupBy, LatencyFigures, LatencyReport, LatencyRow, UsageQuery
from weft.registry.usage.latency_bins import percentile
from weft.registry.usage.write import GROUP_COLUMNS, adapter_label, check_query, matching

LATENCY_GROUPS: tuple[GroupBy, ...] = ("tenant", "adapter", "version", "key")
MAX_COUNTS = 50_000
"""Most hourly counts, summed up by row, that one answer is made of."""
PERCENTS = (50, 95, 99)
PLACES: tuple[AdapterTier, ...] = ("device", "host", "stored")
"""Where an adapter can be when a request for it arrives."""
STATES = (*PLACES, "base", "unknown")
"""And requests for the base, which has nothing to find; and those that ended before anybody looked."""

_WIDTHS = {None: 0, "1h": HOUR_US, "1d": DAY_US}
_IDS = {group: GROUP_COLUMNS[group] for group in LATENCY_GROUPS}
_LAST_HOUR = to_micros(datetime.max.replace(tzinfo=UTC)) // HOUR_US * HOUR_US
_counts = UsageLatencyRow.__table__.c


async def query(session: AsyncSession, query: UsageQuery) -> LatencyReport:
    """Answer a question about latency; rows are ordered by bucket, then by the ids they are grouped by.

    Bucket, grouping and filters are those of usage, but for minutes and for how requests ended; `limit` and `after`
    do not count.

    Raises:
        InvalidRequestError: Range, bucket, grouping or filters make no sense, or the answer would be too long.
    """
    check_query(query)
    if query.bucket not in _WIDTHS:
        raise InvalidRequestError("bucket must be 1h or 1d.", param="bucket")
    if not set(query.group_by) <= _IDS.keys() or query.statuses or query.service_classes:
        raise InvalidRequestError(f"group_by takes {', '.join(LATENCY_GROUPS)}.", param="group_by")
    start = to_micros(query.start) // HOUR_US * HOUR_US
    end = min(-(-to_micros(query.end) // HOUR_US) * HOUR_US, _LAST_HOUR)
    ids = tuple(dict.fromkeys(name for group in query.group_by for name in _IDS[group]))
    rows: dict[tuple[Any, ...], _Sum] = {}
    total = _Sum()
    for counted in await _read(session, query, ids, start, end):
        row = rows.setdefault(tuple(counted.get(name) for name in ("bucket", *ids)), _Sum())
        row.add(counted)
        total.add(counted)
    return LatencyReport(
        start=from_micros(start),
        end=from_micros(end),
        rows=tuple(row.row(query, start, end) for row in rows.values()),
        totals=LatencyFigures(**total.figures()),
    )


class _Sum:
    """What the counts of one row, or of all, come to."""

    def __init__(self) -> None:
        self._any: Any = {}
        self._tenants: set[str] = set()
        self._adapters: set[str] = set()
        self._states: Counter[str] = Counter()
        self._bins: Counter[int] = Counter()

    def add(self, counted: RowMapping) -> None:
        state, requests = counted["adapter_state"], counted["requests"]
        self._states[state if state in STATES else "unknown"] += requests
        self._bins[counted["bin"]] += requests
        self._tenants.add(counted["tenant"])
        self._adapters.add(counted["adapter"])
        self._any = counted

    def figures(self) -> dict[str, Any]:
        placed = sum(self._states[place] for place in PLACES)
        times = {percent: percentile(self._bins, percent) for percent in PERCENTS}
        return {
            "requests": self._states.total(),
            "states": {state: self._states[state] for state in STATES},
            "hit_rate": self._states["device"] / placed if placed else None,
            "ttft_s": {percent: seconds for percent, seconds in times.items() if seconds is not None} or None,
        }

    def row(self, query: UsageQuery, start: int, end: int) -> LatencyRow:
        ids = self._any
        start = ids.get("bucket", start)
        end = start + _WIDTHS[query.bucket] if query.bucket else end
        by_adapter = "adapter" in query.group_by or "version" in query.group_by
        return LatencyRow(
            start=from_micros(start),
            end=from_micros(end),
            tenant=(min(self._tenants) or None) if "tenant" in query.group_by else None,
            adapter=(min(self._adapters) or None) if by_adapter else None,
            version=ids.get("adapter_version") or None,
            key_id=ids.get("key_id") or None,
            **self.figures(),
        )


async def _read(
    session: AsyncSession, query: UsageQuery, ids: Sequence[str], start: int, end: int
) -> Sequence[RowMapping]:
    order: list[ColumnElement[Any]] = [_counts[name] for name in ids]
    if width := _WIDTHS[query.bucket]:
        order.insert(0, (_counts.at // width * width).label("bucket"))
    keys = [*order, _counts.adapter_state, _counts.bin]
    shown = {"tenant": _counts.tenant, "adapter": adapter_label(query, UsageLatencyRow.__table__)}
    names = (func.min(shown[name]).label(name) for name in shown)
    requests = cast(func.sum(_counts.requests), BigInteger).label("requests")
    counted = select(*keys, *names, requests).group_by(*keys).order_by(*order).limit(MAX_COUNTS + 1)
    counted = matching(query, counted, UsageLatencyRow.__table__, start, end)
    found: Sequence[RowMapping] = (await session.execute(counted)).mappings().all()
    if len(found) > MAX_COUNTS:
        raise InvalidRequestError(
            "The answer would be too long. Ask for less: a shorter range, a wider bucket, fewer groups, or filters."
        )
    return found
