"""Made-up facts and events for tests of the registry, and a clock that stands still."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event

from manylora.adapters.ref import LoraSpec, content_digest
from manylora.registry.db import migrations
from manylora.registry.db.database import Database
from manylora.registry.idempotency import KeptAnswer
from manylora.registry.records import Adapter, AdapterVersion, UsageEvent, VersionFacts
from manylora.registry.registry import Registry
from manylora.registry.servers import Server
from manylora.registry.usage.write import insert_events

NOON = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)


NEWEST = max(path.name for path in Path(migrations.__file__).parent.glob("versions/0*.py"))[:4]
"""The schema that a database has after all migrations."""


class StandingClock:
    """Wall clock and monotonic clock that move only when told to."""

    def __init__(self, now: datetime = NOON) -> None:
        self.now = now
        self.seconds = 1000.0

    def __call__(self) -> datetime:
        return self.now

    def monotonic(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
        self.seconds += seconds


@dataclass(kw_only=True)
class Draft:
    """A version to come."""

    name: str
    description: str | None = None
    activate: bool = True


def facts(content: str, rank: int = 8) -> VersionFacts:
    """What an upload of these weights would be found to be."""
    spec = LoraSpec(
        rank=rank, alpha=16.0, rank_pattern={"q_proj": 4}, alpha_pattern={"v_proj": 2.5}
    )
    weights = hashlib.sha256(content.encode()).hexdigest()
    return VersionFacts(
        digest=content_digest(spec, weights),
        weights_sha256=weights,
        spec=spec,
        rank=rank,
        target_modules=("q_proj", "v_proj"),
        applied=8,
        total=28,
        parameters=4096,
        size_bytes=16_384,
        peft_version="0.18.0",
        report={"dtype": ["F32"], "layout": "peft", "renamed": 0, "warnings": []},
    )


async def publish_version(
    registry: Registry,
    tenant_id: str,
    name: str,
    facts: VersionFacts,
    description: str | None = None,
    activate: bool = True,
    **options: Any,
) -> tuple[Adapter, AdapterVersion, bool]:
    """Publish with nothing else in the transaction: the adapter, its version, and whether that is new."""
    draft = Draft(name=name, description=description, activate=activate)
    async with registry.adapters.publishing(tenant_id, draft, facts, **options) as made:
        await made.keep(KeptAnswer(status=201, body={}))
    return made.adapter, made.adapter.current, made.is_new


@contextmanager
def kept_statements() -> Iterator[list[str]]:
    """All statements that any database gets within the block."""
    statements: list[str] = []

    def keep(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", keep)
    try:
        yield statements
    finally:
        event.remove(Engine, "before_cursor_execute", keep)


async def insert(database: Database, events: Sequence[UsageEvent]) -> None:
    """Insert events as the ledger does."""
    async with database.write() as session:
        for first in range(0, len(events), 5_000):
            await insert_events(session, events[first : first + 5_000])


def usage_event(event_id: str, **changes: Any) -> UsageEvent:
    """An event of tenant `acme`, adapter `support` version 1, at noon."""
    event = UsageEvent(
        id=event_id,
        at=NOON,
        tenant_id="ten_acme",
        tenant="acme",
        key_id="key_1",
        adapter_id="adp_support",
        adapter="support",
        adapter_version=1,
        adapter_digest="sha256:" + "0" * 64,
        request_id="client-1",
        endpoint="/v1/completions",
        status="stop",
        prompt_tokens=10,
        cached_tokens=4,
        completion_tokens=20,
        queue_s=0.001,
        ttft_s=0.02,
        duration_s=0.5,
        adapter_state="device",
    )
    return replace(event, **changes)


def server_sample(**changes: Any) -> Server:
    """A listed server."""
    fields = {
        "name": "srv_1",
        "role": "replica",
        "boot_id": "b1",
        "url": "http://127.0.0.1:9",
        "state": "ready",
    }
    return Server(**{**fields, "model": "demo", "base": "sha256:0", "version": "1", **changes})
