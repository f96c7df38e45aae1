"""How long requests took to begin, and how often their adapter was on the device already: GET /v1/usage/latency."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, tzinfo
from typing import Annotated, Literal

from fastapi import APIRouter, Query

from weft.registry.records import LatencyFigures, LatencyRow, UsageQuery
from weft.registry.usage.latency import LATENCY_GROUPS
from weft.server.auth.callers import Caller, UsageCaller
from weft.server.responses import LatencyFiguresView, LatencyList, LatencyRowView, iso
from weft.server.services import Wired
from weft.server.usage.span import SpanParams, group_fields, groups_of

router = APIRouter(tags=["usage"])


class LatencyParams(SpanParams):
    """What GET /v1/usage/latency takes. The range is widened to full hours."""

    bucket: Literal["1h", "1d"] | None = None
    group_by: str = ""
    """Comma-separated: tenant, adapter, version, key."""

    def query(self, caller: Caller, now: datetime, zone: tzinfo = UTC) -> UsageQuery:
        """The question to the ledger."""
        groups = groups_of(self.group_by, LATENCY_GROUPS)
        return replace(super().query(caller, now, zone), bucket=self.bucket, group_by=groups)


@router.get("/v1/usage/latency", response_model=LatencyList, response_model_exclude_unset=True)
async def get_latency(services: Wired, caller: UsageCaller, params: Annotated[LatencyParams, Query()]) -> LatencyList:
    """Percentiles of the time to the first token, and where adapters were when requests for them arrived.

    From counts by the hour, in bins of a factor of 1.122: no percentile is further off than that. A tenant sees its
    own requests; an admin sees all, or one tenant's with `?tenant=`.
    """
    query = params.query(caller, services.now())
    await services.registry.usage.flush()
    report = await services.registry.usage.latency(query)
    return LatencyList(
        object="list",
        start=iso(report.start),
        end=iso(report.end),
        data=[_row_view(query, row) for row in report.rows],
        next=None,
        totals=LatencyFiguresView.model_validate(_figures(report.totals)),
    )


def _row_view(query: UsageQuery, row: LatencyRow) -> LatencyRowView:
    groups = group_fields(query, row)
    return LatencyRowView.model_validate({"start": iso(row.start), "end": iso(row.end), **groups, **_figures(row)})


def _figures(figures: LatencyFigures) -> dict[str, object]:
    ttft_s = figures.ttft_s
    return {
        "requests": figures.requests,
        "states": figures.states,
        "hit_rate": figures.hit_rate,
        "ttft_s": {f"p{percent}": seconds for percent, seconds in ttft_s.items()} if ttft_s else None,
    }
