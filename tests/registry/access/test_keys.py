from __future__ import annotations

import hmac
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from manylora.data_folder import read_pepper
from manylora.errors import (
    AuthenticationError,
    CapacityError,
    ConfigError,
    InvalidRequestError,
    NotFoundError,
)
from manylora.registry.db.database import unavailable
from manylora.registry.db.models import KeyRow, TenantRow
from manylora.registry.limits import Limits
from manylora.registry.records import SCOPES, Identity
from manylora.registry.registry import Registry
from registry_samples import NOON, StandingClock, facts, publish_version

pytestmark = pytest.mark.anyio


@pytest.fixture
async def registry(registry: Registry, acme: TenantRow) -> Registry:
    """With a tenant."""
    return registry


def shown(*keys: KeyRow) -> list[dict[str, Any]]:
    """All columns of keys."""
    return [
        {column.name: getattr(key, column.name) for column in KeyRow.__table__.c} for key in keys
    ]


async def refuses(registry: Registry, secret: str) -> None:
    with pytest.raises(AuthenticationError):
        await registry.key_ring.authenticate(secret)


async def test_a_secret_tells_tenant_key_and_scopes(registry: Registry, acme: TenantRow) -> None:
    key, secret = await registry.keys.create_key("acme", "ci", ["usage", "infer", "infer"])
    assert await registry.key_ring.authenticate(secret) == Identity(
        role="tenant", tenant_id=acme.id, tenant="acme", key_id=key.id, scopes=("infer", "usage")
    )
    assert await registry.key_ring.authenticate("admin-secret") == Identity(
        role="admin", tenant_id=None, tenant=None, key_id=None, scopes=SCOPES
    )
    assert (await registry.keys.create_key("acme"))[0].scopes == [*SCOPES]
    for call in (registry.keys.create_key("nobody"), registry.keys.list_keys("nobody")):
        with pytest.raises(NotFoundError):
            await call
    assert key.name == "ci"
    assert secret.startswith(key.prefix + "_")
    await refuses(registry, secret[:-1] + ("A" if secret[-1] != "A" else "B"))
    assert re.fullmatch(r"manylora_[0-9a-z]{12}_[A-Za-z0-9_-]{43}", secret)


@pytest.mark.parametrize(
    "secret",
    [
        "",
        "admin-secre",
        "manylora_000000000000_" + "A" * 43,
        "manylora_",
        "\ud800",
        "\x00",
        "x" * 100_000,
    ],
    ids=["empty", "cut", "unknown", "prefix", "surrogate", "nul", "long"],
)
async def test_nobody_holds_a_made_up_secret(registry: Registry, secret: str) -> None:
    await refuses(registry, secret)


async def test_without_an_admin_key_nobody_is_admin(tmp_path: Path) -> None:
    registry = await Registry.open(None, tmp_path)
    for secret in ("", "None", "admin"):
        await refuses(registry, secret)
    await registry.close()


async def test_unknown_prefixes_are_compared_as_well(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = Mock(wraps=hmac.compare_digest)
    monkeypatch.setattr(hmac, "compare_digest", compare)
    await refuses(registry, "manylora_000000000000_" + "A" * 43)
    assert compare.call_count == 2
    assert compare.call_args.args[1] == "0" * 64


async def test_a_revoked_key_stops_at_once_and_for_ever(registry: Registry) -> None:
    kept, _ = await registry.keys.create_key("acme")
    key, secret = await registry.keys.create_key("acme")
    await registry.key_ring.authenticate(secret)
    await registry.keys.revoke_key(key.id)
    await refuses(registry, secret)
    assert shown(*await registry.keys.list_keys("acme")) == shown(kept)
    for key_id in (key.id, "key_unknown"):
        with pytest.raises(NotFoundError, match=f"There is no key `{key_id}`"):
            await registry.keys.revoke_key(key_id)
        with pytest.raises(NotFoundError):
            await registry.keys.update_key(key_id, name="x")
    with pytest.raises(InvalidRequestError):
        await registry.keys.revoke_key("\x00")


async def test_a_key_expires_even_when_it_was_just_used(
    registry: Registry, clock: StandingClock
) -> None:
    key, secret = await registry.keys.create_key("acme", expires_at=NOON + timedelta(seconds=10))
    assert key.expires_at == NOON + timedelta(seconds=10)
    clock.advance(9)
    await registry.key_ring.authenticate(secret)
    clock.advance(1)
    await refuses(registry, secret)


async def test_a_key_revoked_by_another_server_stops_within_a_second(
    registry: Registry, clock: StandingClock, tmp_path: Path, database_url: str | None
) -> None:
    key, secret = await registry.keys.create_key("acme")
    await registry.key_ring.authenticate(secret)
    url = database_url or f"sqlite:///{tmp_path}/registry.sqlite"
    other = await Registry.open(url, tmp_path / "other", pepper="other")
    await other.keys.revoke_key(key.id)
    await other.close()
    clock.advance(1.0)
    await refuses(registry, secret)


@pytest.mark.parametrize(
    "wrong",
    [
        {"expires_at": NOON},
        {"name": "a\x00"},
        {"name": "x" * 256},
        {"limits": {"adapters": 1}},
        {"limits": {"requests_per_minute": -1}},
        {"limits": {"requests_per_minute": 0.5}},
    ],
)
async def test_a_key_that_makes_no_sense_is_neither_made_nor_changed(
    registry: Registry, wrong: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequestError):
        await registry.keys.create_key("acme", **wrong)
    assert await registry.keys.list_keys("acme") == ()
    key, _ = await registry.keys.create_key("acme")
    with pytest.raises(InvalidRequestError):
        await registry.keys.update_key(key.id, **wrong)
    assert shown(await registry.keys.get_key(key.id)) == shown(key)


async def test_the_folder_never_holds_a_secret(registry: Registry, tmp_path: Path) -> None:
    _, secret = await registry.keys.create_key("acme")
    await registry.key_ring.authenticate(secret)
    content = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())  # noqa: ASYNC240
    assert secret.split("_", 2)[2].encode() not in content
    assert b"admin-secret" not in content


