"""Two apps over one database: together they admit what one of them would."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from api_server import BASE, Api, eventually, new_client
from api_server import api as open_api
from manylora.registry.access import limit_allocations
from manylora.registry.db.clock import to_micros, utc_now
from manylora.registry.registry import Registry
from manylora.server.limits.shared_accounts import SharedAccounts, open_shared_accounts
from postgres_server import KINDS, fresh_database
from registry_samples import NOON, usage_event

pytestmark = pytest.mark.anyio
SHORT = {"model": BASE, "prompt": [5, 6, 7, 8], "max_tokens": 2, "ignore_eos": True}


@dataclass
class Two:
    """Both apps, and a client of a tenant at each."""

    apis: tuple[Api, ...]
    clients: tuple[httpx.AsyncClient, ...] = ()
    now_us: int = field(default_factory=lambda: to_micros(utc_now()))
    """The database's clock, which stands still."""

    async def limit(self, **limits: int) -> None:
        """Make these the limits of tenant acme; the servers know them at once."""
        first = self.apis[0]
        key = await first.key("acme")
        async with first.admin as admin:
            assert (
                await admin.patch("/v1/tenants/acme", json={"limits": limits})
            ).status_code == 200
        self.clients = tuple(
            new_client(
                key, "http://test", httpx.ASGITransport(app=api.app, raise_app_exceptions=False)
            )
            for api in self.apis
        )

    async def send(self, count: int, **fields: Any) -> list[httpx.Response]:
        """So many requests at the same time, to the servers in turns."""
        posts = (
            self.clients[n % 2].post("/v1/completions", json={**SHORT, **fields})
            for n in range(count)
        )
        return list(await asyncio.gather(*posts))


def statuses(answers: list[httpx.Response]) -> dict[int, int]:
    codes = [answer.status_code for answer in answers]
    return {code: codes.count(code) for code in set(codes)}


@pytest.fixture(params=KINDS)
async def two(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Two]:
    url = (
        f"sqlite:///{tmp_path / 'shared.sqlite'}" if request.param == "sqlite" else fresh_database()
    )
    opened = Two(())

    async def standing(_session: AsyncSession) -> int:
        return opened.now_us

    monkeypatch.setattr(limit_allocations.LimitAllocations.__init__, "__defaults__", (standing,))
    async with AsyncExitStack() as stack:
        apis = []
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "data").mkdir(mode=0o700)
            (tmp_path / name / "data" / "pepper").write_text("ab" * 32)
            api = await stack.enter_async_context(open_api(tmp_path / name, database_url=url))
            accounts = await open_shared_accounts(api.services.registry, f"srv_{name}", stack)
            limits = replace(api.services.limits, accounts=accounts)
            api.services = api.app.state.services = replace(api.services, limits=limits)
            apis.append(api)
        opened.apis = tuple(apis)
        yield opened


async def test_sixty_requests_a_minute_stay_sixty(two: Two) -> None:
    await two.limit(requests_per_minute=60)
    answers = [answer for _ in range(10) for answer in await two.send(10)]
    assert statuses(answers) == {200: 60, 429: 40}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["x-ratelimit-limit-requests"] == "60"
    me = (await two.clients[1].get("/v1/me")).json()
    assert me["used"]["tenant"]["requests_per_minute"] == 60


async def test_tokens_a_minute_and_what_is_not_used_of_them(two: Two) -> None:
    await two.limit(tokens_per_minute=600)
    admitted = 0
    for _ in range(20):
        answers = await two.send(4, max_tokens=6)
        admitted += statuses(answers).get(200, 0)
    await asyncio.sleep(1.5)  # what is left at one of them and too little for a request goes back
    admitted += statuses(await two.send(1, max_tokens=6)).get(200, 0)
    assert admitted == 60
    assert sum(api.engine.requests != [] for api in two.apis) == 2


async def test_as_many_run_at_once_as_may(two: Two) -> None:
    for api in two.apis:
        api.engine.token_s = 0.005
    await two.limit(concurrent_requests=3)
    running = asyncio.create_task(two.send(3, max_tokens=200))
    await eventually(lambda: sum(len(api.engine.running) for api in two.apis) == 3)
    refused = await two.send(4)
    assert statuses(refused) == {429: 4}
    assert refused[0].headers["retry-after"] == "1"
    me = (await two.clients[0].get("/v1/me")).json()
    assert me["used"]["tenant"]["concurrent_requests"] == 3
    assert statuses(await running) == {200: 3}
    assert statuses(await two.send(2)) == {200: 2}


