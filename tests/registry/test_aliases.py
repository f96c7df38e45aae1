from __future__ import annotations

from collections import Counter

import pytest

from registry_samples import facts, publish_version
from weft.errors import ConflictError, InvalidRequestError, NotFoundError
from weft.registry.records import Tenant
from weft.registry.registry import Registry

pytestmark = pytest.mark.anyio
USERS = 2000


@pytest.fixture
async def acme(registry: Registry) -> Tenant:
    made = await registry.tenants.create_tenant("acme")
    for content in "abc":
        await publish_version(registry, made.id, "support", facts(content))
    return made


async def served(registry: Registry, acme: Tenant, selector: str = "support") -> dict[int, int]:
    """By user, which version answers."""
    return {user: (await registry.adapters.resolve(acme.id, selector, f"u{user}"))[1].version for user in range(USERS)}


async def test_a_canary_gets_its_share_and_keeps_its_users(registry: Registry, acme: Tenant) -> None:
    await registry.adapters.update_adapter(acme.id, "support", aliases={"default": {1: 90, 2: 10}})
    first = await served(registry, acme)
    assert 0.07 < Counter(first.values())[2] / USERS < 0.13
    assert await served(registry, acme) == first
    await registry.adapters.update_adapter(acme.id, "support", aliases={"default": {1: 50, 2: 50}})
    second = await served(registry, acme)
    assert 0.45 < Counter(second.values())[2] / USERS < 0.55
    assert all(second[user] == 2 for user, version in first.items() if version == 2)
    await registry.adapters.update_adapter(acme.id, "support", aliases={"default": 2})
    assert set((await served(registry, acme)).values()) == {2}
    await registry.adapters.update_adapter(acme.id, "support", aliases={"default": 1})
    assert set((await served(registry, acme)).values()) == {1}


async def test_two_adapters_split_their_users_differently(registry: Registry, acme: Tenant) -> None:
    for content in "ab":
        await publish_version(registry, acme.id, "sales", facts(content))
    for name in ("support", "sales"):
        await registry.adapters.update_adapter(acme.id, name, aliases={"default": {1: 1, 2: 1}})
    one, other = await served(registry, acme), await served(registry, acme, "sales")
    assert 0.4 < sum(one[user] == other[user] for user in one) / USERS < 0.6


async def test_the_current_version_is_the_heaviest_and_other_aliases_split_too(
    registry: Registry, acme: Tenant
) -> None:
    adapter = await registry.adapters.update_adapter(
        acme.id, "support", aliases={"default": {1: 9, 3: 1}, "beta": {2: 1, 3: 1}}
    )
    assert adapter.aliases == {"default": {1: 9, 3: 1}, "beta": {2: 1, 3: 1}}
    assert adapter.current.version == 1
    assert set((await served(registry, acme, "support@beta")).values()) == {2, 3}
    assert (await registry.adapters.get_adapter(acme.id, "support")).current.version == 1
    assert (await registry.adapters.list_adapters(acme.id)).items[0].current.version == 1


async def test_all_versions_of_a_pinned_canary_are_pinned(registry: Registry, acme: Tenant) -> None:
    await registry.adapters.update_adapter(
        acme.id, "support", pinned=True, aliases={"default": {1: 9, 3: 1}, "beta": 2}
    )
    assert {adapter.current.version for adapter in await registry.adapters.pinned_adapters()} == {1, 3}


async def test_no_upload_ends_a_canary_and_a_deleted_version_leaves_it(registry: Registry, acme: Tenant) -> None:
    await registry.adapters.update_adapter(acme.id, "support", aliases={"default": {1: 9, 2: 1}})
    await registry.adapters.delete_adapter(acme.id, "support", 2)
    assert (await registry.adapters.get_adapter(acme.id, "support")).aliases == {"default": {1: 9}}
    assert set((await served(registry, acme)).values()) == {1}
    await registry.adapters.update_adapter(acme.id, "support", aliases={"default": {1: 9, 3: 1}})
    for content in "abd":  # the versions of the split, and a new one
        with pytest.raises(ConflictError, match="among the versions 1, 3"):
            await publish_version(registry, acme.id, "support", facts(content))
    adapter, _, is_new = await publish_version(registry, acme.id, "support", facts("d"), activate=False)
    assert (adapter.aliases, adapter.current.version, is_new) == ({"default": {1: 9, 3: 1}}, 4, True)
    await registry.adapters.update_adapter(acme.id, "support", aliases={"default": 4})
    await publish_version(registry, acme.id, "support", facts("e"))
    await registry.adapters.delete_adapter(acme.id, "support", 5)
    with pytest.raises(NotFoundError):
        await registry.adapters.resolve(acme.id, "support")


@pytest.mark.parametrize(
    "meaning", [{}, {4: 1}, {1: 0}, {1: -1}, {1: 10_001}, {1: True}, dict.fromkeys(range(1, 10), 1)]
)
async def test_a_split_that_makes_no_sense_changes_nothing(
    registry: Registry, acme: Tenant, meaning: dict[int, int]
) -> None:
    with pytest.raises(InvalidRequestError):
        await registry.adapters.update_adapter(acme.id, "support", aliases={"first": 1, "prod": meaning})
    assert (await registry.adapters.get_adapter(acme.id, "support")).aliases == {"default": {3: 1}}