async def test_keys_work_after_a_restart_and_not_with_another_pepper(tmp_path: Path) -> None:
    registry = await Registry.open(None, tmp_path)
    await registry.tenants.create_tenant("acme")
    _, secret = await registry.keys.create_key("acme")
    await registry.close()
    registry = await Registry.open(None, tmp_path)
    await registry.key_ring.authenticate(secret)
    await registry.close()
    registry = await Registry.open(None, tmp_path, pepper="another")
    await refuses(registry, secret)
    await registry.close()


async def test_keys_without_their_pepper_are_told_at_the_start(
    registry: Registry, tmp_path: Path, database_url: str | None
) -> None:
    url, elsewhere = database_url or f"sqlite:///{tmp_path}/registry.sqlite", tmp_path / "other"
    await (await Registry.open(url, elsewhere)).close()  # a database without keys
    (elsewhere / "pepper").unlink()
    key, _ = await registry.keys.create_key("acme")
    with pytest.raises(
        ConfigError, match=r"pepper is missing.* Restore it from a backup, or set MANYLORA_PEPPER"
    ):
        await Registry.open(url, elsewhere)
    assert not (elsewhere / "pepper").exists()
    await registry.keys.revoke_key(key.id)
    await (await Registry.open(url, elsewhere)).close()
    assert len(bytes.fromhex((elsewhere / "pepper").read_text())) == 32


@pytest.mark.parametrize("content", [b"", b"ab" * 15, b"xyz" * 20, b"\xff" * 40])
def test_a_damaged_pepper_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pepper").write_bytes(content)
    with pytest.raises(ConfigError, match=r"pepper is damaged: .* Restore it"):
        read_pepper(tmp_path, None, has_keys=False)


def test_a_pepper_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "pepper").mkdir()
    with pytest.raises(ConfigError, match="pepper cannot be read or made: Is a directory"):
        read_pepper(tmp_path, None, has_keys=False)


