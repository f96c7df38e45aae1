"""A gateway before the app of the tests, which is its replica: both on real ports, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from api_server import ADMIN_KEY, Api, new_client
from registry_samples import server_sample
from weft.config import GatewayConfig
from weft.registry.servers import Role
from weft.server.cluster.app import open_gateway
from weft.server.cluster.duties import Duties
from weft.server.cluster.replica import join
from weft.server.drain import Drain


@dataclass
class Gateway:
    """A gateway that has found its replica."""

    url: str
    replica_url: str
    metrics: ASGIApp
    drain: Drain
    api: Api

    @property
    def admin(self) -> httpx.AsyncClient:
        return new_client(ADMIN_KEY, self.url)

    async def list_server(self, name: str, role: Role) -> None:
        """List a server at an address where nothing answers, and wait until the gateway knows a replica."""
        await self.api.services.registry.servers.announce(server_sample(name=name, role=role, model="", base=""))
        async with asyncio.timeout(60), self.admin as admin:
            asked = f"/v1/models?server={name}"
            while role == "replica" and (await admin.get(asked)).status_code == 404:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.05)

    async def metrics_page(self) -> str:
        """What its metrics port shows."""
        async with new_client(None, "http://test", httpx.ASGITransport(app=self.metrics)) as client:
            return (await client.get("/metrics")).text


@asynccontextmanager
async def gateway_before(api: Api) -> AsyncIterator[Gateway]:
    """Make the app a replica, and start a gateway that sees it as ready."""
    replica: ASGIApp = api.app

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await replica(scope, receive, send)

    async with AsyncExitStack() as stack:
        replica_url = await stack.enter_async_context(api.listening(app))
        replica, _ = await join(api.app, api.services, replica_url, stack, Duties())
        config = GatewayConfig(server=api.services.config.server, registry=api.services.config.registry)
        drain = Drain()
        apps = await open_gateway(config, api.services.registry, drain, stack)
        url = await stack.enter_async_context(api.listening(apps.main))
        opened = Gateway(url, replica_url, apps.metrics, drain, api)
        async with opened.admin as admin:
            while (await admin.get("/ready")).status_code != 200:
                pass
        yield opened
