from __future__ import annotations

import math

import pytest

from manylora.errors import AuthenticationError, ConflictError, InvalidRequestError, NotFoundError
from manylora.registry.db.models import TenantRow
from manylora.registry.limits import TENANT_LIMITS, Limits
from manylora.registry.records import Removed, UsageQuery
from manylora.registry.registry import Registry
from registry_samples import NOON, StandingClock, facts, publish_version, usage_event

pytestmark = pytest.mark.anyio


async def test_a_tenant_is_found_by_its_name(registry: Registry) -> None:
    limits = {"requests_per_minute": 60, "adapters": 0, "tokens_per_month": None}
    made = await registry.tenants.create_tenant("acme", limits)
    assert made.created_at == NOON
    assert made.limits == {"requests_per_minute": 60, "adapters": 0}
    found = await registry.tenants.get_tenant("acme")
    assert (found.id, found.limits, found.created_at, found.weight) == (
        made.id,
        made.limits,
        NOON,
        1,
    )
    with pytest.raises(ConflictError):
        await registry.tenants.create_tenant("acme")


@pytest.mark.parametrize("name", ["nobody", "No Name", "\x00", "a/../b"])
async def test_an_unknown_tenant_is_not_found_whatever_its_name(
    registry: Registry, name: str
) -> None:
    with pytest.raises(NotFoundError) as refused:
        await registry.tenants.get_tenant(name)
    assert refused.value.message == f"There is no tenant `{name}`.".replace("\x00", r"\x00")
    with pytest.raises(NotFoundError):
        await registry.tenants.update_tenant(name, {})
    with pytest.raises(NotFoundError):
        await registry.tenants.delete_tenant(name)


async def test_tenants_are_listed_by_name_in_pages(registry: Registry) -> None:
    for name in ("cc", "aa", "dd", "bb"):
        await registry.tenants.create_tenant(name)
    first = await registry.tenants.list_tenants(limit=3)
    second = await registry.tenants.list_tenants(after=first.next, limit=3)
    assert [tenant.name for tenant in first.items] == ["aa", "bb", "cc"]
    assert [tenant.name for tenant in second.items] == ["dd"]
    assert second.next is None
    assert (await registry.tenants.list_tenants(limit=4)).next is None


async def test_a_weight_is_one_unless_it_is_set(registry: Registry) -> None:
    assert (await registry.tenants.create_tenant("acme")).weight == 1
    assert (await registry.tenants.create_tenant("large", {"adapters": 1}, 3)).weight == 3
    changed = await registry.tenants.update_tenant("large", weight=0.5)
    assert (changed.weight, changed.limits) == (0.5, {"adapters": 1})
    assert (await registry.tenants.update_tenant("large", {"stored_bytes": 2})).weight == 0.5
    assert (await registry.tenants.get_tenant("large")).limits == {"stored_bytes": 2}
    entries = [entry for entry in await registry.list_audit(limit=10) if entry.target == "large"]
    assert [entry.detail for entry in entries] == [
        {"limits": {"stored_bytes": 2}},
        {"weight": 0.5},
        {"limits": {"adapters": 1}, "weight": 3},
    ]


@pytest.mark.parametrize(
    "limits",
    [
        *({"adapters": value} for value in (-1, 1.0, True, "1", 1 << 63, math.nan)),
        *({"tokens_per_day": value} for value in (1, None)),
        {"adapters\x00": 1},
    ],
)
async def test_limits_that_are_no_limits_are_refused(
    registry: Registry, limits: dict[str, object]
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await registry.tenants.create_tenant("acme", limits)
    names = TENANT_LIMITS if "tokens_per_day" in limits else ()
    assert all(name in refused.value.message for name in names)
    assert (await registry.tenants.list_tenants()).items == ()


async def test_limits_asked_for_by_id_are_those_of_this_moment(registry: Registry) -> None:
    acme = await registry.tenants.create_tenant("acme", {"adapters": 1})
    assert (await registry.tenants.tenant_limits(acme.id)).adapters == 1
    await registry.tenants.update_tenant("acme", {"adapters": 2})
    assert (await registry.tenants.tenant_limits(acme.id)).adapters == 2
    await registry.tenants.delete_tenant("acme")
    assert await registry.tenants.tenant_limits(acme.id) == Limits()


async def test_deleting_a_tenant_takes_keys_and_adapters_and_leaves_usage(
    registry: Registry, acme: TenantRow, other: TenantRow, clock: StandingClock
) -> None:
    _, secret = await registry.keys.create_key("acme")
    await publish_version(registry, acme.id, "support", facts("a"))
    await publish_version(registry, acme.id, "support", facts("b"))
    await publish_version(registry, other.id, "same-bytes", facts("b"))
    await registry.usage.record(usage_event("use_1", tenant_id=acme.id))
    await registry.key_ring.authenticate(secret)

    removed = await registry.tenants.delete_tenant("acme")

    only = facts("a")
    assert removed == Removed(digests=(only.digest,), weights=(only.weights_sha256,))
    with pytest.raises(AuthenticationError):
        await registry.key_ring.authenticate(secret)
    with pytest.raises(NotFoundError):
        await registry.adapters.get_adapter(acme.id, "support")
    with pytest.raises(NotFoundError):
        await publish_version(registry, acme.id, "support", facts("a"))
    again = await registry.tenants.create_tenant("acme")
    assert again.id != acme.id
    assert (await registry.adapters.list_adapters(again.id)).items == ()
    await registry.usage.flush()
    clock.advance(1)
    report = await registry.usage.query(UsageQuery(start=NOON, end=clock.now, group_by=("tenant",)))
    assert [(row.tenant, row.tenant_id, row.requests) for row in report.rows] == [
        ("acme", acme.id, 1)
    ]


async def test_names_are_found_by_id_and_ids_that_no_tenant_has_are_absent(
    registry: Registry,
) -> None:
    acme, rival = (
        await registry.tenants.create_tenant("acme"),
        await registry.tenants.create_tenant("rival"),
    )
    await registry.tenants.delete_tenant("rival")
    unknown = [f"ten_{index}" for index in range(2500)]
    assert await registry.tenants.tenant_names([*unknown, acme.id, rival.id, "", acme.id]) == {
        acme.id: "acme"
    }
    assert await registry.tenants.tenant_names([]) == {}
