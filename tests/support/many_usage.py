"""A data folder as after three months: 20 tenants, 500 adapters, 100,000 usage events."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from registry_samples import facts, publish_version
from weft.registry.db.database import Database
from weft.registry.records import UsageEvent
from weft.registry.registry import Registry
from weft.registry.usage.write import insert_events

TENANTS, ADAPTERS, EVENTS, DAYS = 20, 500, 100_000, 90
CHUNK = 5_000
PATHS = (
    "/?range=90d",
    "/usage?range=90d&group=adapter",
    "/usage?range=90d&group=tenant&tz=America/New_York",
    "/adapters?range=90d",
    "/adapters/adapter-03-07?tenant=tenant-03&range=90d",
    "/live",
    "/playground",
    "/tenants?range=90d",
    "/tenants/tenant-03?range=90d",
    "/audit",
)
"""Pages of the dashboard that show all of it, or much."""
STATUSES = ("stop",) * 80 + ("length",) * 15 + ("aborted",) * 3 + ("error",) * 2
STATES = ("device",) * 8 + ("host", "stored")


async def fill(data_dir: Path, admin_key: str, now: datetime) -> None:
    """Make the folder's database; `now` is when the last event ended."""
    registry = await Registry.open(None, data_dir, admin_key)
    known: list[tuple[str, str, str, str, str]] = []
    try:
        for tenant in range(TENANTS):
            owner = await registry.tenants.create_tenant(f"tenant-{tenant:02}")
            key, _ = await registry.keys.create_key(owner.name, "app")
            for number in range(ADAPTERS // TENANTS):
                name = f"adapter-{tenant:02}-{number:02}"
                adapter, version, _ = await publish_version(registry, owner.id, name, facts(name))
                known.append((owner.id, owner.name, key.id, adapter.id, f"{name} {version.digest}"))
    finally:
        await registry.close()
    database = await Database.open(None, data_dir)
    try:
        chunk: list[UsageEvent] = []
        for event in _events(known, now):
            chunk.append(event)
            if len(chunk) == CHUNK:
                async with database.write() as session:
                    await insert_events(session, chunk)
                chunk = []
    finally:
        await database.close()


def _events(known: list[tuple[str, str, str, str, str]], now: datetime) -> Iterator[UsageEvent]:
    rng = random.Random(20)
    weights = [1 / (rank + 1) ** 0.7 for rank in range(len(known))]
    popular = rng.sample(known, len(known))
    for number in range(EVENTS):
        tenant_id, tenant, key_id, adapter_id, named = rng.choices(popular, weights)[0]
        adapter, digest = named.split(" ")
        prompt = rng.randrange(20, 800)
        at = now - timedelta(seconds=rng.random() * (DAYS * 86_400 - 60))
        yield UsageEvent(
            id=f"use_{number:08}",
            at=at.astimezone(UTC),
            tenant_id=tenant_id,
            tenant=tenant,
            key_id=key_id,
            adapter_id=adapter_id,
            adapter=adapter,
            adapter_version=1,
            adapter_digest=digest,
            request_id=f"req-{number}",
            endpoint="/v1/chat/completions",
            status=rng.choice(STATUSES),
            prompt_tokens=prompt,
            cached_tokens=rng.randrange(prompt),
            completion_tokens=rng.randrange(1, 400),
            queue_s=0.001,
            ttft_s=rng.lognormvariate(-2, 0.8),
            duration_s=1.0,
            adapter_state=rng.choice(STATES),
        )
