"""Who used what: GET /v1/usage, and the same figures in OpenAI's usage shape."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from weft.errors import InvalidRequestError
from weft.registry.records import GroupBy, UsageQuery, UsageReport, UsageRow
from weft.server.access import Caller, UsageCaller
from weft.server.responses import (
    OrganizationUsageBucket,
    OrganizationUsagePage,
    OrganizationUsageResult,
    UsageList,
    UsageRowView,
    UsageTotalsView,
)
from weft.server.services import Services, Wired
from weft.server.views import iso

router = APIRouter(tags=["usage"])
DEFAULT_DAYS = 30
MAX_ROWS = 10_000
GROUPS: tuple[GroupBy, ...] = ("tenant", "adapter", "version", "key")
BucketWidth = Literal["1m", "1h", "1d"]
_WIDTH_S = {"1m": 60, "1h": 3600, "1d": 86400}
_BUCKET_LIMITS = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 31)}
"""Default and largest number of buckets per page, as OpenAI has them."""
_OPENAI_GROUPS: dict[str, GroupBy] = {"project_id": "tenant", "model": "adapter", "api_key_id": "key"}
_SPACED_OFFSET = re.compile(r" (?=\d\d:?\d\d$)")


class UsageParams(BaseModel):
    """What GET /v1/usage takes."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    tenant: str | None = None
    start: str | None = None
    """ISO-8601 or Unix seconds; 30 days before `end` by default."""
    end: str | None = None
    """The first moment that no longer counts; now by default."""
    bucket: BucketWidth | None = None
    group_by: str = ""
    """Comma-separated: tenant, adapter, version, key."""
    after: str | None = None
    limit: int = Field(1000, ge=1, le=MAX_ROWS)
    format: Literal["json", "csv"] = "json"


class OrganizationUsageParams(BaseModel):
    """What OpenAI's usage route takes; filters that Weft lacks are refused."""

    model_config = ConfigDict(extra="forbid")

    tenant: str | None = None
    start_time: int = Field(ge=0, lt=1 << 36)
    end_time: int | None = Field(None, ge=0, lt=1 << 36)
    bucket_width: BucketWidth = "1d"
    limit: int | None = Field(None, ge=1)
    page: str | None = Field(None, pattern=r"^page_[0-9]{1,11}$")
    group_by: list[str] = Field(default_factory=list)
    group_by_brackets: list[str] = Field(default_factory=list, alias="group_by[]")

    @property
    def groups(self) -> tuple[GroupBy, ...]:
        """What the rows are grouped by; groups that Weft lacks have one value, so they change nothing."""
        wanted = [*self.group_by, *self.group_by_brackets]
        return tuple(dict.fromkeys(_OPENAI_GROUPS[name] for name in wanted if name in _OPENAI_GROUPS))