def test_the_pepper_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        (pepper,) = set(
            threads.map(lambda _: read_pepper(tmp_path, None, has_keys=False), range(8))
        )
    assert len(pepper) == 32
    assert stat.S_IMODE((tmp_path / "pepper").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["pepper"]


def test_a_pepper_that_is_given_is_not_written(tmp_path: Path) -> None:
    assert read_pepper(tmp_path, "given", has_keys=True) == b"given"
    assert list(tmp_path.iterdir()) == []


async def test_a_rotated_key_lives_on_under_a_new_secret(registry: Registry) -> None:
    ends_at = NOON + timedelta(days=30)
    old, old_secret = await registry.keys.create_key(
        "acme", "site", ["infer"], ends_at, {"requests_per_minute": 9}
    )
    new, new_secret = await registry.keys.rotate_key(old.id)
    assert shown(new) == [{**shown(old)[0], "prefix": new.prefix, "digest": new.digest}]
    assert new.prefix != old.prefix
    assert (await registry.key_ring.authenticate(new_secret)).key_id == old.id
    await refuses(registry, old_secret)
    assert [key.id for key in await registry.keys.list_keys("acme")] == [old.id]
    await registry.keys.revoke_key(old.id)
    await refuses(registry, new_secret)
    with pytest.raises(NotFoundError):
        await registry.keys.rotate_key(old.id)


async def test_a_secret_before_the_last_works_until_its_grace_ends(
    registry: Registry, clock: StandingClock
) -> None:
    key, first = await registry.keys.create_key("acme")
    _, second = await registry.keys.rotate_key(key.id, grace_s=60)
    clock.advance(59)
    assert {
        (await registry.key_ring.authenticate(secret)).key_id for secret in (first, second)
    } == {key.id}
    clock.advance(1)
    await refuses(registry, first)
    _, third = await registry.keys.rotate_key(key.id, grace_s=60)
    await registry.keys.rotate_key(key.id, grace_s=60)
    for dead in (first, second):
        await refuses(registry, dead)
    await registry.key_ring.authenticate(third)
    await registry.keys.revoke_key(key.id)
    await refuses(registry, third)


async def test_a_grace_does_not_outlive_the_keys_own_end(
    registry: Registry, clock: StandingClock
) -> None:
    key, first = await registry.keys.create_key("acme", expires_at=NOON + timedelta(seconds=30))
    await registry.keys.rotate_key(key.id, grace_s=60)
    clock.advance(30)
    await refuses(registry, first)


async def test_known_keys_work_through_an_outage_of_a_minute(
    registry: Registry, acme: TenantRow, clock: StandingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, secret = await registry.keys.create_key("acme")
    _, unseen = await registry.keys.create_key("acme")
    await registry.key_ring.authenticate(secret)

    await registry.tenants.create_tenant("late")  # a change that does not concern the key
    await publish_version(registry, acme.id, "support", facts("a"))
    for name in ("read", "write", "rows"):
        monkeypatch.setattr(registry.database, name, Mock(side_effect=unavailable()))
    clock.advance(30)
    assert (await registry.key_ring.authenticate(secret)).tenant == "acme"
    with pytest.raises(CapacityError):
        await registry.key_ring.authenticate(unseen)
    with pytest.raises(CapacityError):
        await registry.tenants.create_tenant("other")
    assert (await registry.key_ring.authenticate(secret)).tenant == "acme"
    clock.advance(31)
    with pytest.raises(CapacityError):
        await registry.key_ring.authenticate(secret)


async def test_a_key_tells_its_own_limits_and_its_tenants_limits_and_weight(
    registry: Registry,
) -> None:
    await registry.tenants.update_tenant(
        "acme", {"requests_per_minute": 9, "adapters": 2}, weight=2
    )
    key, secret = await registry.keys.create_key(
        "acme", limits={"concurrent_requests": 3, "tokens_per_minute": None}
    )
    assert key.limits == {"concurrent_requests": 3}
    identity = await registry.key_ring.authenticate(secret)
    assert identity.key_limits == Limits(concurrent_requests=3)
    assert (identity.tenant_limits, identity.tenant_weight) == (
        Limits(requests_per_minute=9, adapters=2),
        2,
    )
    await registry.tenants.update_tenant("acme", {}, weight=4)
    identity = await registry.key_ring.authenticate(secret)
    assert (identity.tenant_limits, identity.tenant_weight) == (Limits(), 4)


async def test_a_changed_key_keeps_its_secret_and_what_was_not_named(
    registry: Registry, clock: StandingClock
) -> None:
    key, secret = await registry.keys.create_key(
        "acme", "ci", ["infer"], limits={"requests_per_minute": 1}
    )
    await registry.key_ring.authenticate(secret)
    with pytest.raises(InvalidRequestError, match="scopes must be among"):
        await registry.keys.update_key(key.id, scopes=["usage", "everything"])
    changed = await registry.keys.update_key(
        key.id, scopes=["usage"], limits={"tokens_per_month": 5}
    )
    assert shown(changed) == [
        {**shown(key)[0], "scopes": ["usage"], "limits": {"tokens_per_month": 5}}
    ]
    assert shown(await registry.keys.get_key(key.id)) == shown(changed)
    identity = await registry.key_ring.authenticate(secret)
    assert (identity.scopes, identity.key_limits) == (("usage",), Limits(tokens_per_month=5))
    entry = (await registry.list_audit())[0]
    assert (entry.action, entry.detail) == (
        "key.update",
        {"scopes": ["usage"], "limits": {"tokens_per_month": 5}},
    )
    await registry.keys.update_key(key.id, expires_at=NOON + timedelta(hours=1))
    clock.advance(3600)
    await refuses(registry, secret)
