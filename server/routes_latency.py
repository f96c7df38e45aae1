"""How long requests took to begin, and how often their adapter was on the device already: GET /v1/usage/latency."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from weft.errors import InvalidRequestError
from weft.registry.latency import LATENCY_GROUPS
from weft.registry.records import LatencyFigures, LatencyRow, UsageQuery
from weft.registry.usage import MAX_WANTED
from weft.server.access import Caller, UsageCaller
from weft.server.responses import LatencyFiguresView, LatencyList, LatencyRowView
from weft.server.routes_usage import RangeParams
from weft.server.services import Wired
from weft.server.views import iso

router = APIRouter(tags=["usage"])


class LatencyParams(BaseModel):
    """What GET /v1/usage/latency takes."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    tenant: str | None = None
    start: str | None = None
    """ISO-8601 or Unix seconds, taken back to the full hour; 30 days before `end` by default."""
    end: str | None = None
    """The first moment that no longer counts, put off to the full hour; now by default."""
    adapter: list[Annotated[str, Field(max_length=127)]] = Field(default_factory=list, max_length=MAX_WANTED)
    """Only adapters of this name; the empty text means the base. This filter and the next two may be repeated."""
    version: list[Annotated[int, Field(ge=0, lt=1 << 31)]] = Field(default_factory=list, max_length=MAX_WANTED)
    key: list[Annotated[str, Field(max_length=127)]] = Field(default_factory=list, max_length=MAX_WANTED)
    """Ids of keys."""
    bucket: Literal["1h", "1d"] | None = None
    group_by: str = ""
    """Comma-separated: tenant, adapter, version, key."""

    def query(self, caller: Caller, now: datetime) -> UsageQuery:
        """The question to the ledger."""
        wanted = {name for name in self.group_by.split(",") if name}
        if not wanted <= set(LATENCY_GROUPS):
            raise InvalidRequestError(f"group_by takes {', '.join(LATENCY_GROUPS)}.", param="group_by")
        span = RangeParams.model_validate(self.model_dump(exclude={"bucket", "group_by"}))
        groups = tuple(group for group in LATENCY_GROUPS if group in wanted)
        return replace(span.query(caller, now), bucket=self.bucket, group_by=groups)


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
    values = {"tenant": row.tenant, "adapter": row.adapter, "version": row.version, "key": row.key_id}
    shown = {*query.group_by, *(["adapter"] if "version" in query.group_by else [])}
    groups = {name: value for name, value in values.items() if name in shown}
    return LatencyRowView.model_validate({"start": iso(row.start), "end": iso(row.end), **groups, **_figures(row)})


def _figures(figures: LatencyFigures) -> dict[str, object]:
    ttft_s = figures.ttft_s
    return {
        "requests": figures.requests,
        "states": figures.states,
        "hit_rate": figures.hit_rate,
        "ttft_s": {f"p{percent}": seconds for percent, seconds in ttft_s.items()} if ttft_s else None,
    }
