"""Runs the server: opens what it needs, listens, drains on SIGTERM, and closes everything in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import AsyncExitStack, contextmanager

import structlog
import uvicorn

from weft.adapters.blobs.memory import MemoryBlobs
from weft.adapters.blobs.store import BlobStore, open_blobs
from weft.config import GIB, Config, environment
from weft.engine.model.spec import resolve_model
from weft.engine.process.client import EngineClient
from weft.engine.start_checks import check_start
from weft.engine.status import EngineReady
from weft.engine.text.tokenizer import Tokenizer, read_object
from weft.errors import CapacityError, ConfigError, NotFoundError
from weft.registry.db.models import TenantRow
from weft.registry.registry import Registry
from weft.server.adapters.resumable_upload import StagedFiles
from weft.server.adapters.validation import AdapterValidator
from weft.server.app import create_app, metrics_app
from weft.server.auth.admin_key import AdminKey, admin_key, given_pepper
from weft.server.batches.worker import BatchWorker, owner_name
from weft.server.drain import Drain
from weft.server.garbage import Sweeper, end_removals
from weft.server.http.wire import BoundedReads
from weft.server.limits.gate import Gate
from weft.server.limits.windows import Accounts
from weft.server.logs import configure_logs
from weft.server.pins import sync_pins
from weft.server.services import Services, base_names
from weft.server.status.metrics import Metrics
from weft.server.status.vllm_names import VllmNames
from weft.server.threads import cancel_all
from weft.server.tools.formats import check_format_name
from weft.server.usage.price_file import read_prices

log = structlog.get_logger("weft.server")
Announce = Callable[[str], None]
OpenAccounts = Callable[[Registry, str, AsyncExitStack], Awaitable[Accounts]]
"""Makes the accounts of a server with this name; the stack closes them."""
DEFAULT_TENANT = "default"
KEEP_ALIVE_S = 65
STOP_S = 3
"""Seconds that connections have to close once everything was drained."""


def serve(config: Config, announce: Announce) -> int:
    """Serve until a signal ends it; returns the exit code.

    Raises:
        ConfigError: A setting is wrong, or the port is taken.
        EngineUnavailableError: The engine does not start.
    """
    configure_logs()
    check_start(config)
    check_format_name(config.model.tool_format)
    _leave_out_torch()
    loop_factory = uvicorn.Config("", loop="auto", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(_serve(config, announce))


def _leave_out_torch() -> None:
    """Make `transformers` bring the tokenizer alone: seconds less to start, and 300 MB less memory.

    Other processes compute: the engine, and the checks of uploads.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # Python takes None as a module that is missing
    logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())


async def _serve(config: Config, announce: Announce) -> int:
    shutdown = Shutdown(config.server.drain_s)
    try:
        await _serve_until(config, announce, shutdown)
    except asyncio.CancelledError:
        if not shutdown.num_asked:
            raise
    return 0


async def _serve_until(config: Config, announce: Announce, shutdown: Shutdown) -> None:
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(bind(config.server.host, config.server.port))
        key = admin_key(config.server.data_dir, environment())
        services = await open_services(config, key, announce, stack, shutdown.drain)
        server = ApiServer(create_app(services))
        if config.server.metrics_port is not None:
            metrics_listener = stack.enter_context(bind(config.server.host, config.server.metrics_port))
            metrics = ApiServer(metrics_app(services))
            stack.push_async_callback(_stop, metrics, asyncio.create_task(metrics.serve([metrics_listener])))
        shutdown.server = server
        gc.freeze()  # a full collection would look at all that the libraries made, for 0.3 s
        gc.set_threshold(10_000, 20)  # else collections are a twelfth of the time under load
        _announce(announce, config, key, listener, await _sign_in(services, key))
        await server.serve([listener])
        # Requests that are left after a second signal: their usage is still recorded.
        await cancel_all(server.server_state.tasks)


