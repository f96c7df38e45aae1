from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from manylora.adapters.ref import AdapterRef, ResidentAdapter
from manylora.adapters.residency.entry import NUM_LOADS, LoadTimes
from residency_parts import ResidencyParts, prepare


@pytest.mark.parametrize("count", [1, 2, 19, 20, 21, 32])
def test_the_95th_percentile_is_one_of_the_times(count: int) -> None:
    times = LoadTimes(32)
    seconds = [float(second) for second in np.random.default_rng(count).permutation(count)]
    for second in seconds:
        times.note(second)
    assert times.p95_s == np.percentile(seconds, 95, method="inverted_cdf")
    assert times.count == count


def test_only_the_last_times_count() -> None:
    times = LoadTimes(3)
    assert times.p95_s is None
    seen: list[float | None] = []
    for second in (9.0, 1.0, 2.0, 3.0, 1.0, 1.0):
        times.note(second)
        seen.append(times.p95_s)
    assert seen == [9.0, 9.0, 9.0, 3.0, 3.0, 3.0]
    assert times.count == 6


def resident(parts: ResidencyParts, ref: AdapterRef) -> ResidentAdapter:
    return next(found for found in parts.residency.residents() if found.digest == ref.digest)


def load_within(parts: ResidencyParts, ref: AdapterRef, seconds: float) -> None:
    parts.residency.hold(ref)
    parts.clock[0] += seconds
    parts.settle()
    parts.residency.release_hold(ref.digest)


def test_loads_are_timed_by_adapter_and_by_where_they_came_from(tmp_path: Path) -> None:
    parts, (first, second, _), _ = prepare(tmp_path, num_pages=100)
    assert parts.residency.transfers.load_p95_s == {}
    load_within(parts, first, 5.0)
    assert resident(parts, first).slot == 0
    parts.evict_all()
    host = resident(parts, first)
    assert (host.tier, host.slot, host.loads, host.load_p95_s) == ("host", -1, 1, 5.0)
    load_within(parts, first, 2.0)
    load_within(parts, second, 3.0)
    assert (resident(parts, first).loads, resident(parts, first).load_p95_s) == (2, 5.0)
    assert (resident(parts, second).loads, resident(parts, second).load_p95_s) == (1, 3.0)
    assert {resident(parts, ref).slot for ref in (first, second)} == {0, 1}
    assert parts.residency.transfers.load_p95_s == {"stored>device": 5.0, "host>device": 2.0}
    assert parts.residency.transfers.load_seconds == 10.0


def test_an_adapter_is_judged_by_its_last_loads_and_one_that_fails_is_none(tmp_path: Path) -> None:
    parts, (ref, *_), _ = prepare(tmp_path)
    load_within(parts, ref, 50.0)
    for _ in range(NUM_LOADS):
        parts.evict_all()
        load_within(parts, ref, 0.5)
    assert (resident(parts, ref).loads, resident(parts, ref).load_p95_s) == (NUM_LOADS + 1, 0.5)
    parts.evict_all()
    parts.copier.fails = True
    load_within(parts, ref, 70.0)
    assert (resident(parts, ref).loads, resident(parts, ref).load_p95_s) == (NUM_LOADS + 1, 0.5)
    parts.residency.forget(ref.digest)
    parts.copier.fails = False
    load_within(parts, ref, 1.0)
    assert (resident(parts, ref).loads, resident(parts, ref).load_p95_s) == (1, 1.0)
