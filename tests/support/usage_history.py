"""Usage of two tenants about the day in 2025 on which New York's clocks went back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import httpx

from manylora.registry.db.database import Database
from manylora.registry.records import UsageEvent
from manylora_server import ManyloraServer
from registry_samples import insert, usage_event

ZONE = "America/New_York"
FIRST, LAST = date(2025, 10, 27), date(2025, 11, 5)
"""Days of New York, among them the second of November, which had 25 hours."""
NORTH, SOUTH = "ledger-north", "ledger-south"
ADAPTERS = ("support", "triage", "legal", "notes", "tone", "sql", "memo", "draft")
EVENTS = 600


@dataclass(frozen=True, slots=True)
class History:
    """Where the usage lies, and whose it is."""

    keys: dict[str, tuple[str, str]]
    """Two ids of keys by tenant."""
    start: datetime
    end: datetime

    @property
    def span(self) -> dict[str, str]:
        """What the API takes for it."""
        return {"start": self.start.isoformat(), "end": self.end.isoformat()}

    def usage(self, client: httpx.Client, **params: Any) -> dict[str, Any]:
        """The answer of GET /v1/usage for it."""
        answer = client.get("/v1/usage", params={**self.span, "limit": 10_000, **params})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def events(self, client: httpx.Client, **params: Any) -> list[dict[str, Any]]:
        """Its single events."""
        answer = client.get("/v1/usage/events", params={**self.span, "limit": 10_000, **params})
        assert answer.status_code == 200, answer.text
        return list(answer.json()["data"])

    @property
    def before(self) -> dict[str, str]:
        """The time of the same length before."""
        return {
            "start": (self.start - (self.end - self.start)).isoformat(),
            "end": self.start.isoformat(),
        }


PLACE = {"start": FIRST.isoformat(), "end": LAST.isoformat(), "tz": ZONE}
"""What an address of the dashboard says to show it."""


def write_history(server: ManyloraServer) -> History:
    """Make the tenants, and write the events into the server's database as its ledger does."""
    keys: dict[str, tuple[str, str]] = {}
    tenants: dict[str, str] = {}
    for name in (NORTH, SOUTH):
        server.tenant(name)
        server.new_key(name, name=f"{name} batch")
        found = server.admin.get(f"/v1/tenants/{name}/keys").json()["data"]
        keys[name] = (found[0]["id"], found[1]["id"])
        tenants[name] = server.admin.get(f"/v1/tenants/{name}").json()["id"]
    start = datetime.combine(FIRST, time(), ZoneInfo(ZONE)).astimezone(UTC)
    end = datetime.combine(LAST + timedelta(days=1), time(), ZoneInfo(ZONE)).astimezone(UTC)
    events = list(_events(start - timedelta(days=8), end, tenants, keys))
    with ThreadPoolExecutor(1) as thread:  # a browser's loop may be running in this one
        thread.submit(asyncio.run, insert_usage(server.data_dir, events)).result()
    return History(keys=keys, start=start, end=end)


async def insert_usage(data_dir: Path, events: list[UsageEvent]) -> None:
    """Write events into the database of this folder, as the ledger does."""
    database = await Database.open(None, data_dir)
    try:
        await insert(database, events)
    finally:
        await database.close()


def _events(
    start: datetime, end: datetime, tenants: dict[str, str], keys: dict[str, tuple[str, str]]
) -> Iterator[UsageEvent]:
    rng = random.Random(25)
    seconds = round((end - start).total_seconds())
    for number in range(EVENTS):
        tenant = NORTH if number % 3 else SOUTH
        adapter = (
            rng.choices(ADAPTERS, weights=range(len(ADAPTERS), 0, -1))[0] if number % 10 else None
        )
        prompt = rng.randrange(10, 3000)
        moment = start + timedelta(seconds=rng.randrange(seconds))
        is_quiet_day = (moment.astimezone(ZoneInfo(ZONE)).date() - FIRST).days == 4
        yield usage_event(
            f"use_history_{number}",
            at=moment + timedelta(days=1) if is_quiet_day else moment,
            tenant_id=tenants[tenant],
            tenant=tenant,
            key_id=keys[tenant][number % 2],
            adapter_id=adapter and f"adp_{tenant}_{adapter}",
            adapter=adapter,
            adapter_version=adapter and rng.choice((1, 1, 2)),
            adapter_state=adapter and "device",
            status=rng.choices(
                ("stop", "length", "error", "aborted", "interrupted"), weights=(70, 15, 6, 6, 3)
            )[0],
            prompt_tokens=prompt,
            cached_tokens=prompt // rng.randrange(2, 6),
            completion_tokens=rng.randrange(1, 500),
            ttft_s=rng.lognormvariate(-2, 0.5),
        )