async def own_accounts(_registry: Registry, _name: str, _stack: AsyncExitStack) -> Accounts:
    """Accounts of a server that is alone: it counts for itself."""
    return Accounts()


async def open_services(
    config: Config,
    key: AdminKey,
    announce: Announce,
    stack: AsyncExitStack,
    drain: Drain,
    open_accounts: OpenAccounts = own_accounts,
) -> Services:
    """Open registry, blobs, engine and tokenizer; `stack` closes them in reverse.

    Args:
        config: The settings.
        key: The admin's key.
        announce: Told how the start goes on.
        stack: Closes what was opened.
        drain: Counts the requests that run.
        open_accounts: Makes the accounts of tenants and keys.

    Raises:
        ConfigError: A setting is wrong.
        EngineUnavailableError: The engine does not start.
    """
    prices = read_prices(config.registry.price_file) if config.registry.price_file else None
    pepper = given_pepper(environment())
    registry = await Registry.open(config.registry.database_url, config.server.data_dir, key.secret, pepper=pepper)
    stack.push_async_callback(registry.close)
    blobs = await asyncio.to_thread(open_blob_store, config)
    engine = EngineClient(config, announce=announce)
    stack.push_async_callback(engine.close)
    ready, (tokenizer, tokenizer_settings) = await _start(engine, config.model.path)
    name = await asyncio.to_thread(owner_name, config.server.data_dir)
    validator = AdapterValidator(ready, blobs, base_names(config))
    stack.push_async_callback(validator.close)
    metrics, scheduler = metrics_of(config, ready), config.scheduler
    services = Services(
        config=config,
        registry=registry,
        engine=engine,
        ready=ready,
        tokenizer=tokenizer,
        tokenizer_settings=tokenizer_settings,
        blobs=blobs,
        validator=validator,
        metrics=metrics,
        gate=Gate(scheduler.max_wait_s, scheduler.max_waiting, lambda: engine.load, time.monotonic, metrics.refused),
        drain=drain,
        staged=await asyncio.to_thread(StagedFiles, config.server.data_dir / "uploads"),
        server_name=name,
        accounts=await open_accounts(registry, name, stack),
        memory=MemoryBlobs(int(config.adapter.push_gib * GIB)),
        prices=prices,
        default_tenant=await _default_tenant(registry) if config.server.auth == "off" else None,
    )
    stack.push_async_callback(end_removals, services)
    sweeper = Sweeper(services)
    stack.push_async_callback(sweeper.stop)
    await sweeper.start()
    await sync_pins(services)
    worker = BatchWorker(services, name)
    stack.push_async_callback(worker.stop)
    worker.start()
    return services


def metrics_of(config: Config, ready: EngineReady) -> Metrics:
    """The metrics, under the names that the settings ask for."""
    has_aliases = config.server.metrics_aliases != "none"
    return Metrics(VllmNames(base_names(config)[0], ready.memory.slots) if has_aliases else None)


class ApiServer(uvicorn.Server):
    """uvicorn, with signals left to `Shutdown`."""

    def __init__(self, app: object) -> None:
        super().__init__(
            uvicorn.Config(
                app,  # type: ignore[arg-type]
                http=BoundedReads,  # type: ignore[arg-type]
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=STOP_S,
            )
        )

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals alone."""
        yield


class Shutdown:
    """What signals do: the first drains, the second cuts running requests, the third exits without waiting.

    Before the server listens, the first signal ends the start, which is the task that makes this.
    """

    def __init__(self, drain_s: float) -> None:
        self.drain = Drain()
        self.num_asked = 0
        self._starting = asyncio.current_task()
        self._drain_s = drain_s
        self.server: ApiServer | None = None
        """The server that is ended when asked; None before it listens."""
        self._draining: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask)

    def ask(self) -> None:
        """A signal came."""
        self.num_asked += 1
        if self.server is None:
            if self._starting is not None:
                self._starting.cancel()
        elif self._draining is None:
            self._draining = asyncio.ensure_future(self._drain_then_exit(self.server))
        elif self.num_asked == 2:
            self.drain.hurry()
        else:
            self.server.should_exit = self.server.force_exit = True

    async def _drain_then_exit(self, server: ApiServer) -> None:
        log.info("draining", running=self.drain.num_running, limit_s=self._drain_s)
        num_cut = await self.drain.drain(self._drain_s)
        log.info("drained", cut=num_cut)
        server.should_exit = True


@contextmanager
def bind(host: str, port: int) -> Generator[socket.socket, None, None]:
    """A socket bound to the address, not yet listening.

    Raises:
        ConfigError: The address is not ours, or taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"server.host {host!r} cannot be used: {error.strerror}.", param="server.host") from error
    with bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(address)
        except OSError as error:
            message = f"Cannot listen on {host} port {port}: {error.strerror}. Choose another with --port."
            raise ConfigError(message, param="server.port") from error
        yield bound


