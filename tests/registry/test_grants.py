from __future__ import annotations

import pytest

from manylora.errors import InvalidRequestError, NotFoundError
from manylora.registry import grants
from manylora.registry.db.models import TenantRow
from manylora.registry.names import EVERY_VERSION
from manylora.registry.registry import Registry
from registry_samples import facts, kept_statements, publish_version

pytestmark = pytest.mark.anyio


async def may_call(registry: Registry, tenant: TenantRow, *selectors: str) -> list[bool]:
    found = []
    for selector in selectors:
        try:
            await registry.adapters.resolve(tenant.id, selector)
            found.append(True)
        except NotFoundError:
            found.append(False)
    return found


async def test_a_granted_adapter_is_called_by_its_owners_name(
    registry: Registry, acme: TenantRow, other: TenantRow
) -> None:
    await publish_version(registry, acme.id, "support", facts("a"))
    made = [await registry.grants.grant_adapter(acme.id, "support", other.id) for _ in range(2)]
    assert [is_new for _, is_new in made] == [True, False]
    assert (made[0][0].tenant, made[0][0].tenant_id, made[0][0].version) == (
        "other",
        other.id,
        EVERY_VERSION,
    )
    (listed_grant,) = await registry.grants.list_grants(acme.id, "support")
    assert (listed_grant.tenant, listed_grant.created_at) == ("other", made[0][0].created_at)
    adapter, version = await registry.adapters.resolve(other.id, "acme/support@1")
    assert (adapter.tenant, adapter.tenant_id, version.version) == ("acme", acme.id, 1)
    listed = await registry.adapters.list_granted(other.id)
    assert [(granted.name, version) for granted, version in listed] == [("support", None)]
    assert await may_call(registry, other, "support", "acme/support", "acme/support@1") == [
        False,
        True,
        True,
    ]
    with pytest.raises(NotFoundError):
        await registry.adapters.get_adapter(other.id, "support")

    await registry.grants.withdraw_grant(acme.id, "support", other.id)
    assert await may_call(registry, other, "acme/support", "acme/support@1") == [False, False]
    with pytest.raises(NotFoundError, match="`support` is not granted to `other`"):
        await registry.grants.withdraw_grant(acme.id, "support", other.id)
    assert await registry.adapters.list_granted(other.id) == ()


async def test_a_grant_of_one_version_opens_no_other(
    registry: Registry, acme: TenantRow, other: TenantRow
) -> None:
    for content in "abc":
        await publish_version(registry, acme.id, "support", facts(content))
    await registry.grants.grant_adapter(acme.id, "support", other.id, 2)
    selectors = [
        "acme/support@1",
        "acme/support@2",
        "acme/support",
        f"acme/support@{facts('c').digest}",
    ]
    assert await may_call(registry, other, *selectors) == [False, True, False, False]
    listed = await registry.adapters.list_granted(other.id)
    assert [(granted.current.version, version) for granted, version in listed] == [(2, 2)]
    await registry.adapters.update_adapter(
        acme.id, "support", aliases={"default": 2, "split": {1: 99, 2: 1}}
    )
    assert await may_call(registry, other, *selectors) == [False, True, True, False]
    for number in range(20):
        assert (await registry.adapters.resolve(other.id, "acme/support@split", str(number)))[
            1
        ].version == 2
    await registry.grants.grant_adapter(acme.id, "support", other.id)
    assert await may_call(registry, other, *selectors) == [True] * 4
    await registry.grants.withdraw_grant(acme.id, "support", other.id)
    assert await may_call(registry, other, *selectors) == [False, True, True, False]


async def test_a_deleted_version_takes_its_grant_along_and_a_new_one_is_not_granted(
    registry: Registry, acme: TenantRow, other: TenantRow
) -> None:
    for content in "ab":
        await publish_version(registry, acme.id, "support", facts(content))
    await registry.grants.grant_adapter(acme.id, "support", other.id, 2)
    await registry.adapters.delete_adapter(acme.id, "support", 2)
    assert await registry.adapters.list_granted(other.id) == ()
    assert await registry.grants.list_grants(acme.id, "support") == ()
    await publish_version(registry, acme.id, "support", facts("b"))
    assert await may_call(registry, other, "acme/support", "acme/support@3") == [False, False]


async def test_a_grant_needs_an_adapter_a_version_and_another_tenant(
    registry: Registry, acme: TenantRow, other: TenantRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish_version(registry, acme.id, "support", facts("a"))
    for name, grantee, version in (
        ("missing", other.id, None),
        ("support", "ten_nobody", None),
        ("support", "other", None),
        ("support", other.id, 2),
    ):
        with pytest.raises(NotFoundError):
            await registry.grants.grant_adapter(acme.id, name, grantee, version)
    with pytest.raises(NotFoundError):
        await registry.grants.grant_adapter(other.id, "support", other.id)
    with pytest.raises(InvalidRequestError, match="owner"):
        await registry.grants.grant_adapter(acme.id, "support", acme.id)
    monkeypatch.setattr(grants, "MAX_GRANTS", 1)
    await registry.grants.grant_adapter(acme.id, "support", other.id)
    with pytest.raises(InvalidRequestError, match="at most 1"):
        await registry.grants.grant_adapter(acme.id, "support", other.id, 1)


async def test_grants_go_with_the_grantee(
    registry: Registry, acme: TenantRow, other: TenantRow
) -> None:
    await publish_version(registry, acme.id, "support", facts("a"))
    await registry.grants.grant_adapter(acme.id, "support", other.id)
    await registry.tenants.delete_tenant("other")
    assert await registry.grants.list_grants(acme.id, "support") == ()


async def test_what_strangers_grant_costs_no_more_questions(
    registry: Registry, acme: TenantRow, other: TenantRow
) -> None:
    asked = []
    for number in range(4):
        await publish_version(registry, acme.id, f"support-{number}", facts(str(number)))
        await publish_version(registry, acme.id, f"support-{number}", facts(f"{number} again"))
        await registry.grants.grant_adapter(acme.id, f"support-{number}", other.id, 1)
        await registry.grants.grant_adapter(acme.id, f"support-{number}", other.id)
        with kept_statements() as statements:
            listed = await registry.adapters.list_granted(other.id)
        asked.append(len(statements))
        assert [
            (adapter.name, adapter.current.version, version) for adapter, version in listed
        ] == [
            (f"support-{made}", current, version)
            for made in range(number + 1)
            for current, version in ((2, None), (1, 1))
        ]
    assert asked[0] == asked[-1]
