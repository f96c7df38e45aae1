"""Usage by tenant, adapter, version and key: GET /v1/usage, and the same figures in OpenAI's usage shape."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, ClassVar, Literal

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from manylora.errors import InvalidRequestError
from manylora.registry import records
from manylora.registry.names import MAX_INTEGER
from manylora.registry.usage.buckets import zone_of
from manylora.registry.usage.latency import LATENCY_GROUPS
from manylora.registry.usage.prices import in_currency
from manylora.registry.usage.query import MAX_ROWS, MAX_TOP, SUMS
from manylora.server.auth.callers import UsageCaller
from manylora.server.http.bodies import iso
from manylora.server.http.openapi import TEXT, sends
from manylora.server.services import Services, Wired
from manylora.server.usage import schemas
from manylora.server.usage.span import SpanParams, row_fields, several, usage_scope

router = APIRouter(tags=["usage"])
_BUCKETS = {"1m": (60, 60, 1440), "1h": (3600, 24, 168), "1d": (86400, 7, 31)}
"""Seconds of a bucket, and default and largest number of buckets per page, as OpenAI has them."""
_OPENAI_GROUPS: dict[str, records.GroupBy] = {
    "project_id": "tenant",
    "model": "adapter",
    "api_key_id": "key",
    "batch": "service_class",
}
_CSV = sends("text/csv", TEXT)


class RangeParams(SpanParams):
    """Which events, or sums of them, page by page."""

    status: list[Annotated[str, Field(max_length=127)]] = several("statuses")
    """Only requests that ended so: stop, length, aborted, error, interrupted."""
    service_class: list[records.ServiceClass] = several("service_classes")
    """Only interactive requests, or only lines of batches (batch)."""
    after: str | None = None
    limit: int = Field(1000, ge=1, le=MAX_ROWS)
    format: Literal["json", "csv"] = "json"


class UsageParams(RangeParams):
    """Parameters of GET /v1/usage."""

    bucket: records.Bucket | None = None
    """Width of a row's time span: minutes, or hours and days as clocks in `tz` show them."""
    tz: str = Field("UTC", max_length=64)
    """IANA name of a time zone; `start` and `end` without an offset are of this zone, those of rows are in UTC."""
    group_by: str = ""
    """Comma-separated: tenant, adapter, version, key, status, service_class."""
    top: int | None = Field(None, ge=1, le=MAX_TOP)
    """Number of groups, the largest of the whole range, that have rows of their own, the largest first. All others are
    one row per bucket with `"other": true`, so rows still add up to the totals. There are no pages then, and `limit`
    does not count."""
    rank_by: records.RankBy = "total_tokens"
    """With `top`: groups are ranked by this. Total tokens are prompt plus completion tokens; cost needs prices."""


class OrganizationUsageParams(BaseModel):
    """Parameters of OpenAI's usage route; filters that Manylora does not have are refused."""

    model_config = ConfigDict(extra="forbid")

    tenant: str | None = None
    start_time: int = Field(ge=0, lt=1 << 36)
    end_time: int | None = Field(None, ge=0, lt=1 << 36)
    bucket_width: records.Bucket = "1d"
    limit: int | None = Field(None, ge=1)
    page: str | None = Field(None, pattern=r"^page_[0-9]{1,11}$")
    group_by: list[str] = Field(default_factory=list)
    group_by_brackets: list[str] = Field(default_factory=list, alias="group_by[]")

    @property
    def groups(self) -> tuple[records.GroupBy, ...]:
        """Groups of the rows; groups that Manylora lacks have one value, so they change nothing."""
        wanted = [*self.group_by, *self.group_by_brackets]
        return tuple(
            dict.fromkeys(_OPENAI_GROUPS[name] for name in wanted if name in _OPENAI_GROUPS)
        )


@router.get(
    "/v1/usage", response_model=schemas.UsageList, response_model_exclude_unset=True, responses=_CSV
)
async def get_usage(
    services: Wired, caller: UsageCaller, params: Annotated[UsageParams, Query()]
) -> dict[str, object] | Response:
    """Sum up usage. A tenant sees its own; an admin sees all, or one with `?tenant=`."""
    query = params.query(caller, services.clock.now(), zone_of(params.tz))
    await services.registry.usage.flush()
    prices = services.registry.prices
    report = await services.registry.usage.query(query, prices)
    currency = prices.currency if prices else None
    rows = [_row_fields(query, row, currency) for row in report.rows]
    if params.format == "csv":
        empty = records.UsageRow(start=query.start, end=query.end)
        return _csv_response(list(_row_fields(query, empty, currency)), rows, next_page=report.next)
    answer = {"data": rows, "next": report.next, "totals": _sums(report.totals, currency)}
    extra = {"object": "list", "groups": report.groups, "currency": currency}
    return answer | {name: value for name, value in extra.items() if value is not None}


