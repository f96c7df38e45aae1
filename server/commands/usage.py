"""`weft usage`."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.server.commands.client import DEFAULT_URL, JSON, KEY, TENANT, URL, call, show

SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("usage")(usage)


def usage(  # noqa: PLR0913 - one parameter per option
    by: Annotated[str, typer.Option(help="tenant, adapter, version, key, status; comma-separated.")] = "tenant,adapter",
    bucket: Annotated[str | None, typer.Option(help="1m, 1h or 1d.")] = None,
    start: Annotated[str | None, typer.Option(help="ISO-8601. [default: 30 days ago]")] = None,
    end: Annotated[str | None, typer.Option(help="ISO-8601. [default: now]")] = None,
    tenant: TENANT = None,
    url: URL = DEFAULT_URL,
    key: KEY = None,
    as_json: JSON = False,
) -> None:
    """Show who used how many tokens."""
    params = {"group_by": by, "bucket": bucket, "start": start, "end": end, "tenant": tenant}
    body = call(url, key, "GET", "/v1/usage", params=params)
    groups = [name for name in ("tenant", "adapter", "version", "key", "status") if name in by.split(",")]
    sums = [*SUMS, *(("cost",) if "currency" in body else ())]
    show(body, as_json, [*(("start",) if bucket else ()), *groups, *sums])
    if not as_json:
        typer.echo(
            "total " + "  ".join(f"{name} {body['totals'][name]}" for name in sums) + f" {body.get('currency', '')}"
        )
