"""A data folder as after three months: 20 tenants with 500 adapters, and their usage."""

from __future__ import annotations

import random
from dataclasses import fields
from datetime import datetime, timedelta
from pathlib import Path

from manylora.registry.audit import ADMIN
from manylora.registry.db.database import Database
from manylora.registry.db.models import AdapterRow, AliasRow, AuditRow, Base, TenantRow, VersionRow
from manylora.registry.names import DEFAULT_ALIAS
from manylora.registry.records import VersionFacts
from manylora.registry.registry import Registry
from registry_samples import facts, usage_event
from usage_history import insert_usage

TENANTS, ADAPTERS, DAYS = 20, 500, 90
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


async def fill(data_dir: Path, admin_key: str, now: datetime, events: int = 100_000) -> None:
    """Make the folder's database with so many events, the newest of which ended before `now`."""
    registry = await Registry.open(None, data_dir, admin_key)
    owned: list[dict[str, str]] = []
    rows: list[Base] = []
    try:
        for tenant in range(TENANTS):
            owner = await registry.tenants.create_tenant(f"tenant-{tenant:02}")
            key, _ = await registry.keys.create_key(owner.name, "app")
            for number in range(ADAPTERS // TENANTS):
                name, adapter_id = (
                    f"adapter-{tenant:02}-{number:02}",
                    f"adp_{tenant:02}_{number:02}",
                )
                version = facts(name)
                rows += _published(owner, adapter_id, name, version, now)
                ids = {"tenant_id": owner.id, "key_id": key.id, "adapter_id": adapter_id}
                owned.append(
                    {**ids, "tenant": owner.name, "adapter": name, "adapter_digest": version.digest}
                )
    finally:
        await registry.close()
    database = await Database.open(None, data_dir)
    try:
        async with database.write() as session:
            for kind in (
                AdapterRow,
                VersionRow,
                AliasRow,
                AuditRow,
            ):  # each after those that it refers to
                session.add_all(row for row in rows if isinstance(row, kind))
                await session.flush()
    finally:
        await database.close()
    rng = random.Random(20)
    popular = rng.sample(owned, len(owned))
    weights = [1 / (rank + 1) ** 0.7 for rank in range(len(owned))]
    await insert_usage(
        data_dir,
        [
            usage_event(
                f"use_{number:08}",
                at=now - timedelta(seconds=rng.random() * (DAYS * 86_400 - 60)),
                request_id=f"req-{number}",
                status=rng.choice(STATUSES),
                prompt_tokens=rng.randrange(20, 800),
                completion_tokens=rng.randrange(1, 400),
                ttft_s=rng.lognormvariate(-2, 0.8),
                adapter_state=rng.choice(STATES),
                **rng.choices(popular, weights)[0],
            )
            for number in range(events)
        ],
    )


def _published(
    owner: TenantRow, adapter_id: str, name: str, facts: VersionFacts, now: datetime
) -> list[Base]:
    """The rows that publishing an adapter's first version writes; 500 transactions would take seconds."""
    values = {field.name: getattr(facts, field.name) for field in fields(VersionFacts)}
    values |= {"spec": facts.spec.canonical(), "target_modules": list(facts.target_modules)}
    own = {
        "tenant_id": owner.id,
        "tenant": owner.name,
        "name": name,
        "pinned_copies": 0,
        "next_version": 2,
    }
    told = {"digest": facts.digest, "activate": True}
    return [
        AdapterRow(id=adapter_id, created_at=now, **own),
        VersionRow(adapter_id=adapter_id, version=1, created_at=now, **values),
        AliasRow(adapter_id=adapter_id, alias=DEFAULT_ALIAS, version=1, weight=1),
        AuditRow(
            at=now,
            actor=ADMIN,
            action="adapter.publish",
            tenant=owner.name,
            target=f"{name}@1",
            detail=told,
        ),
    ]
