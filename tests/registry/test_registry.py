from __future__ import annotations

import contextlib
import inspect
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from manylora.errors import CapacityError, ConfigError, ManyloraError, NotFoundError
from manylora.registry.access.keys import Keys
from manylora.registry.access.sessions import Sessions
from manylora.registry.access.tenants import Tenants
from manylora.registry.adapters import Adapters
from manylora.registry.cache import MAX_OUTAGE_S
from manylora.registry.db.clock import from_micros, iso, to_micros
from manylora.registry.db.models import TenantRow
from manylora.registry.grants import Grants
from manylora.registry.registry import Registry
from registry_samples import StandingClock, facts, publish_version, usage_event

pytestmark = pytest.mark.anyio

TENANT_SCOPED: dict[str, Callable[[Registry, str, str], Awaitable[object]]] = {
    "get_adapter": lambda registry, tenant, name: registry.adapters.get_adapter(tenant, name),
    "list_versions": lambda registry, tenant, name: registry.adapters.list_versions(tenant, name),
    "update_adapter": lambda registry, tenant, name: registry.adapters.update_adapter(
        tenant, name, pinned_copies=1
    ),
    "delete_adapter": lambda registry, tenant, name: registry.adapters.delete_adapter(tenant, name),
    "grant_adapter": lambda registry, tenant, name: registry.grants.grant_adapter(
        tenant, name, "ten_mallory"
    ),
    "withdraw_grant": lambda registry, tenant, name: registry.grants.withdraw_grant(
        tenant, name, "ten_mallory"
    ),
    "list_grants": lambda registry, tenant, name: registry.grants.list_grants(tenant, name),
    "resolve": lambda registry, tenant, name: registry.adapters.resolve(tenant, name),
}


def test_importing_the_registry_loads_no_tensors_and_no_http() -> None:
    program = (
        "import sys, manylora.registry.registry\n"
        "heavy = {'torch', 'numpy', 'triton', 'transformers', 'fastapi', 'starlette', 'uvicorn', 'httpx', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


async def test_what_is_stored_survives_a_restart(tmp_path: Path) -> None:
    registry = await Registry.open(None, tmp_path / "new" / "folder")
    assert stat.S_IMODE((tmp_path / "new" / "folder").stat().st_mode) == 0o700
    acme = await registry.tenants.create_tenant("acme")
    adapter, _, _ = await publish_version(registry, acme.id, "support", facts("a"))
    await registry.usage.record(usage_event("use_1", adapter_id=adapter.id))
    await registry.close()
    registry = await Registry.open(None, tmp_path / "new" / "folder")
    await registry.check()
    assert await registry.adapters.get_adapter(acme.id, "support") == adapter
    assert (await registry.usage.summary([adapter.id]))[adapter.id].requests == 1
    await registry.close()


async def test_it_counts_as_there_for_as_long_as_known_keys_are_served(
    registry: Registry, clock: StandingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await registry.check()
    monkeypatch.setattr(
        registry.database,
        "check",
        AsyncMock(side_effect=CapacityError("away", code="db.unavailable")),
    )
    clock.advance(MAX_OUTAGE_S - 1)
    await registry.check()
    clock.advance(2)
    with pytest.raises(CapacityError):
        await registry.check()


async def test_a_second_process_is_refused_and_disturbs_nothing(
    registry: Registry, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="in use"):
        await Registry.open(None, tmp_path)
    await registry.tenants.create_tenant("acme")


async def test_every_question_about_one_adapter_is_tried_against_other_tenants() -> None:
    takes_tenant_and_name = {
        name
        for part in (Tenants, Keys, Sessions, Adapters, Grants)
        for name, method in inspect.getmembers(part, inspect.iscoroutinefunction)
        if list(inspect.signature(method).parameters)[1:3]
        in (["tenant_id", "name"], ["tenant_id", "selector"])
    }
    assert takes_tenant_and_name == set(TENANT_SCOPED)


@pytest.mark.parametrize("question", TENANT_SCOPED)
async def test_another_tenants_adapter_looks_like_one_that_does_not_exist(
    registry: Registry, acme: TenantRow, other: TenantRow, question: str
) -> None:
    before, _, _ = await publish_version(registry, acme.id, "support", facts("a"))
    answers = []
    for name in ("support", "missing"):
        with pytest.raises(NotFoundError) as caught:
            await TENANT_SCOPED[question](registry, other.id, name)
        assert f"`{name}`" in caught.value.message
        answers.append(
            (caught.value.code, caught.value.param, caught.value.message.replace(name, "NAME"))
        )
    assert answers[0] == answers[1]
    assert await registry.adapters.get_adapter(acme.id, "support") == before


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(max_size=80) | st.text("/@.sha256:0123acmesupport\x00", max_size=30))
async def test_any_text_is_answered_or_refused_on_purpose(
    registry: Registry, acme: TenantRow, text: str
) -> None:
    for call in (
        registry.adapters.resolve(acme.id, text),
        registry.adapters.get_adapter(acme.id, text),
        registry.adapters.list_adapters(acme.id, after=text),
        registry.tenants.get_tenant(text),
        registry.keys.revoke_key(text),
        registry.key_ring.authenticate(text),
        registry.keys.create_key("acme", text),
    ):
        with contextlib.suppress(ManyloraError):
            await call


def test_times_keep_their_microseconds(clock: StandingClock) -> None:
    assert iso(clock.now) == "2026-05-01T12:00:00.000000Z"
    assert from_micros(to_micros(clock.now)) == clock.now
    assert iso(from_micros(1)) == "1970-01-01T00:00:00.000001Z"
    with pytest.raises(ValueError, match="timezone"):
        to_micros(clock.now.replace(tzinfo=None))


async def test_a_folder_that_cannot_be_written_is_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    for folder in (
        tmp_path / "taken",
        Path("/proc/self"),
    ):  # the second is read-only, for root as well
        with pytest.raises(
            ConfigError, match=f"Cannot write to {folder}: .* Give another folder with --data-dir"
        ):
            await Registry.open("sqlite:///unused", folder, pepper="p" * 16)
