"""The real app over the real registry and blobs, with an engine that needs no model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import structlog
from fastapi import FastAPI
from starlette.types import ASGIApp

from fake_engine import DEMO_MODEL, FakeEngine, demo_tokenizer
from grammar_checks import SharedChecker
from manylora.adapters.blobs.store import open_blobs
from manylora.config import GIB, AdapterConfig, Config, ModelConfig, RegistryConfig, ServerConfig
from manylora.registry.db.clock import utc_now
from manylora.registry.registry import Registry
from manylora.server.app import create_app
from manylora.server.core_services import CallerLimits, Clock
from manylora.server.http.body import BodyReader, Pace
from manylora.server.http.listen import ApiServer, bind, url_of
from manylora.server.process.drain import Drain
from manylora.server.run import share_database
from manylora.server.serve import gate_of, metrics_of, versions_of
from manylora.server.services import Services, base_names
from manylora.server.uploads.staged_files import open_staged
from manylora.server.uploads.uploads import Uploads
from manylora.server.versions.names import ModelNames
from quick_renderer import QuickRenderer
from quick_validator import QuickValidator
from ready_registry import put_registry

# As servers log them: a trace that shows every local of every frame takes seconds.
structlog.configure(
    processors=[structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
)

ADMIN_KEY = "manylora-admin-key-of-the-tests-0123456789"
BASE = "demo"
SERVER = "srv_of_the_tests"
Client = httpx.AsyncClient


@dataclass
class Api:
    """One app and its parts."""

    app: FastAPI
    services: Services
    engine: FakeEngine
    root: Path
    keys: dict[str, str] = field(default_factory=dict)
    ahead: timedelta = timedelta()
    """How far the clocks of registry and server are ahead of the real time."""
    gateway: ASGIApp | None = None
    """What clients ask instead of the app, where one stands before it."""

    @property
    def front(self) -> ASGIApp:
        """What clients ask."""
        return self.gateway or self.app

    def client(self, key: str | None = None) -> httpx.AsyncClient:
        """A client without a network; it sees whole responses only."""
        return new_client(
            key, "http://test", httpx.ASGITransport(app=self.front, raise_app_exceptions=False)
        )

    @property
    def admin(self) -> httpx.AsyncClient:
        return self.client(ADMIN_KEY)

    async def key(self, tenant: str, *scopes: str) -> str:
        """A key of the tenant, which is made on first use."""
        name = ",".join((tenant, *scopes))
        if name not in self.keys:
            existing = {
                known.name
                for known in (await self.services.registry.tenants.list_tenants(limit=1000)).items
            }
            if tenant not in existing:
                await self.services.registry.tenants.create_tenant(tenant)
            granted = scopes or ("infer", "adapters", "usage")
            _, self.keys[name] = await self.services.registry.keys.create_key(tenant, None, granted)
        return self.keys[name]

    async def tenant(self, tenant: str, *scopes: str) -> httpx.AsyncClient:
        return self.client(await self.key(tenant, *scopes))

    async def usage_totals(self) -> dict[str, int]:
        """All that was billed, to all tenants."""
        return dict((await self.admin.get("/v1/usage")).json()["totals"])

    async def ask(
        self, tenant: str, headers: dict[str, str] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """The usage of a good completion, of the base if `fields` name no other model."""
        body = {"model": BASE, "prompt": "x", **fields}
        answer = await (await self.tenant(tenant)).post(
            "/v1/completions", json=body, headers=headers
        )
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["usage"])

    async def metrics(self) -> str:
        """The metrics of the app itself."""
        async with new_client(ADMIN_KEY, "http://test", httpx.ASGITransport(app=self.app)) as admin:
            return (await admin.get("/metrics")).text

    def files(self) -> list[Path]:
        """Everything in the blob store."""
        return sorted(path for path in self.services.config.blob_dir.rglob("*") if path.is_file())

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """The app on a real port, for what only a socket shows."""

        async def app(_: str) -> ASGIApp:
            return self.front

        async with listening(app) as running:
            yield running.url


@dataclass(eq=False)
class Listening:
    """An app on a real port."""

    url: str
    server: ApiServer
    serving: asyncio.Task[None]

    def drop(self) -> None:
        """Close all connections without a word, as a kernel does for a killed process."""
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()

    async def stop(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        await self.serving


@asynccontextmanager
async def listening(make: Callable[[str], Awaitable[ASGIApp]]) -> AsyncIterator[Listening]:
    """Serve on a free port what `make` returns for the address."""
    with bind("127.0.0.1", 0) as listener:
        url = url_of("127.0.0.1", listener)
        server = ApiServer(await make(url))
        running = Listening(url, server, asyncio.create_task(server.serve([listener])))
        try:
            await eventually(lambda: server.started)
            yield running
        finally:
            await running.stop()
            for task in list(server.server_state.tasks):
                task.cancel()


async def eventually(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait until the condition holds; patiently, since machines that run tests are slow at times."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s")
        await asyncio.sleep(0.005)


async def at_rest(count: Callable[[], int], for_s: float = 0.3, within_s: float = 60.0) -> None:
    """Wait until a count has not changed for so long."""
    deadline, before = time.monotonic() + within_s, None
    while before != (before := count()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s")
        await asyncio.sleep(for_s)


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(url)
    return await asyncio.open_connection(address.hostname, address.port)


def new_client(
    key: str | None, url: str, transport: httpx.AsyncBaseTransport | None = None
) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(
        base_url=url, headers=headers, transport=transport, timeout=20, trust_env=False
    )


@asynccontextmanager
async def api(
    root: Path,
    pace: Pace | None = None,
    blob_url: str | None = None,
    database_url: str | None = None,
    adapter: AdapterConfig | None = None,
    push_bytes: int = 1 << 20,
    pepper: str | None = None,
    name: str = SERVER,
    **server_fields: Any,
) -> AsyncIterator[Api]:
    """Open everything below `root`; `server_fields` are settings of the server section.

    Servers over one database have one pepper, and names of their own.
    """
    engine = FakeEngine()
    ready = engine.ready
    assert ready is not None
    server = ServerConfig(data_dir=root / "data", **server_fields)
    config = Config(
        model=ModelConfig(path=ready.model_path, served_name=BASE),
        server=server,
        adapter=replace(adapter or AdapterConfig(), push_gib=push_bytes / GIB),
        registry=RegistryConfig(blob_url=blob_url),
    )
    opened: Api | None = None

    def now() -> datetime:
        return utc_now() + (opened.ahead if opened else timedelta())

    if database_url is None:
        put_registry(server.data_dir)
    registry = await Registry.open(
        database_url, server.data_dir, ADMIN_KEY, clock=now, pepper=pepper
    )
    share_database(registry.database)
    blobs = open_blobs(config.registry, server.data_dir)
    default = await registry.tenants.create_tenant("default") if server.auth == "off" else None
    metrics = metrics_of(config, ready)
    uploads = Uploads(
        validator=QuickValidator(ready, blobs, base_names(config)),
        staged=open_staged(config, blobs),
    )
    versions = versions_of(config, name, registry, blobs, engine, uploads.validator, metrics)
    services = Services(
        config=config,
        registry=registry,
        engine=engine,
        ready=ready,
        tokenizer=demo_tokenizer(),
        chats=QuickRenderer(demo_tokenizer()),
        grammars=SharedChecker(DEMO_MODEL),
        blobs=blobs,
        ledger=registry.usage,
        tenants=registry.tenants,
        models=ModelNames(registry, base_names(config)),
        hold_weights=versions.weights.hold,
        versions=versions,
        uploads=uploads,
        limits=CallerLimits(gate=gate_of(config, engine, metrics)),
        bodies=BodyReader(most_bytes=server.max_body_bytes, pace=pace or Pace()),
        metrics=metrics,
        drain=Drain(),
        server_name=name,
        default_tenant=default,
        clock=Clock(now=now),
    )
    try:
        opened = Api(app=create_app(services), services=services, engine=engine, root=root)
        yield opened
    finally:
        await registry.close()
