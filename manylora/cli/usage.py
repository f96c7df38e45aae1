"""`manylora usage`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any
from zoneinfo import ZoneInfo

import typer

from manylora.cli.options import ServerCall, tenant_command

SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
NAMELESS = {"tenant": "(admin)", "adapter": "(base)"}
EVENT = (
    "at",
    "tenant",
    "adapter",
    "version",
    "status",
    *SUMS[1:],
    "duration_s",
    "key",
    "request_id",
)

By = Annotated[
    str,
    typer.Option(help="Columns to sum up by: tenant, adapter, version, key, status; with commas."),
]
Start = Annotated[
    str | None,
    typer.Option(help="First time, as 2026-11-01 or 2026-11-01T08:00Z. [default: 30 days ago]"),
]
Zone = Annotated[
    str | None,
    typer.Option(help="Time zone of days and of times without offset, as Europe/Berlin."),
]
Top = Annotated[
    int | None,
    typer.Option(help="Show this many of the largest groups; all others are one row per bucket."),
]
Adapters = Annotated[
    list[str] | None, typer.Option(help="Only this adapter, '' for the base; repeat for more.")
]


@tenant_command
def usage(  # noqa: PLR0913 - one parameter per option
    call: ServerCall,
    by: By = "tenant,adapter",
    bucket: Annotated[
        str | None, typer.Option(help="A row for each minute, hour or day: 1m, 1h or 1d.")
    ] = None,
    start: Start = None,
    end: Annotated[
        str | None, typer.Option(help="Time after the last, of the same form. [default: now]")
    ] = None,
    tz: Zone = None,
    top: Top = None,
    adapter: Adapters = None,
    status: Annotated[
        list[str] | None,
        typer.Option(
            help="Only requests that ended so: stop, length, aborted, error or interrupted; repeat for more."
        ),
    ] = None,
    events: Annotated[
        bool,
        typer.Option(
            "--events",
            help="List single requests instead of sums; without --by, --bucket, --tz and --top.",
        ),
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
) -> None:
    """Sum up requests and tokens by tenant, adapter and other columns."""
    filters: dict[str, Any] = {
        "events": events,
        "start": start,
        "end": end,
        "adapter": adapter,
        "status": status,
    }
    if not events:
        filters |= {"group_by": by, "bucket": bucket, "tz": tz, "top": top}
    if as_csv:
        for page in call.client.usage_csv(**filters):
            typer.echo(page, nl=False)
        return
    body = call.client.usage(**filters)
    if events:
        call.show(body, EVENT)
        return
    groups = [
        name for name in ("tenant", "adapter", "version", "key", "status") if name in by.split(",")
    ]
    if not call.as_json:
        body["data"] = [_readable(row, groups, tz) for row in body["data"]]
    sums = [*SUMS, *(("cost",) if "currency" in body else ())]
    call.show(
        body,
        [*(("start",) if bucket else ()), *groups, *(("other",) if top else ()), *sums],
    )
    if not call.as_json:
        totals = "  ".join(f"{name} {body['totals'][name]}" for name in sums)
        typer.echo(f"total {totals} {body.get('currency', '')}".rstrip())


def _readable(row: dict[str, Any], groups: Sequence[str], tz: str | None) -> dict[str, Any]:
    """Fill missing names of a row with words, and write its start in the requested time zone."""
    words: dict[str, str] = dict.fromkeys(groups, "(other)") if row.get("other") else NAMELESS
    for name in groups:
        if name in words and row.get(name) is None:
            row[name] = words[name]
    if tz:
        row["start"] = (
            datetime.fromisoformat(row["start"])
            .astimezone(ZoneInfo(tz))
            .isoformat(timespec="minutes")
        )
    return row
