"""A quarter of a platform's usage: 20,000 events over 90 days, of 200 adapters and 20 tenants."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

from manylora.registry.records import UsageEvent
from registry_samples import usage_event

START = datetime(2026, 1, 20, 3, 17, tzinfo=UTC)
"""The 90 days hold 8 March, when New York's clocks go forward; neither end is a whole hour."""
END = START + timedelta(days=90)
EVENTS, ADAPTERS, TENANTS = 20_000, 200, 20


def quarter() -> list[UsageEvent]:
    """The events, in the order in which they ended; a few adapters have most of them, a tenth are of the base."""
    rng = random.Random(90)
    seconds = sorted(rng.uniform(0, 90 * 86_400) for _ in range(EVENTS))
    adapters = rng.choices(
        range(ADAPTERS), weights=[1 / (5 + n) for n in range(ADAPTERS)], k=EVENTS
    )
    return [
        _event(number, *each, rng)
        for number, each in enumerate(zip(seconds, adapters, strict=True))
    ]


def _event(number: int, seconds: float, adapter: int, rng: random.Random) -> UsageEvent:
    tenant = adapter % TENANTS
    is_base = rng.random() < 0.1
    prompt = rng.randrange(1, 4000)
    return usage_event(
        f"use_{number}",
        at=START + timedelta(seconds=int(seconds), microseconds=number % 1_000_000),
        tenant_id=f"ten_{tenant}",
        tenant=f"tenant-{tenant}",
        key_id=f"key_{tenant}",
        adapter_id=None if is_base else f"adp_{adapter}",
        adapter=None if is_base else f"adapter-{adapter}",
        adapter_version=None if is_base else 1 + rng.randrange(2),
        status=rng.choices(("stop", "length", "error"), weights=(80, 18, 2))[0],
        prompt_tokens=prompt,
        cached_tokens=prompt // (2 + rng.randrange(3)),
        completion_tokens=rng.randrange(1, 1000),
    )
