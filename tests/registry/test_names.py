"""Which texts can be stored, and which version a name means."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.errors import ConflictError, InvalidRequestError, NotFoundError
from manylora.registry.db.models import TenantRow
from manylora.registry.names import (
    Selector,
    check_alias,
    check_integer,
    check_name,
    check_text,
    is_name,
    parse_selector,
    storable,
)
from manylora.registry.registry import Registry
from registry_samples import facts, publish_version

pytestmark = pytest.mark.anyio
USERS = 2000


@pytest.mark.parametrize("name", ["a", "0", "a.b", "my-adapter_2.1", "x" * 63])
def test_a_good_name_is_returned(name: str) -> None:
    assert check_name(name, "name") == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "A",
        ".a",
        "a.",
        "-a",
        "a-",
        "a..b",
        "x" * 64,
        "a/b",
        "a b",
        "a\n",
        "é",
        "a\x00",
        "../etc",
        "a@b",
        7,
        None,
    ],
)
def test_a_bad_name_is_refused_with_its_field(name: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_name(name, "name")  # type: ignore[arg-type]
    assert caught.value.param == "name"


@given(st.text(max_size=70))
def test_names_are_safe_as_a_path_part(text: str) -> None:
    if is_name(text):
        assert re.fullmatch(r"[a-z0-9._-]{1,63}", text)
        assert text not in (".", "..")
        assert ".." not in text


def test_an_alias_is_a_name_but_no_number() -> None:
    assert check_alias("v2") == "v2"
    with pytest.raises(InvalidRequestError):
        check_alias("2")
    with pytest.raises(InvalidRequestError):
        check_alias("sha256:ab")


@pytest.mark.parametrize("text", ["a\x00b", "\ud800", "x" * 11, 5])
def test_text_that_a_database_refuses_is_refused_first(text: object) -> None:
    assert check_text("grüße 🧵", "description", 10) == "grüße 🧵"
    with pytest.raises(InvalidRequestError):
        check_text(text, "description", 10)  # type: ignore[arg-type]


@given(st.text(st.characters(codec=None), max_size=30))
def test_storable_text_always_passes_the_check(text: str) -> None:
    check_text(storable(text, 20), "request_id", 20)


@pytest.mark.parametrize("value", [-1, 1 << 63, True, 1.0, "1", None])
def test_an_integer_beyond_its_bounds_or_of_another_type_is_refused(value: object) -> None:
    assert check_integer((1 << 63) - 1, "limit") == (1 << 63) - 1
    with pytest.raises(InvalidRequestError):
        check_integer(value, "limit")


DIGEST = "sha256:" + "a1" * 32


@pytest.mark.parametrize(
    ("text", "selector"),
    [
        ("support", Selector(tenant=None, name="support")),
        ("support@3", Selector(tenant=None, name="support", by="version", value=3)),
        ("support@prod", Selector(tenant=None, name="support", by="alias", value="prod")),
        (f"support@{DIGEST}", Selector(tenant=None, name="support", by="digest", value=DIGEST)),
        ("acme/support", Selector(tenant="acme", name="support", by="alias", value="default")),
        ("acme/support@12", Selector(tenant="acme", name="support", by="version", value=12)),
    ],
)
def test_each_form_is_understood(text: str, selector: Selector) -> None:
    assert parse_selector(text) == selector


@pytest.mark.parametrize(
    "text",
    [
        *("", "@", "support@", "/support", "acme/", "a/b/c", "Support", "sup\x00port", "\ud800"),
        *(
            f"support@{pin}"
            for pin in ("0", "03", "-1", "9999999999", "1@2", "sha256:abc", DIGEST.upper(), "../x")
        ),
    ],
)
def test_a_malformed_selector_is_an_unknown_model(text: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        parse_selector(text)
    assert caught.value.code == "model_not_found"
    caught.value.message.encode()


@pytest.fixture
async def acme(registry: Registry, acme: TenantRow) -> TenantRow:
    for content in "abc":
        await publish_version(registry, acme.id, "support", facts(content))
    return acme


async def served(registry: Registry, acme: TenantRow, selector: str = "support") -> dict[int, int]:
    """By user, which version answers."""
    return {
        user: (await registry.adapters.resolve(acme.id, selector, f"u{user}"))[1].version
        for user in range(USERS)
    }


async def test_a_canary_gets_its_share_and_keeps_its_users(
    registry: Registry, acme: TenantRow
) -> None:
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


async def test_two_adapters_split_their_users_differently(
    registry: Registry, acme: TenantRow
) -> None:
    for content in "ab":
        await publish_version(registry, acme.id, "sales", facts(content))
    for name in ("support", "sales"):
        await registry.adapters.update_adapter(acme.id, name, aliases={"default": {1: 1, 2: 1}})
    one, other = await served(registry, acme), await served(registry, acme, "sales")
    assert 0.4 < sum(one[user] == other[user] for user in one) / USERS < 0.6


async def test_the_current_version_is_the_heaviest_and_other_aliases_split_too(
    registry: Registry, acme: TenantRow
) -> None:
    adapter = await registry.adapters.update_adapter(
        acme.id, "support", aliases={"default": {1: 9, 3: 1}, "beta": {2: 1, 3: 1}}
    )
    assert adapter.aliases == {"default": {1: 9, 3: 1}, "beta": {2: 1, 3: 1}}
    assert adapter.current.version == 1
    assert set((await served(registry, acme, "support@beta")).values()) == {2, 3}
    assert (await registry.adapters.get_adapter(acme.id, "support")).current.version == 1
    assert (await registry.adapters.list_adapters(acme.id)).items[0].current.version == 1


async def test_all_versions_of_a_pinned_canary_are_pinned(
    registry: Registry, acme: TenantRow
) -> None:
    await registry.adapters.update_adapter(
        acme.id, "support", pinned_copies=1, aliases={"default": {1: 9, 3: 1}, "beta": 2}
    )
    assert {adapter.current.version for adapter in await registry.adapters.pinned_adapters()} == {
        1,
        3,
    }


async def test_no_upload_ends_a_canary_and_a_deleted_version_leaves_it(
    registry: Registry, acme: TenantRow
) -> None:
    await registry.adapters.update_adapter(acme.id, "support", aliases={"default": {1: 9, 2: 1}})
    await registry.adapters.delete_adapter(acme.id, "support", 2)
    assert (await registry.adapters.get_adapter(acme.id, "support")).aliases == {"default": {1: 9}}
    assert set((await served(registry, acme)).values()) == {1}
    await registry.adapters.update_adapter(acme.id, "support", aliases={"default": {1: 9, 3: 1}})
    for content in "abd":  # the versions of the split, and a new one
        with pytest.raises(ConflictError, match="among the versions 1, 3"):
            await publish_version(registry, acme.id, "support", facts(content))
    adapter, _, is_new = await publish_version(
        registry, acme.id, "support", facts("d"), activate=False
    )
    assert (adapter.aliases, adapter.current.version, is_new) == (
        {"default": {1: 9, 3: 1}},
        4,
        True,
    )
    await registry.adapters.update_adapter(acme.id, "support", aliases={"default": 4})
    await publish_version(registry, acme.id, "support", facts("e"))
    await registry.adapters.delete_adapter(acme.id, "support", 5)
    with pytest.raises(NotFoundError):
        await registry.adapters.resolve(acme.id, "support")


WRONG_MEANINGS: list[Any] = [4, 0, {4: 1}, {3: 1, 4: 1}]


@pytest.mark.parametrize(
    "wrong",
    [*({"prod": meaning} for meaning in WRONG_MEANINGS), {"3": 1}, {"Prod": 1}, {"a\x00": 1}],
)
async def test_an_alias_that_makes_no_sense_changes_nothing(
    registry: Registry, acme: TenantRow, wrong: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequestError):
        await registry.adapters.update_adapter(
            acme.id, "support", pinned_copies=1, aliases={"first": 1, **wrong}
        )
    adapter = await registry.adapters.get_adapter(acme.id, "support")
    assert (adapter.aliases, adapter.pinned) == ({"default": {3: 1}}, False)