@router.get("/v1/usage/events", response_model=schemas.UsageEventList, responses=_CSV)
async def list_usage_events(
    services: Wired, caller: UsageCaller, params: Annotated[RangeParams, Query()]
) -> schemas.UsageEventList | Response:
    """List the single usage events behind all sums, oldest first."""
    await services.registry.usage.flush()
    page = await services.registry.usage.events(params.query(caller, services.clock.now()))
    events = schemas.UsageEventList.model_validate(page)
    if params.format == "csv":
        fields = list(schemas.UsageEventView.model_fields)
        return _csv_response(
            fields, [event.model_dump() for event in events.data], next_page=events.next
        )
    return events


@router.get("/v1/organization/usage/completions")
async def get_organization_usage(
    services: Wired, caller: UsageCaller, params: Annotated[OrganizationUsageParams, Query()]
) -> schemas.OrganizationUsagePage:
    """Usage in OpenAI's shape: the project is the tenant, the model the adapter."""
    width, default, most = _BUCKETS[params.bucket_width]
    start = int(params.page.removeprefix("page_")) if params.page else params.start_time
    first = start // width * width
    end = params.end_time
    if end is None:
        end = int(services.clock.now().timestamp()) + 1
    if first >= end:
        raise InvalidRequestError("end_time must be after start_time.", param="end_time")
    last = min(end, first + width * min(params.limit or default, most))
    query = records.UsageQuery(
        start=datetime.fromtimestamp(first, UTC),
        end=datetime.fromtimestamp(last, UTC),
        bucket=params.bucket_width,
        group_by=params.groups,
        tenant_id=usage_scope(caller, params.tenant),
        limit=MAX_INTEGER - 1,
    )
    await services.registry.usage.flush()
    results: defaultdict[int, list[schemas.OrganizationUsageResult]] = defaultdict(list)
    for row in (await services.registry.usage.query(query)).rows:
        begin = int(row.start.timestamp()) // width * width
        results[begin].append(_result(services, query, row))
    buckets = [
        schemas.OrganizationUsageBucket(
            start_time=begin, end_time=min(begin + width, end), results=results[begin]
        )
        for begin in range(first, last, width)
    ]
    next_page = f"page_{last}" if last < end else None
    return schemas.OrganizationUsagePage(data=buckets, has_more=last < end, next_page=next_page)


def _row_fields(
    query: records.UsageQuery, row: records.UsageRow, currency: str | None
) -> dict[str, object]:
    other = {} if query.top is None else {"other": row.other}
    return row_fields(query, row) | other | _sums(row, currency)


def _sums(sums: records.UsageTotals, currency: str | None) -> dict[str, object]:
    fields: dict[str, object] = {name: getattr(sums, name) for name in SUMS}
    return {**fields, "cost": in_currency(sums.cost)} if currency else fields


def _csv_response(
    fields: list[str], rows: Iterable[dict[str, object]], next_page: str | None = None
) -> Response:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=fields)
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    headers = {"x-manylora-next": next_page} if next_page else {}
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8", headers=headers)


def _cell(value: object) -> object:
    """A cell that no spreadsheet takes for a formula, though it may hold a client's text; booleans as in JSON."""
    if isinstance(value, bool):
        return str(value).lower()
    return (
        f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value
    )


def _result(
    services: Services, query: records.UsageQuery, row: records.UsageRow
) -> schemas.OrganizationUsageResult:
    return schemas.OrganizationUsageResult(
        input_tokens=row.prompt_tokens,
        output_tokens=row.completion_tokens,
        input_cached_tokens=row.cached_tokens,
        num_model_requests=row.requests,
        project_id=row.tenant,
        api_key_id=row.key_id,
        model=(row.adapter or services.served_name) if "adapter" in query.group_by else None,
        batch=row.service_class == "batch" if "service_class" in query.group_by else None,
    )


class LatencyParams(SpanParams):
    """Parameters of GET /v1/usage/latency. The range is widened to full hours."""

    bucket: Literal["1h", "1d"] | None = None
    group_by: str = ""
    """Comma-separated: tenant, adapter, version, key."""
    groups: ClassVar[Sequence[records.GroupBy]] = LATENCY_GROUPS


@router.get(
    "/v1/usage/latency", response_model=schemas.LatencyList, response_model_exclude_unset=True
)
async def get_latency(
    services: Wired, caller: UsageCaller, params: Annotated[LatencyParams, Query()]
) -> dict[str, object]:
    """Percentiles of the time to the first token, and where adapters were when their requests arrived.

    Times are counted per hour in bins of a factor of 1.122, so a percentile is off by at most that factor.
    A tenant sees its own requests; an admin sees all, or one tenant's with `?tenant=`.
    """
    query = params.query(caller, services.clock.now())
    await services.registry.usage.flush()
    report = await services.registry.usage.latency(query)
    figures = schemas.LatencyFiguresView.model_fields
    rows = [
        row_fields(query, row) | {name: getattr(row, name) for name in figures}
        for row in report.rows
    ]
    span = {"start": iso(report.start), "end": iso(report.end)}
    return {"object": "list", **span, "data": rows, "next": None, "totals": report.totals}