async def test_a_month_is_used_up_for_both(two: Two) -> None:
    await two.limit(tokens_per_month=120)
    admitted = 0
    for _ in range(30):
        admitted += statuses(await two.send(2 if admitted < 10 else 1, max_tokens=6)).get(200, 0)
        if admitted == 12:
            break
        await asyncio.sleep(
            0.3
        )  # what is left at one of them and too little for a request goes back
    for api in two.apis:
        await api.services.registry.usage.flush()
    totals = (await two.clients[0].get("/v1/usage")).json()["totals"]
    assert totals["prompt_tokens"] + totals["completion_tokens"] == 120
    await asyncio.sleep(0.3)
    refused = await two.send(2)
    assert {answer.json()["error"]["code"] for answer in refused} == {"insufficient_quota"}


async def test_a_revoked_key_and_a_new_limit_count_at_both_within_a_second(two: Two) -> None:
    await two.limit(requests_per_minute=1000)
    assert statuses(await two.send(4)) == {200: 4}
    await two.limit(requests_per_minute=0)
    await asyncio.sleep(1.1)
    assert statuses(await two.send(4)) == {429: 4}
    key_id = (await two.clients[0].get("/v1/me")).json()["key"]["id"]
    await two.apis[0].services.registry.keys.revoke_key(key_id)
    await asyncio.sleep(1.1)
    assert statuses(await two.send(4)) == {401: 4}


async def test_a_server_that_starts_again_has_its_old_part_back_after_a_minute(two: Two) -> None:
    await two.limit(tokens_per_month=100)
    registry = two.apis[0].services.registry
    tenant_id = (await two.clients[0].get("/v1/me")).json()["tenant"]["id"]
    died = limit_allocations.AllocationRequest(
        holder_id=tenant_id,
        kind="tokens_per_month",
        limit=100,
        held=20,
        spare=20,
        back=0,
        returns=(),
        needs=(),
        ahead=0,
    )
    await limit_allocations.LimitAllocations(registry.database, "srv_three").exchange([died])
    refused = (await two.send(1, max_tokens=90))[0]
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "reserved by requests that run" in refused.json()["error"]["message"]
    async with AsyncExitStack() as stack:
        assert isinstance(await open_shared_accounts(registry, "srv_three", stack), SharedAccounts)
        await asyncio.sleep(0.2)
        assert statuses(await two.send(1, max_tokens=90)) == {429: 1}, (
            "what was cut off is not billed yet"
        )
        two.now_us += limit_allocations.HELD_US
        await asyncio.sleep(0.2)
        assert statuses(await two.send(1, max_tokens=90)) == {200: 1}


async def test_a_month_holds_when_a_server_is_killed_and_starts_again(tmp_path: Path) -> None:
    """Killed under a request of 900 tokens, which are billed a moment after the start."""
    url, now_us = f"sqlite:///{tmp_path}/shared.sqlite", to_micros(NOON)

    async def clock(_session: AsyncSession) -> int:
        return now_us

    async def got(allocations: limit_allocations.LimitAllocations, tokens: int) -> int:
        nothing = {"held": 0, "spare": 0, "back": 0, "ahead": 0}
        ask = limit_allocations.AllocationRequest(
            holder_id="ten_acme",
            kind="tokens_per_month",
            limit=1000,
            needs=[tokens],
            returns=(),
            **nothing,
        )
        return (await allocations.exchange([ask]))[0].granted

    async with AsyncExitStack() as stack:

        async def server(
            folder: str, name: str, grace_s: float = 0.0
        ) -> tuple[Registry, limit_allocations.LimitAllocations]:
            registry = await Registry.open(url, tmp_path / folder, pepper="p" * 16, grace_s=grace_s)
            stack.push_async_callback(registry.close)
            return registry, limit_allocations.LimitAllocations(registry.database, name, clock)

        one, allocations = await server("one", "srv_one")
        assert await got(allocations, 1000) == 1000
        one.usage.progress(
            usage_event(one.usage.mint_id(), prompt_tokens=100, completion_tokens=800)
        )
        await one.usage.flush()
        shutil.copytree(tmp_path / "one", tmp_path / "again")
        again, allocations = await server("again", "srv_one", grace_s=0.1)
        await allocations.forget(is_billed=False)
        _, others = await server("other", "srv_other")
        assert await got(others, 1) == await got(allocations, 1) == 0
        await asyncio.sleep(0.2)
        await again.usage.flush()
        now_us += limit_allocations.HELD_US
        assert await got(others, 101) == 0
        assert await got(others, 100) == 100


def test_a_server_that_is_alone_does_not_load_allocations() -> None:
    program = (
        "import sys, manylora.server.serve; "
        "sys.exit(any('allocation' in name for name in sys.modules if 'manylora' in name))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
