from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from manylora.adapters.ref import AdapterRef
from manylora.errors import CapacityError, InvalidRequestError, NotFoundError
from manylora.registry.db.models import TenantRow
from manylora.registry.records import Removed
from manylora.registry.registry import Registry
from registry_samples import NOON, Draft, StandingClock, facts, kept_statements, publish_version

pytestmark = pytest.mark.anyio


async def test_the_first_upload_makes_the_adapter_and_version_one(
    registry: Registry, acme: TenantRow
) -> None:
    uploaded = facts("a")
    adapter, version, created = await publish_version(
        registry, acme.id, "support", uploaded, "answers questions"
    )
    assert created
    assert (version.version, version.created_at, version.adapter_id) == (1, NOON, adapter.id)
    assert (adapter.tenant, adapter.name, adapter.pinned) == ("acme", "support", False)
    assert (adapter.description, adapter.aliases) == ("answers questions", {"default": {1: 1}})
    assert await registry.adapters.get_adapter(acme.id, "support") == adapter
    found, resolved = await registry.adapters.resolve(acme.id, "support")
    assert resolved == version
    assert found.ref(resolved) == AdapterRef(
        tenant_id=acme.id,
        adapter_id=adapter.id,
        version=1,
        digest=uploaded.digest,
        weights_sha256=uploaded.weights_sha256,
        config=uploaded.spec,
    )


async def test_a_selector_is_found_with_one_statement(registry: Registry, acme: TenantRow) -> None:
    for content in "ab":
        await publish_version(registry, acme.id, "support", facts(content))
    with kept_statements() as statements:
        for selector in ("support", "support@1", "acme/support@default"):
            await registry.adapters.resolve(acme.id, selector)
    # whether anything has changed is looked up beside it
    selects = [each for each in statements if each.startswith("SELECT") and "audit_log" not in each]
    assert len(selects) == 3, statements


async def test_two_processes_publishing_at_once_make_one_version(
    registry: Registry, acme: TenantRow, tmp_path: Path, database_url: str | None
) -> None:
    other = await Registry.open(
        database_url or f"sqlite:///{tmp_path}/registry.sqlite", tmp_path / "other"
    )
    attempts = [(process, content) for content in "aabb" for process in (registry, other)]
    published = await asyncio.gather(
        *(
            publish_version(process, acme.id, "support", facts(content))
            for process, content in attempts
        )
    )
    assert [created for _, _, created in published].count(True) == 2
    assert {version.version for _, version, _ in published} == {1, 2}
    await other.close()


async def test_an_adapter_takes_a_hundred_aliases(registry: Registry, acme: TenantRow) -> None:
    await publish_version(registry, acme.id, "support", facts("a"))
    await registry.adapters.update_adapter(
        acme.id, "support", aliases={f"a{i}": 1 for i in range(99)}
    )
    with pytest.raises(InvalidRequestError):
        await registry.adapters.update_adapter(acme.id, "support", aliases={"one-more": 1})


async def test_description_and_pin_change_by_themselves(
    registry: Registry, acme: TenantRow
) -> None:
    await publish_version(registry, acme.id, "support", facts("a"), "old")
    assert (
        await registry.adapters.update_adapter(acme.id, "support", pinned_copies=1)
    ).description == "old"
    adapter = await registry.adapters.update_adapter(acme.id, "support", description="new")
    assert (adapter.description, adapter.pinned) == ("new", True)
    adapter, _, _ = await publish_version(registry, acme.id, "support", facts("b"))
    assert (adapter.description, adapter.pinned) == ("new", True)
    with pytest.raises(InvalidRequestError):
        await registry.adapters.update_adapter(acme.id, "support", description="\x00")
    for name in ("", "Support", "\x00", "a/b"):
        with pytest.raises(InvalidRequestError):
            await publish_version(registry, acme.id, name, facts("a"))
        with pytest.raises(NotFoundError):
            await registry.adapters.get_adapter(acme.id, name)


async def test_adapters_are_listed_by_name_in_pages(registry: Registry, acme: TenantRow) -> None:
    for name in ("c", "a", "b"):
        await publish_version(registry, acme.id, name, facts(name))
    first = await registry.adapters.list_adapters(acme.id, limit=2)
    second = await registry.adapters.list_adapters(acme.id, after=first.next, limit=2)
    assert [adapter.name for adapter in (*first.items, *second.items)] == ["a", "b", "c"]
    assert [adapter.current.digest for adapter in second.items] == [facts("c").digest]
    assert second.next is None


async def test_content_that_someone_else_refers_to_is_not_removed(
    registry: Registry, acme: TenantRow, other: TenantRow
) -> None:
    same_weights = facts("a", rank=16)
    await publish_version(registry, acme.id, "support", facts("a"))
    await publish_version(registry, acme.id, "twin", facts("a"))
    await publish_version(registry, other.id, "theirs", same_weights)
    assert await registry.adapters.delete_adapter(acme.id, "twin") == Removed(
        digests=(), weights=()
    )
    assert await registry.adapters.delete_adapter(acme.id, "support") == Removed(
        digests=(facts("a").digest,), weights=()
    )
    assert await registry.adapters.unreferenced([same_weights.weights_sha256, "0" * 64]) == {
        "0" * 64
    }
    assert (await registry.adapters.delete_adapter(other.id, "theirs")).weights == (
        same_weights.weights_sha256,
    )
    assert await registry.adapters.unreferenced([]) == frozenset()


