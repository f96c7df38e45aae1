"""The parameters that all routes of usage take: tenant, range of time, and filters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, ClassVar, get_args
from zoneinfo import ZoneInfo

from pydantic import BaseModel, ConfigDict, Field

from manylora.errors import InvalidRequestError
from manylora.registry.records import UTC_ZONE, GroupBy, UsageGroup, UsageQuery
from manylora.registry.usage.query import MAX_WANTED
from manylora.server.auth.callers import Caller
from manylora.server.http.bodies import iso

DEFAULT_SPAN = timedelta(days=30)
EARLIEST = datetime.min.replace(tzinfo=UTC)
GROUPS: tuple[GroupBy, ...] = get_args(GroupBy)
_SPACED_OFFSET = re.compile(r" (?=\d\d:?\d\d$)")


def several(name: str) -> Any:  # noqa: ANN401 - as of pydantic's Field
    """A filter that may be repeated; `name` is its name in the query."""
    return Field(default_factory=list, max_length=MAX_WANTED, serialization_alias=name)


class SpanParams(BaseModel):
    """A range of time, and filters; the lists may be repeated."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    tenant: str | None = None
    start: str | None = None
    """ISO-8601 or Unix seconds; 30 days before `end` by default."""
    end: str | None = None
    """End of the range, not included; now by default."""
    adapter: list[Annotated[str, Field(max_length=127)]] = several("adapters")
    """Count requests to this adapter only. `owner/name` also counts those of other tenants to it; an empty text is the
    base. This and the other filters may be repeated."""
    version: list[Annotated[int, Field(ge=0, lt=1 << 31)]] = several("versions")
    key: list[Annotated[str, Field(max_length=127)]] = several("key_ids")
    """Ids of keys."""

    groups: ClassVar[Sequence[GroupBy]] = GROUPS
    """Groups that `group_by` may name."""

    def query(self, caller: Caller, now: datetime, zone: ZoneInfo = UTC_ZONE) -> UsageQuery:
        """The question to the ledger; times that name no offset are of the zone."""
        end = _moment(self.end, "end", zone) if self.end else now + timedelta(seconds=1)
        start = (
            _moment(self.start, "start", zone)
            if self.start
            else end - min(DEFAULT_SPAN, end - EARLIEST)
        )
        given = self.model_dump(exclude={"tenant", "start", "end", "tz", "format"}, by_alias=True)
        asked: dict[str, Any] = {
            name: tuple(each) if isinstance(each, list) else each for name, each in given.items()
        }
        if "group_by" in asked:
            names = {name for name in asked["group_by"].split(",") if name}
            if not names <= set(self.groups):
                raise InvalidRequestError(
                    f"group_by takes {', '.join(self.groups)}.", param="group_by"
                )
            asked["group_by"] = tuple(group for group in self.groups if group in names)
        return UsageQuery(
            start=start, end=end, zone=zone, tenant_id=usage_scope(caller, self.tenant), **asked
        )


def usage_scope(caller: Caller, tenant: str | None) -> str | None:
    """The tenant whose usage is shown; None means all tenants, for an admin who names none."""
    return None if caller.is_admin and tenant is None else caller.tenant_id


def row_fields(query: UsageQuery, row: UsageGroup) -> dict[str, object]:
    """Span and group of a row, by the API's names. A version comes with its adapter."""
    shown = {*query.group_by, *(("adapter",) if "version" in query.group_by else ())}
    groups: dict[str, object] = {
        group: getattr(row, "key_id" if group == "key" else group)
        for group in GROUPS
        if group in shown
    }
    return {"start": iso(row.start), "end": iso(row.end), **groups}


def _moment(text: str, param: str, zone: ZoneInfo) -> datetime:
    """A time in ISO-8601 (of the zone where it names no offset) or Unix seconds."""
    try:
        if text.isascii() and text.isdigit():
            return datetime.fromtimestamp(int(text), UTC)
        moment = datetime.fromisoformat(_SPACED_OFFSET.sub("+", text))
        return (moment if moment.tzinfo else moment.replace(tzinfo=zone)).astimezone(UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidRequestError(
            f"{param} must be a time in ISO-8601 or Unix seconds.", param=param
        ) from error
