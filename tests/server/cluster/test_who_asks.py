"""Whom a gateway checks is who the replica acts for, whatever else a head holds."""

from __future__ import annotations

import json
import re

import pytest

from api_server import ADMIN_KEY, connect
from fake_cluster import FakeCluster, FakeGateway, FakeReplica
from manylora.server.cluster.wire import CLUSTER, LEDGER_ID, STICKY, WEIGHT_SHARE, cluster_token

pytestmark = pytest.mark.anyio
BODY = json.dumps({"model": "demo", "prompt": "x", "max_tokens": 1}).encode()
DEFAULT_LINES = ["Content-Type: application/json", f"Content-Length: {len(BODY)}"]


@pytest.fixture
async def replica(cluster: FakeCluster) -> FakeReplica:
    return await cluster.replica("one")


@pytest.fixture
async def gateway(cluster: FakeCluster, replica: FakeReplica) -> FakeGateway:
    gateway = await cluster.gateway()
    await gateway.sees(one="ready")
    return gateway


async def status_of(url: str, *lines: str) -> int:
    """The status of a completion that is asked for with these lines in its head."""
    reader, writer = await connect(url)
    head = "\r\n".join(["POST /v1/completions HTTP/1.1", *lines, *DEFAULT_LINES, "", ""]).encode(
        "latin-1"
    )
    writer.write(head + BODY)
    try:
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()


CONNECTIONS = [
    *(
        "authorization",
        "Authorization , x-api-key",
        "x-api-key",
        "cookie",
        "host",
        "content-length",
        "content-type",
    ),
    *(
        "transfer-encoding",
        "close, authorization",
        CLUSTER,
        f"{LEDGER_ID}, {WEIGHT_SHARE}, {STICKY}",
        "x-request-id",
    ),
    *("sec-fetch-site, origin", ",,", "authorization\r\nConnection: x-api-key"),
]


@pytest.mark.parametrize("connection", CONNECTIONS)
async def test_connection_hides_no_credential(
    cluster: FakeCluster, gateway: FakeGateway, replica: FakeReplica, connection: str
) -> None:
    first, second = await cluster.key("first"), await cluster.key("second")
    lines = [
        "Host: x",
        f"Connection: {connection}",
        f"Authorization: Bearer {first}",
        f"x-api-key: {second}",
    ]
    assert [await status_of(url, *lines) for url in (gateway.url, replica.url)] == [200, 200]
    assert [event.tenant for event in await cluster.events(gateway.registry)] == ["first", "first"]


async def cookies(cluster: FakeCluster, port: int) -> list[str]:
    """Cookies of two tenants' sessions, the second one for a server at this port."""
    found = []
    for tenant, name in (("first", "manylora_session"), ("second", f"manylora_session_{port}")):
        identity = await cluster.registry.key_ring.authenticate(await cluster.key(tenant))
        assert identity.credential is not None
        token, _ = await cluster.registry.sessions.begin_session(identity.credential)
        found.append(f"{name}={token}")
    return found


async def test_two_heads_in_one_are_refused(
    cluster: FakeCluster, gateway: FakeGateway, replica: FakeReplica
) -> None:
    """Where two servers read another one of two headers, each would act for somebody else."""
    first, second = await cluster.key("first"), await cluster.key("second")
    own, other = await cookies(cluster, 9000)
    same = "Sec-Fetch-Site: same-origin"
    refused = [
        (400, ["Host: x", "Host: x:9000", f"Cookie: {own}; {other}", same]),
        (400, ["Host: x:9000", "Host: x", f"Cookie: {own}; {other}", same]),
        (400, ["Host: x:9000", f"Cookie: {own}", f"Cookie: {other}", same]),
        (400, ["Host: x", f"Cookie: {own}", same, "Sec-Fetch-Site: cross-site"]),
        (400, ["Host: x", f"Cookie: {own}", "Origin: http://x", "Origin: http://y"]),
        (401, ["Host: x", f"Authorization: Bearer {first}", f"Authorization: Bearer {second}"]),
        (401, ["Host: x", f"x-api-key: {first}", f"X-API-Key: {second}"]),
        (401, ["Host: x", f"Authorization: Bearer {first}, Bearer {second}"]),
        (401, ["Host: x", f"authorization_: Bearer {first}"]),
        (400, ["Host: x", f"Authorization : Bearer {first}"]),
        (401, ["Host: x", "Authorization:", f"x-api-key: {second}"]),
        (400, ["Host: x", f"Authorization: Bearer {first}", "Transfer-Encoding: chunked"]),
        (400, ["Host: x", f"Authorization: Bearer {first}", "Content-Length: 1"]),
        (400, ["Host: x", f"Authorization: Bearer {first}", "Content-Length: +1"]),
    ]
    for status, lines in refused:
        assert [await status_of(url, *lines) for url in (gateway.url, replica.url)] == [
            status
        ] * 2, lines
    assert await cluster.events(gateway.registry) == []
    for host, tenant in (("x", "first"), ("x:9000", "second")):
        assert await status_of(gateway.url, f"Host: {host}", f"Cookie: {own}; {other}", same) == 200
        assert (await cluster.events(gateway.registry))[-1].tenant == tenant


async def test_what_only_gateways_say_is_not_taken_from_clients(
    cluster: FakeCluster, gateway: FakeGateway, replica: FakeReplica
) -> None:
    """Neither by a gateway, whatever the token, nor by a replica without the cluster's token."""
    key, token = await cluster.key("first"), cluster_token(cluster.registry.key_ring)
    own = f"use_{'0' * 32}"
    said = [
        "Host: x",
        f"Authorization: Bearer {key}",
        f"{LEDGER_ID}: {own}",
        f"{WEIGHT_SHARE}: 0.01",
        f"{STICKY}: s",
    ]
    forged = [
        f"{CLUSTER}: ",
        f"{CLUSTER}: {'0' * len(token)}",
        f"{CLUSTER}: {token[:-1]}",
        f"{CLUSTER}: \xff",
    ]
    for url, proofs in ((gateway.url, [*forged, f"{CLUSTER}: {token}"]), (replica.url, forged)):
        for proof in proofs:
            assert await status_of(url, *said, proof, proof) == 200
    events = await cluster.events(gateway.registry)
    assert len(events) == 9
    assert all(re.fullmatch(r"use_[0-9a-f]+", event.id) and event.id != own for event in events)
    assert {request.flow.weight for request in replica.api.engine.requests} == {1.0}


async def test_a_tenant_in_the_address_is_the_admins_alone(
    cluster: FakeCluster, gateway: FakeGateway
) -> None:
    first, ask = await cluster.key("first"), json.loads(BODY)
    await cluster.key("second")
    async with gateway.client(first) as client, gateway.client(ADMIN_KEY) as admin:
        assert (await client.post("/v1/completions?tenant=second", json=ask)).status_code == 404
        assert (
            await admin.post("/v1/completions?tenant=first&tenant=second", json=ask)
        ).status_code == 200
    assert [event.tenant for event in await cluster.events(gateway.registry)] == ["second"]