async def test_digests_are_named_by_all_their_versions(
    registry: Registry, acme: TenantRow, other: TenantRow
) -> None:
    for content in ("a", "b"):
        await publish_version(registry, acme.id, "support", facts(content))
    await publish_version(registry, other.id, "copy", facts("b"))
    unknown = [f"sha256:{index:064x}" for index in range(1200)]
    names = await registry.adapters.version_names(
        [*unknown, facts("b").digest, facts("a").digest, facts("b").digest]
    )
    assert names == {
        facts("a").digest: ("acme/support@1",),
        facts("b").digest: ("acme/support@2", "other/copy@1"),
    }
    assert await registry.adapters.version_names([]) == {}


async def test_pinned_adapters_of_all_tenants_come_oldest_version_first(
    registry: Registry, acme: TenantRow, other: TenantRow, clock: StandingClock
) -> None:
    assert await registry.adapters.pinned_adapters() == ()
    for tenant, name, content in (
        (other, "b", "b"),
        (acme, "a", "a"),
        (acme, "unpinned", "c"),
        (acme, "b", "b"),
    ):
        clock.advance(1)
        await publish_version(registry, tenant.id, name, facts(content))
        if name != "unpinned":
            await registry.adapters.update_adapter(tenant.id, name, pinned_copies=1)
    pinned = await registry.adapters.pinned_adapters()
    assert [f"{adapter.tenant}/{adapter.name}" for adapter in pinned] == [
        "other/b",
        "acme/a",
        "acme/b",
    ]
    clock.advance(1)
    await publish_version(registry, other.id, "b", facts("newer"))
    pinned = await registry.adapters.pinned_adapters()
    assert [adapter.current.digest for adapter in pinned] == [
        facts(c).digest for c in ("a", "b", "newer")
    ]


async def test_changes_are_in_the_audit_log(
    registry: Registry, acme: TenantRow, clock: StandingClock
) -> None:
    await publish_version(registry, acme.id, "support", facts("a"), actor="key_7")
    clock.advance(5)
    await registry.adapters.update_adapter(acme.id, "support", aliases={"prod": 1})
    await registry.adapters.delete_adapter(acme.id, "support", actor="key_7")
    with pytest.raises(NotFoundError):
        await registry.adapters.delete_adapter(acme.id, "support")
    newest_first = await registry.list_audit()
    assert [(entry.actor, entry.action, entry.tenant, entry.target) for entry in newest_first] == [
        ("key_7", "adapter.delete", "acme", "support"),
        ("admin", "adapter.update", "acme", "support"),
        ("key_7", "adapter.publish", "acme", "support@1"),
        ("admin", "tenant.create", "acme", "acme"),
    ]
    assert newest_first[1].detail == {"aliases": {"prod": 1}}
    assert newest_first[2].at == NOON
    older = await registry.list_audit(before=newest_first[2].id, limit=1)
    assert [entry.id for entry in older] == [newest_first[3].id]


async def test_no_version_refers_to_a_blob_while_it_is_deleted(
    registry: Registry, acme: TenantRow, tmp_path: Path, database_url: str | None
) -> None:
    other = await Registry.open(
        database_url or f"sqlite:///{tmp_path}/registry.sqlite", tmp_path / "other"
    )
    order: list[str] = []

    async def publish(process: Registry) -> None:
        async with process.adapters.publishing(acme.id, Draft(name="support"), facts("a")):
            order.append("stored")

    sha256 = facts("a").weights_sha256
    for process in (registry, other):
        async with registry.adapters.locking_unreferenced([sha256, "0" * 64]) as unreferenced:
            publishing = asyncio.create_task(publish(process))
            await asyncio.sleep(0.2)
            assert not publishing.done()
            assert unreferenced == {sha256, "0" * 64}
            order.append("deleted")
        await publishing
        async with other.adapters.locking_unreferenced([sha256]) as unreferenced:
            assert unreferenced == frozenset()
        await registry.adapters.delete_adapter(acme.id, "support")
    assert order == ["deleted", "stored"] * 2
    await other.close()


async def test_what_cannot_be_stored_is_not_published(registry: Registry, acme: TenantRow) -> None:
    with pytest.raises(CapacityError):
        async with registry.adapters.publishing(acme.id, Draft(name="support"), facts("a")):
            raise CapacityError("full", code="storage.full")
    with pytest.raises(NotFoundError):
        await registry.adapters.get_adapter(acme.id, "support")
    assert [entry.action for entry in await registry.list_audit()] == ["tenant.create"]


async def test_adapters_of_all_tenants_are_listed_by_tenant_and_name_in_pages(
    registry: Registry, acme: TenantRow
) -> None:
    other = await registry.tenants.create_tenant("a-b")
    for tenant, names in ((acme, ("b", "z")), (other, ("a", "b", "c"))):
        for name in names:
            await publish_version(registry, tenant.id, name, facts(f"{tenant.name}{name}"))
    listed, after = [], None
    for size in (2, 2, 1):
        page = await registry.adapters.list_adapters(None, after=after, limit=2)
        assert len(page.items) == size
        listed += [f"{adapter.tenant}/{adapter.name}" for adapter in page.items]
        after = page.next
    assert listed == ["a-b/a", "a-b/b", "a-b/c", "acme/b", "acme/z"]
    assert after is None
    assert [a.name for a in (await registry.adapters.list_adapters(None, after="acme")).items] == [
        "b",
        "z",
    ]
    assert (await registry.adapters.list_adapters(None, after="acme/z")).items == ()
    with pytest.raises(InvalidRequestError):
        await registry.adapters.list_adapters(None, after="nul/\x00")
