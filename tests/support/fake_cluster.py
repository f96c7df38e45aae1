"""Gateways and replicas with fake engines in one process, over one database, each on a port of its own."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
from starlette.types import ASGIApp

from api_server import ADMIN_KEY, Api, Client, Listening, api, listening, new_client
from manylora.config import GatewayConfig, RegistryConfig, ServerConfig
from manylora.errors import ConflictError
from manylora.registry.records import UsageEvent, UsageQuery
from manylora.registry.registry import Registry
from manylora.registry.servers import Role
from manylora.server.cluster.app import open_gateway
from manylora.server.cluster.membership import Membership
from manylora.server.cluster.replica import Duties, join
from manylora.server.http.listen import metrics_app
from manylora.server.process.drain import Drain
from registry_samples import server_sample

PEPPER = "pepper-of-the-tests-0123456789"


@dataclass(eq=False)
class FakeReplica:
    """A whole server with a fake engine."""

    name: str
    api: Api
    http: Listening
    membership: Membership
    stack: AsyncExitStack

    @classmethod
    async def start(cls, api: Api, stack: AsyncExitStack) -> FakeReplica:
        """Make the server a replica on a port of its own, until `stack` closes."""
        memberships: list[Membership] = []

        async def joined(url: str) -> ASGIApp:
            app, membership = await join(api.app, api.services, url, stack, Duties())
            memberships.append(membership)
            return app

        http = await stack.enter_async_context(listening(joined))
        return cls(api.services.server_name, api, http, memberships[0], stack)

    @property
    def url(self) -> str:
        return self.http.url

    def client(self, key: str | None) -> Client:
        return new_client(key, self.url)


@dataclass(eq=False)
class FakeGateway:
    """A gateway, with the drain of its process."""

    http: Listening
    app: ASGIApp
    metrics: ASGIApp
    """Of its metrics port."""
    registry: Registry
    drain: Drain

    @classmethod
    async def start(
        cls, config: GatewayConfig, registry: Registry, stack: AsyncExitStack
    ) -> FakeGateway:
        """Start a gateway, which `stack` ends."""
        drain = Drain()
        app, page = await open_gateway(config, registry, drain, stack)

        async def main(_: str) -> ASGIApp:
            return app

        return cls(
            await stack.enter_async_context(listening(main)),
            app,
            metrics_app(page),
            registry,
            drain,
        )

    @property
    def url(self) -> str:
        return self.http.url

    def client(self, key: str | None) -> Client:
        return new_client(key, self.url)

    async def list_server(self, name: str, role: Role) -> None:
        """List a server at an address where nothing answers, and wait until the gateway knows a replica."""
        await self.registry.servers.announce(server_sample(name=name, role=role, model="", base=""))
        if role == "replica":
            await self.lists(name)

    async def lists(self, name: str, *, is_listed: bool = True) -> None:
        """Wait until it knows a replica of this name, or has forgotten it."""
        async with asyncio.timeout(60), self.client(ADMIN_KEY) as admin:
            while True:
                answer = await admin.get("/v1/models", params={"server": name})
                if (answer.status_code != 404) == is_listed:
                    return
                await asyncio.sleep(0.02)

    async def metrics_page(self) -> str:
        """What its metrics port shows."""
        async with new_client(None, "http://test", httpx.ASGITransport(app=self.metrics)) as client:
            return (await client.get("/metrics")).text

    async def servers(self) -> dict[str, dict[str, Any]]:
        """What it says of all servers, by name."""
        async with self.client(ADMIN_KEY) as admin:
            return {each["name"]: each for each in (await admin.get("/v1/servers")).json()["data"]}

    async def sees(self, **states: str) -> None:
        """Wait until it sees these replicas, and no others, in these states."""
        async with asyncio.timeout(60):
            while (await self._seen()) != states:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)

    async def _seen(self) -> dict[str, str]:
        return {
            name: str(seen["state"])
            for name, seen in (await self.servers()).items()
            if "running" in seen
        }

    async def counts(self) -> dict[str, float]:
        """Its counts of retries and of answers that ended early."""
        async with self.client(ADMIN_KEY) as admin:
            page = (await admin.get("/metrics")).text
        return {
            name: float(value)
            for name, value in re.findall(
                r"^manylora_gateway_(\w+?)_total (\S+)", page, re.MULTILINE
            )
        }


@dataclass(eq=False)
class FakeCluster:
    """Servers over one database, which end with the stack."""

    root: Path
    stack: AsyncExitStack
    database_url: str
    registry: Registry
    """A registry of the test's own."""
    replicas: dict[str, FakeReplica] = field(default_factory=dict)

    async def replica(self, name: str, **server_fields: Any) -> FakeReplica:
        """Start a replica."""
        stack = await self.stack.enter_async_context(AsyncExitStack())
        opened = await stack.enter_async_context(
            api(
                self.root / name,
                blob_url=str(self.root / "blobs"),
                database_url=self.database_url,
                pepper=PEPPER,
                name=name,
                **server_fields,
            )
        )
        self.replicas[name] = replica = await FakeReplica.start(opened, stack)
        return replica

    async def gateway(self, folder: str = "gateway", **server_fields: Any) -> FakeGateway:
        """Start a gateway."""
        server = ServerConfig(data_dir=self.root / folder, role="gateway", **server_fields)
        registry = await Registry.open(self.database_url, server.data_dir, ADMIN_KEY, pepper=PEPPER)
        self.stack.push_async_callback(registry.close)
        config = GatewayConfig(server=server, registry=RegistryConfig())
        return await FakeGateway.start(config, registry, self.stack)

    async def key(self, tenant: str, *scopes: str) -> str:
        """A new key of the tenant, which is made on first use."""
        with suppress(ConflictError):
            await self.registry.tenants.create_tenant(tenant)
        return (
            await self.registry.keys.create_key(
                tenant, None, scopes or ("infer", "adapters", "usage")
            )
        )[1]

    async def events(self, *more: Registry) -> list[UsageEvent]:
        """All that was billed, once the replicas and `more` have moved theirs to SQL."""
        for registry in (*(each.api.services.registry for each in self.replicas.values()), *more):
            await registry.usage.flush()
        century = UsageQuery(
            start=datetime(2000, 1, 1, tzinfo=UTC), end=datetime(2100, 1, 1, tzinfo=UTC)
        )
        return list((await self.registry.usage.events(century)).items)