def load_tokenizer(model: str) -> tuple[Tokenizer, dict[str, object]]:
    """The tokenizer of a folder, or of a model of the hub that is in the cache already.

    Returns:
        It, and the content of `tokenizer_config.json` with the chat template where that has a file of its own.

    Raises:
        ConfigError: The files are not there.
    """
    folder = resolve_model(model, is_downloaded=True)
    settings = read_object(folder / "tokenizer_config.json")
    template = folder / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = template.read_text(encoding="utf-8")
    return Tokenizer(folder), settings


async def _start(engine: EngineClient, model: str) -> tuple[EngineReady, tuple[Tokenizer, dict[str, object]]]:
    """Start the engine, and load a tokenizer that is already on disk meanwhile."""
    if not await asyncio.to_thread(os.path.exists, model):
        return await engine.start(), await asyncio.to_thread(load_tokenizer, model)
    loading = asyncio.ensure_future(asyncio.to_thread(load_tokenizer, model))
    try:
        return await engine.start(), await loading
    finally:
        loading.cancel()


async def _default_tenant(registry: Registry) -> TenantRow:
    try:
        return await registry.tenants.get_tenant(DEFAULT_TENANT)
    except NotFoundError:
        return await registry.tenants.create_tenant(DEFAULT_TENANT)


def open_blob_store(config: Config) -> BlobStore:
    """Open the blob store, and try it.

    Raises:
        ConfigError: The store refuses what Weft does there. One that is away for now is no error.
    """
    blobs = open_blobs(config.registry, config.server.data_dir)
    try:
        blobs.probe()
    except CapacityError as error:  # it may come back, and adapters that are cached or resident are served meanwhile
        log.warning("blob_store_unavailable", code=error.code)
    return blobs


async def _stop(server: ApiServer, serving: asyncio.Task[None]) -> None:
    server.should_exit = server.force_exit = True
    await serving


async def _sign_in(services: Services, key: AdminKey) -> str:
    """End of the dashboard's address that signs the admin in; empty where authentication is off."""
    if services.config.server.auth == "off":
        return ""
    try:
        admin = await services.registry.key_ring.authenticate(key.secret)
        link, _ = (
            await services.registry.sessions.begin_session(admin.credential, "link") if admin.credential else ("", None)
        )
    except CapacityError:  # a database that is away stops no server
        return ""
    return f"#link={link}"


def _announce(announce: Announce, config: Config, key: AdminKey, listener: socket.socket, sign_in: str) -> None:
    host, port = config.server.host, listener.getsockname()[1]
    for line in key.announcement:
        announce(f"weft: {line}")
    if config.server.auth == "off":
        announce("weft: authentication is off: everybody on this machine is admin")
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    announce(f'weft: ask for the base model with "model": "{base_names(config)[0]}"')
    if sign_in:
        announce(f"weft: dashboard {url}/{sign_in} (signs in as admin, once, within 10 minutes)")
    announce(f"weft: listening on {url}")
    sys.stdout.flush()
