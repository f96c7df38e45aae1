from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from unittest.mock import Mock

import httpx
import pytest

from api_server import api
from fake_cluster import PEPPER, FakeCluster, FakeReplica
from manylora.adapters.ref import ResidentAdapter
from manylora.engine.fairness.service import TenantLoad
from manylora.engine.status import EngineLoad
from manylora.errors import CapacityError, ConfigError
from manylora.server.cluster.replica import Duties, join
from manylora.server.cluster.wire import (
    CLUSTER,
    LEDGER_ID,
    LENGTH,
    STATE_PATH,
    WEIGHT_SHARE,
    Frames,
    cluster_token,
)
from manylora.server.hop import Counts

pytestmark = pytest.mark.anyio
ASK = {"model": "demo", "prompt": "x"}
ID = "use_" + "a" * 30


@pytest.fixture
async def replica(cluster: FakeCluster) -> FakeReplica:
    return await cluster.replica("one")


def hop(cluster: FakeCluster, **more: str) -> dict[str, str]:
    given = {CLUSTER: cluster_token(cluster.registry.key_ring), LEDGER_ID: ID}
    return given | {name.replace("_", "-"): value for name, value in more.items()}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_last_frame_says_what_is_billed(
    cluster: FakeCluster, replica: FakeReplica, stream: bool
) -> None:
    async with replica.client(await cluster.key("acme")) as client:
        plain = await client.post("/v1/completions", json=ASK)
        answer = await client.post(
            "/v1/completions", json={**ASK, "stream": stream}, headers=hop(cluster)
        )
    frames = Frames()
    body = frames.take(answer.content)
    usage = plain.json()["usage"]
    assert frames.counts == Counts(usage["prompt_tokens"], 0, usage["completion_tokens"])
    if not stream:
        assert json.loads(body)["usage"] == usage
        assert answer.headers[LENGTH] == str(len(body))
    assert {event.id for event in await cluster.events()} > {ID}


async def test_errors_are_framed_too(cluster: FakeCluster, replica: FakeReplica) -> None:
    async with replica.client(await cluster.key("acme")) as client:
        answer = await client.post("/v1/completions", json={}, headers=hop(cluster))
    body = Frames().take(answer.content)
    assert (answer.status_code, answer.headers[LENGTH]) == (400, str(len(body)))
    assert json.loads(body)["error"]


@pytest.mark.parametrize(
    ("share", "weight"),
    [
        ("0.25", 0.25),
        ("1", 1.0),
        *[(bad, 1.0) for bad in ("0", "-1", "nan", "inf", "2", "x", "", "\xff")],
    ],
)
async def test_a_share_of_the_weight_is_taken_and_a_malformed_one_is_none(
    cluster: FakeCluster, replica: FakeReplica, share: str, weight: float
) -> None:
    headers = [
        (name.encode(), value.encode("latin-1"))
        for name, value in (hop(cluster) | {WEIGHT_SHARE: share}).items()
    ]
    async with replica.client(await cluster.key("acme")) as client:
        answer = await client.post("/v1/completions", json=ASK, headers=httpx.Headers(headers))
    assert answer.status_code == 200
    assert replica.api.engine.requests[0].flow.weight == weight


@pytest.mark.parametrize(
    "ledger_id", ["", "x", "use_", "use_" + "a" * 200, "use_" + "A" * 30, f"{ID}; x", "\xff"]
)
async def test_a_malformed_ledger_id_is_none(
    cluster: FakeCluster, replica: FakeReplica, ledger_id: str
) -> None:
    headers = [
        (name.encode(), value.encode("latin-1"))
        for name, value in (hop(cluster) | {LEDGER_ID: ledger_id}).items()
    ]
    async with replica.client(await cluster.key("acme")) as client:
        answer = await client.post("/v1/completions", json=ASK, headers=httpx.Headers(headers))
    assert answer.json()["choices"]
    (billed,) = await cluster.events()
    assert billed.id != ledger_id


@pytest.mark.parametrize("token", ["", "0" * 64, "\xff"])
async def test_without_the_token_there_is_no_state(
    cluster: FakeCluster, replica: FakeReplica, token: str
) -> None:
    async with replica.client(await cluster.key("acme")) as client:
        headers = httpx.Headers([(CLUSTER.encode(), token.encode("latin-1"))])
        assert (await client.get(STATE_PATH, headers=headers)).status_code == 404
        answer = await client.post(
            "/v1/completions", json=ASK, headers=hop(cluster) | {CLUSTER: "0" * 64}
        )
        assert answer.json()["choices"]
    async with replica.client(None) as stranger:
        assert (await stranger.get(STATE_PATH)).status_code == 401


async def test_reports_say_what_changed_and_end_when_all_is_drained(
    cluster: FakeCluster, replica: FakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, services = replica.api.engine, replica.api.services
    near = ResidentAdapter(digest="sha256:near", tier="device", pages=1, running=0)
    engine.residents = [near]
    engine.load = EngineLoad(rate=100.0, tenants={"t": TenantLoad(backlog=50.0)})
    async with (
        replica.client(None) as client,
        client.stream("GET", STATE_PATH, headers=hop(cluster)) as answer,
    ):
        lines = answer.aiter_lines()
        first = json.loads(await anext(lines))
        assert first["boot_id"] == "boot-1"
        assert (first["state"], first["rate"], first["backlog_s"]) == ("ready", 100.0, 0.5)
        assert first["tiers"] == {"sha256:near": "device"}
        assert json.loads(await anext(lines))["tiers"] == {}
        engine.residents, ready = [], engine.ready
        while not (tiers := json.loads(await anext(lines))["tiers"]):
            pass
        assert tiers == {"sha256:near": None}
        engine.ready = None
        while json.loads(await anext(lines))["state"] != "down":
            pass
        engine.ready = ready
        while json.loads(await anext(lines))["state"] != "ready":
            pass
        with monkeypatch.context() as patched:
            patched.setattr(
                services.registry.usage,
                "check",
                Mock(side_effect=CapacityError("The disk is full.")),
            )
            while json.loads(await anext(lines))["state"] != "down":
                pass
        replica.membership.drain()
        while json.loads(await anext(lines))["state"] != "draining":
            pass
        await services.drain.drain(1.0)
        async with asyncio.timeout(60):
            async for _ in lines:
                pass


@pytest.mark.parametrize("change", [{"model": "other"}, {"base": "sha256:1"}])
async def test_a_replica_of_another_base_does_not_join(
    cluster: FakeCluster, change: dict[str, str]
) -> None:
    shared = {"database_url": cluster.database_url, "pepper": PEPPER}
    async with api(cluster.root / "two", name="two", **shared) as two:  # type: ignore[arg-type]
        async with AsyncExitStack() as stack:
            _, membership = await join(two.app, two.services, "http://127.0.0.1:2", stack, Duties())
            one = replace(membership.server, name="one", boot_id="another")
        await cluster.registry.servers.announce(replace(one, **change))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="Replicas over one database serve one base"):
            async with AsyncExitStack() as stack:
                await join(two.app, two.services, "http://127.0.0.1:2", stack, Duties())
        assert [each.name for each in await cluster.registry.servers.listed()] == ["one"]
        await cluster.registry.servers.announce(one)
        async with AsyncExitStack() as stack:
            await join(two.app, two.services, "http://127.0.0.1:2", stack, Duties())
            assert len(await cluster.registry.servers.listed("replica")) == 2