@asynccontextmanager
async def fake_cluster(root: Path, database_url: str | None = None) -> AsyncIterator[FakeCluster]:
    """An empty cluster over SQLite below `root`, or over another database."""
    async with AsyncExitStack() as stack:
        url = database_url or f"sqlite:///{root}/shared.sqlite"
        registry = await Registry.open(url, root / "test", ADMIN_KEY, pepper=PEPPER)
        stack.push_async_callback(registry.close)
        yield FakeCluster(root, stack, url, registry)


@asynccontextmanager
async def gateway_before(api: Api) -> AsyncIterator[tuple[FakeGateway, FakeReplica]]:
    """Make the app of a test a replica, with a gateway over the same registry that has found it."""
    async with AsyncExitStack() as stack:
        replica = await FakeReplica.start(api, stack)
        config = GatewayConfig(
            server=api.services.config.server, registry=api.services.config.registry
        )
        gateway = await FakeGateway.start(config, api.services.registry, stack)
        await gateway.sees(**{replica.name: "ready"})
        yield gateway, replica


@asynccontextmanager
async def behind_a_gateway(api: Api) -> AsyncIterator[None]:
    """Have the clients of a test's app ask a gateway, which passes on to it."""
    async with gateway_before(api) as (gateway, _):
        api.gateway = gateway.app
        yield
        api.gateway = None