@router.get(
    "/v1/usage",
    response_model=UsageList,
    response_model_exclude_unset=True,
    responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
async def get_usage(
    services: Wired, caller: UsageCaller, params: Annotated[UsageParams, Query()]
) -> UsageList | Response:
    """Sum up usage. A tenant sees its own; an admin sees all, or one with `?tenant=`."""
    end = _moment(params.end, "end") if params.end else services.now() + timedelta(seconds=1)
    query = UsageQuery(
        start=_moment(params.start, "start") if params.start else _days_before(end),
        end=end,
        bucket=params.bucket,
        group_by=_groups(params.group_by),
        tenant_id=_whose(caller, params.tenant),
        after=params.after,
        limit=params.limit,
    )
    await services.registry.usage.flush()
    report = await services.registry.usage.query(query)
    if params.format == "csv":
        return Response(_as_csv(query, report), media_type="text/csv; charset=utf-8")
    return UsageList(
        object="list",
        data=[_row_view(query, row) for row in report.rows],
        next=report.next,
        totals=UsageTotalsView(**asdict(report.totals)),
    )


@router.get("/v1/organization/usage/completions")
async def get_organization_usage(
    services: Wired, caller: UsageCaller, params: Annotated[OrganizationUsageParams, Query()]
) -> OrganizationUsagePage:
    """Usage in OpenAI's shape: the project is the tenant, the model the adapter."""
    first, last, end = _span(params, int(services.now().timestamp()) + 1)
    width = _WIDTH_S[params.bucket_width]
    query = UsageQuery(
        start=datetime.fromtimestamp(first, UTC),
        end=datetime.fromtimestamp(last, UTC),
        bucket=params.bucket_width,
        group_by=params.groups,
        tenant_id=_whose(caller, params.tenant),
        limit=MAX_ROWS,
    )
    await services.registry.usage.flush()
    results: dict[int, list[OrganizationUsageResult]] = {}
    for row in await _all_rows(services, query):
        begin = int(row.start.timestamp()) // width * width
        results.setdefault(begin, []).append(_result(services, query, row))
    return OrganizationUsagePage(
        data=[
            OrganizationUsageBucket(start_time=begin, end_time=min(begin + width, end), results=results.get(begin, []))
            for begin in range(first, last, width)
        ],
        has_more=last < end,
        next_page=f"page_{last}" if last < end else None,
    )


def _span(params: OrganizationUsageParams, now: int) -> tuple[int, int, int]:
    """First second, end of this page, end of the whole range."""
    width = _WIDTH_S[params.bucket_width]
    default, most = _BUCKET_LIMITS[params.bucket_width]
    first = (int(params.page.removeprefix("page_")) if params.page else params.start_time) // width * width
    end = params.end_time if params.end_time is not None else now
    if first >= end:
        raise InvalidRequestError("end_time must be after start_time.", param="end_time")
    return first, min(end, first + width * min(params.limit or default, most)), end


def _whose(caller: Caller, tenant: str | None) -> str | None:
    """Whose usage is shown; None is everybody's, for an admin who names no tenant."""
    return None if caller.is_admin and tenant is None else caller.tenant_id


def _moment(text: str, param: str) -> datetime:
    """A time in ISO-8601 (UTC where it names no offset) or Unix seconds."""
    try:
        if text.isascii() and text.isdigit():
            return datetime.fromtimestamp(int(text), UTC)
        moment = datetime.fromisoformat(_SPACED_OFFSET.sub("+", text))
        return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidRequestError(f"{param} must be a time in ISO-8601 or Unix seconds.", param=param) from error


def _days_before(end: datetime) -> datetime:
    """The default start, also where `end` lies at the very beginning of the calendar."""
    days = timedelta(days=DEFAULT_DAYS)
    earliest = datetime.min.replace(tzinfo=UTC)
    return end - days if end - earliest > days else earliest


def _groups(text: str) -> tuple[GroupBy, ...]:
    names = [name for name in text.split(",") if name]
    if not set(names) <= set(GROUPS):
        raise InvalidRequestError(f"group_by takes {', '.join(GROUPS)}.", param="group_by")
    return tuple(group for group in GROUPS if group in names)


def _row_fields(query: UsageQuery, row: UsageRow) -> dict[str, object]:
    fields: dict[str, object] = {"start": iso(row.start), "end": iso(row.end)}
    if "tenant" in query.group_by:
        fields["tenant"] = row.tenant
    if "adapter" in query.group_by or "version" in query.group_by:
        fields["adapter"] = row.adapter
    if "version" in query.group_by:
        fields["version"] = row.version
    if "key" in query.group_by:
        fields["key"] = row.key_id
    return {
        **fields,
        "requests": row.requests,
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "completion_tokens": row.completion_tokens,
    }


def _row_view(query: UsageQuery, row: UsageRow) -> UsageRowView:
    return UsageRowView.model_validate(_row_fields(query, row))


def _as_csv(query: UsageQuery, report: UsageReport) -> str:
    text = io.StringIO()
    empty = UsageRow(start=query.start, end=query.end)
    writer = csv.DictWriter(text, fieldnames=list(_row_fields(query, empty)))
    writer.writeheader()
    writer.writerows(_row_fields(query, row) for row in report.rows)
    return text.getvalue()


async def _all_rows(services: Services, query: UsageQuery) -> list[UsageRow]:
    rows: list[UsageRow] = []
    after: str | None = None
    while True:
        report = await services.registry.usage.query(replace(query, after=after))
        rows.extend(report.rows)
        after = report.next
        if after is None:
            return rows


def _result(services: Services, query: UsageQuery, row: UsageRow) -> OrganizationUsageResult:
    return OrganizationUsageResult(
        input_tokens=row.prompt_tokens,
        output_tokens=row.completion_tokens,
        input_cached_tokens=row.cached_tokens,
        num_model_requests=row.requests,
        project_id=row.tenant if "tenant" in query.group_by else None,
        api_key_id=row.key_id if "key" in query.group_by else None,
        model=(row.adapter or services.served_name) if "adapter" in query.group_by else None,
    )
