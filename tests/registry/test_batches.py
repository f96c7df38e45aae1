"""Batches in SQL: one owner at a time, and each line once, with its usage."""

from __future__ import annotations

from datetime import timedelta

import pytest

from manylora.config import BatchConfig
from manylora.errors import ConflictError, ForbiddenError, NotFoundError
from manylora.registry.batches import LEASE_S, RENEW_S, LineResult, new_file
from manylora.registry.db.models import BatchRow, FileRow, TenantRow
from manylora.registry.records import UsageQuery
from manylora.registry.registry import Registry
from registry_samples import NOON, StandingClock, usage_event
from usage_sums import wrong_sums

pytestmark = pytest.mark.anyio
LIMITS = BatchConfig(max_files=10, max_stored_bytes=1000)


async def _store() -> None:
    pass


async def _file(
    registry: Registry, tenant_id: str, clock: StandingClock, size: int = 10
) -> FileRow:
    file = new_file(tenant_id, "a.jsonl", "batch", clock(), size_bytes=size, sha256="0" * 64)
    await registry.files.add(file, LIMITS, _store)
    return file


@pytest.fixture
async def batch(registry: Registry, acme: TenantRow, clock: StandingClock) -> BatchRow:
    file = await _file(registry, acme.id, clock)
    return await registry.batches.create(acme.id, "key_1", file.id, "/v1/completions", {"a": "b"})


def _result(batch: BatchRow, line: int, *, is_error: bool = False) -> LineResult:
    event = usage_event(f"{batch.id}-{line}", service_class="batch")
    return LineResult(
        batch_id=batch.id, line=line, is_error=is_error, text=f"{{{line}}}", event=event
    )


async def _billed(registry: Registry) -> int:
    query = UsageQuery(start=NOON - timedelta(days=1), end=NOON + timedelta(days=1))
    return (await registry.usage.query(query)).totals.requests


async def test_results_and_usage_of_a_line_are_written_once_by_the_owner_only(
    registry: Registry, batch: BatchRow
) -> None:
    (held,) = await registry.batches.claim("a")
    assert held.id == batch.id
    assert await registry.batches.enter(batch.id, "b", "in_progress", total=3) is None
    assert (await registry.batches.enter(batch.id, "a", "in_progress", total=3)) is not None
    assert await registry.batches.add_results("b", [_result(batch, 1)]) == frozenset()
    assert await _billed(registry) == 0
    first_two = [_result(batch, 1), _result(batch, 2, is_error=True)]
    assert await registry.batches.add_results("a", first_two) == {(batch.id, 1), (batch.id, 2)}
    assert await registry.batches.add_results("a", [_result(batch, 2), _result(batch, 3)]) == {
        (batch.id, 3)
    }
    assert await registry.batches.done_lines(batch.id) == {1, 2, 3}
    (second,) = await registry.batches.results(batch.id, 1, 1)
    assert (second.line, second.is_error, second.result) == (2, True, "{2}")
    assert await _billed(registry) == 3
    assert await wrong_sums(registry.database) == 0
    stopped = await registry.batches.enter(batch.id, "a", "finalizing")
    assert stopped is not None
    assert (stopped.status, stopped.completed, stopped.failed) == ("finalizing", 2, 1)
    assert await registry.batches.add_results("a", [_result(batch, 4)]) == frozenset()
    await registry.batches.end(batch.id, "a", "completed", {}, _store)
    assert (await registry.batches.get(batch.tenant_id, batch.id)).status == "completed"
    assert await registry.batches.done_lines(batch.id) == frozenset()
    assert await registry.batches.claim("a") == []


async def test_a_batch_is_taken_over_only_when_its_owner_is_silent_or_leaves_it(
    registry: Registry, batch: BatchRow, clock: StandingClock
) -> None:
    assert len(await registry.batches.claim("a")) == 1
    assert await registry.batches.claim("b") == []
    assert len(await registry.batches.claim("a")) == 1
    clock.advance(LEASE_S + 1)
    assert len(await registry.batches.claim("b")) == 1
    assert await registry.batches.claim("a") == []
    await registry.batches.release("b")
    assert len(await registry.batches.claim("a")) == 1


async def test_an_owner_that_looks_again_writes_only_when_its_claim_grows_old(
    registry: Registry, batch: BatchRow, clock: StandingClock
) -> None:
    (first,) = await registry.batches.claim("a")
    clock.advance(LEASE_S - RENEW_S)
    (again,) = await registry.batches.claim("a")
    assert (again.id, again.lease_until) == (batch.id, first.lease_until)
    clock.advance(1)
    (renewed,) = await registry.batches.claim("a")
    assert renewed.lease_until == first.lease_until + LEASE_S - RENEW_S + 1


async def test_an_input_that_is_needed_stays(
    registry: Registry, batch: BatchRow, clock: StandingClock
) -> None:
    with pytest.raises(ConflictError) as refused:
        await registry.files.delete(batch.tenant_id, batch.input_file_id)
    assert refused.value.code == "file.in_use"
    clock.now += timedelta(days=31)
    assert await registry.files.forget_expired() == 0
    with pytest.raises(NotFoundError):
        await registry.files.get(batch.tenant_id, batch.input_file_id)
    assert await registry.adapters.unreferenced([batch.input_sha256]) == frozenset()
    await registry.batches.cancel(batch.tenant_id, batch.id)
    await registry.batches.claim("a")
    await registry.batches.end(batch.id, "a", "cancelled", {}, _store)
    assert await registry.files.forget_expired() == 1
    assert await registry.batches.forget_old() == 1
    with pytest.raises(NotFoundError):
        await registry.batches.get(batch.tenant_id, batch.id)


async def test_a_batch_that_has_ended_cannot_be_cancelled_and_is_hidden_from_others(
    registry: Registry, batch: BatchRow, other: TenantRow
) -> None:
    await registry.batches.claim("a")
    await registry.batches.enter(batch.id, "a", "failed", errors={"object": "list", "data": []})
    with pytest.raises(ConflictError):
        await registry.batches.cancel(batch.tenant_id, batch.id)
    for call in (
        registry.batches.get(other.id, batch.id),
        registry.batches.cancel(other.id, batch.id),
        registry.files.get(other.id, batch.input_file_id),
        registry.batches.create(other.id, None, batch.input_file_id, "/v1/completions", {}),
    ):
        with pytest.raises(NotFoundError):
            await call


async def test_files_are_bounded_and_paged(
    registry: Registry, acme: TenantRow, clock: StandingClock
) -> None:
    for _ in range(3):
        await _file(registry, acme.id, clock, 300)
        clock.now += timedelta(seconds=1)
    with pytest.raises(ForbiddenError) as refused:
        await _file(registry, acme.id, clock, 300)
    assert refused.value.code == "quota.file_bytes"
    first = await registry.files.list(acme.id, "batch", None, 2)
    rest = await registry.files.list(acme.id, None, first.next, 2)
    assert [len(first.items), len(rest.items), rest.next] == [2, 1, None]
    await registry.tenants.delete_tenant("acme")
    assert await registry.adapters.unreferenced(["0" * 64]) == {"0" * 64}
