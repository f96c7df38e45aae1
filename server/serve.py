"""Runs the server: opens what it needs, listens, drains on SIGTERM, and closes everything in order."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

import structlog

from manylora.adapters.blobs.memory import MemoryBlobs
from manylora.adapters.blobs.store import BlobStore, open_blobs
from manylora.config import GIB, Config, environment
from manylora.engine.model.spec import resolve_model
from manylora.engine.process.client import EngineClient
from manylora.engine.process.worker_process import Worker
from manylora.engine.start_checks import check_start
from manylora.engine.status import EngineReady
from manylora.engine.text.tokenizer import Tokenizer
from manylora.errors import CapacityError, NotFoundError
from manylora.registry.db.models import TenantRow
from manylora.registry.registry import Registry
from manylora.registry.servers import server_name
from manylora.server.app import create_app
from manylora.server.auth.admin_key import (
    IS_OFF,
    VARIABLE,
    AdminKey,
    admin_key,
    check_shared_secrets,
    given_pepper,
)
from manylora.server.auth.browser import sign_in_fragment
from manylora.server.auth.callers import DEFAULT_TENANT
from manylora.server.batches.worker import BatchWorker
from manylora.server.core_services import CallerLimits
from manylora.server.http.json_body import BodyReader
from manylora.server.http.listen import (
    ApiServer,
    Shutdown,
    bind,
    listen,
    listen_beside,
    metrics_app,
    run_until_signal,
    url_of,
)
from manylora.server.limits.accounts import Accounts
from manylora.server.limits.gate import Gate
from manylora.server.process.database_turns import database_turns
from manylora.server.process.drain import Drain
from manylora.server.process.logs import configure_logs
from manylora.server.process.long_work import keep_interpreter_moving
from manylora.server.process.threads import cancel_all
from manylora.server.sandbox.chat_renderer import ChatRenderer
from manylora.server.sandbox.grammar_checker import GrammarChecker
from manylora.server.services import Services, Versions, base_names
from manylora.server.status.routes import metrics_response
from manylora.server.telemetry.metrics import Metrics
from manylora.server.telemetry.vllm_names import VllmNames
from manylora.server.tools.formats import check_format_name, format_of
from manylora.server.uploads.staged_files import open_staged
from manylora.server.uploads.uploads import Uploads
from manylora.server.uploads.validation import AdapterValidator
from manylora.server.usage.price_file import read_prices
from manylora.server.versions.garbage import BlobGarbage, Sweeper
from manylora.server.versions.memory import EphemeralWeights
from manylora.server.versions.names import ModelNames
from manylora.server.versions.pins import PinKeeper

log = structlog.get_logger("manylora.server")
Announce = Callable[[str], None]
OTHER_BILL_S = 10.0
"""Seconds after a replica starts again in which gateways may bill the requests that it was killed under."""


def serve(config: Config, announce: Announce, worker: Worker | None = None) -> int:
    """Serve until a signal ends it; returns the exit code.

    Args:
        config: The settings.
        announce: Told how the start goes on.
        worker: As of `EngineClient`.

    Raises:
        ConfigError: A setting is wrong, or the port is taken.
        EngineUnavailableError: The engine does not start.
    """
    configure_logs()
    check_start(config)
    check_format_name(config.model.tool_format)
    _leave_out_torch()
    return run_until_signal(partial(_serve_until, config, announce, worker), config.server.drain_s)


def _leave_out_torch() -> None:
    """Make `transformers` bring the tokenizer alone: seconds less to start, and 300 MB less memory.

    Other processes compute: the engine, and the checks of uploads.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # Python takes None as a module that is missing
    logging.getLogger("transformers").addFilter(
        lambda record: "PyTorch was not found" not in record.getMessage()
    )


async def _serve_until(
    config: Config, announce: Announce, worker: Worker | None, shutdown: Shutdown
) -> None:
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(bind(config.server.host, config.server.port))
        key = admin_key(config.server.data_dir, environment())
        if config.server.role == "replica":  # its room is not entered otherwise
            from manylora.server.cluster.duties import Duties
            from manylora.server.cluster.replica import join

            duties = Duties()
            services = await open_services(
                config, key, announce, stack, shutdown.drain, duties.is_own, worker
            )
            listen(listener)  # gateways connect as soon as it is listed
            url = url_of(config.server.host, listener)
            app, membership = await join(create_app(services), services, url, stack, duties)
            shutdown.before_drain = membership.drain
        else:
            services = await open_services(
                config, key, announce, stack, shutdown.drain, worker=worker
            )
            listen(listener)
            app = create_app(services)
        server = ApiServer(app)
        if config.server.metrics_port is not None:
            listen_beside(
                stack,
                metrics_app(partial(metrics_response, services)),
                config.server.host,
                config.server.metrics_port,
            )
        shutdown.server = server
        keep_interpreter_moving()
        sign_in = (
            await sign_in_fragment(services.registry, key.secret)
            if config.server.auth == "on"
            else ""
        )
        _announce(announce, config, key, listener, sign_in)
        await server.serve([listener])
        # Requests that are left after a second signal: their usage is still recorded.
        await cancel_all(server.server_state.tasks)


async def open_services(
    config: Config,
    key: AdminKey,
    announce: Announce,
    stack: AsyncExitStack,
    drain: Drain,
    keeps_pin: Callable[[str, int], bool] = lambda *_: True,
    worker: Worker | None = None,
) -> Services:
    """Open registry, blobs, engine and tokenizer; `stack` closes them in reverse.

    Args:
        config: The settings.
        key: The admin's key.
        announce: Told how the start goes on.
        stack: Closes what was opened.
        drain: Counts the requests that run.
        keeps_pin: As of `PinKeeper`.
        worker: As of `EngineClient`.

    Raises:
        ConfigError: A setting is wrong.
        EngineUnavailableError: The engine does not start.
    """
    registry = await _open_registry(config, key)
    stack.push_async_callback(registry.close)
    registry.database.share(database_turns())
    blobs = await asyncio.to_thread(open_blob_store, config)
    engine = EngineClient(config, announce=announce, worker=worker)
    stack.push_async_callback(engine.close)
    ready, tokenizer = await _start(engine, config.model.path)
    format_of(tokenizer, config.model.tool_format)
    chats = ChatRenderer(tokenizer)
    stack.push_async_callback(chats.close)
    grammars = GrammarChecker(tokenizer.folder)
    stack.push_async_callback(grammars.close)
    if (fault := await chats.try_template()) is not None:
        announce(f"manylora: chats are refused: {fault}")
    name = await asyncio.to_thread(server_name, config.server.data_dir)
    staged = await asyncio.to_thread(open_staged, config, blobs)
    uploads = Uploads(validator=AdapterValidator(ready, blobs, base_names(config)), staged=staged)
    stack.push_async_callback(uploads.validator.close)
    accounts = Accounts()
    if config.server.role == "replica":  # only servers over one database share limits
        from manylora.server.limits.shared_accounts import open_shared_accounts

        accounts = await open_shared_accounts(registry, name, stack)
    metrics = metrics_of(config, ready)
    versions = versions_of(config, name, registry, blobs, engine, uploads.validator, metrics)
    versions.pins.keeps_pin = keeps_pin
    services = Services(
        config=config,
        server_name=name,
        registry=registry,
        blobs=blobs,
        engine=engine,
        ready=ready,
        tokenizer=tokenizer,
        chats=chats,
        grammars=grammars,
        ledger=registry.usage,
        tenants=registry.tenants,
        models=ModelNames(registry, base_names(config)),
        hold_weights=versions.weights.hold,
        versions=versions,
        uploads=uploads,
        limits=CallerLimits(gate=gate_of(config, engine, metrics), accounts=accounts),
        bodies=BodyReader(most_bytes=config.server.max_body_bytes),
        drain=drain,
        metrics=metrics,
        default_tenant=await _default_tenant(registry) if config.server.auth == "off" else None,
    )
    stack.callback(services.bodies.long_work.close)
    stack.push_async_callback(versions.garbage.close)
    stack.push_async_callback(cancel_all, [await sweeper_of(services).start()])
    await versions.pins.sync()
    batches = BatchWorker(services, name)
    stack.push_async_callback(batches.stop)
    batches.start()
    return services


async def _open_registry(config: Config, key: AdminKey) -> Registry:
    prices = read_prices(config.registry.price_file) if config.registry.price_file else None
    pepper = given_pepper(environment())
    is_replica = config.server.role == "replica"
    if is_replica:
        check_shared_secrets("replica", pepper, environment().get(VARIABLE))
    registry = await Registry.open(
        config.registry.database_url,
        config.server.data_dir,
        key.secret,
        pepper=pepper,
        grace_s=OTHER_BILL_S if is_replica else 0.0,
    )
    registry.prices = prices
    return registry


def versions_of(
    config: Config,
    server: str,
    registry: Registry,
    blobs: BlobStore,
    engine: EngineClient,
    validator: AdapterValidator,
    metrics: Metrics,
) -> Versions:
    """The parts that look after versions on this server."""
    weights = EphemeralWeights(MemoryBlobs(int(config.adapter.push_gib * GIB)), engine, server)
    pins = PinKeeper(
        registry=registry,
        engine=engine,
        server=server,
        pages=validator.pages,
        on_pin=metrics.learn_adapter,
        on_refusal=metrics.limited,
    )
    garbage = BlobGarbage(
        registry=registry,
        engine=engine,
        blobs=blobs,
        weights=weights,
        pins=pins,
        is_alone=config.server.role == "all",
    )
    return Versions(weights=weights, pins=pins, garbage=garbage)


def gate_of(config: Config, engine: EngineClient, metrics: Metrics) -> Gate:
    """The gate before an engine."""
    scheduler = config.scheduler
    return Gate(
        scheduler.max_wait_s,
        scheduler.max_waiting,
        lambda: engine.load,
        time.monotonic,
        metrics.refused,
    )


def sweeper_of(services: Services) -> Sweeper:
    """The sweeper of a server's leftovers."""
    open_ids = services.registry.uploads.open_ids
    return Sweeper(
        services.versions.garbage,
        services.server_name,
        partial(services.uploads.sweep, open_ids),
        owns_store=services.config.registry.blob_url is None,
    )


def metrics_of(config: Config, ready: EngineReady) -> Metrics:
    """The metrics, under the names that the settings ask for."""
    has_aliases = config.server.metrics_aliases != "none"
    return Metrics(VllmNames(base_names(config)[0], ready.memory.slots) if has_aliases else None)


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a folder, or of a model of the hub that is in the cache already.

    Raises:
        ConfigError: The files are not there.
    """
    return Tokenizer(resolve_model(model, is_downloaded=True))


async def _start(engine: EngineClient, model: str) -> tuple[EngineReady, Tokenizer]:
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
        ConfigError: The store refuses what Manylora does there. One that is away for now is no error.
    """
    blobs = open_blobs(config.registry, config.server.data_dir)
    try:
        blobs.probe()
    except CapacityError as error:
        # It may come back, and adapters that are cached or resident are served meanwhile.
        log.warning("blob_store_unavailable", code=error.code)
    return blobs


def _announce(
    announce: Announce, config: Config, key: AdminKey, listener: socket.socket, sign_in: str
) -> None:
    for line in key.announcement:
        announce(f"manylora: {line}")
    if config.server.auth == "off":
        announce(IS_OFF)
    url = url_of(config.server.host, listener)
    announce(f'manylora: ask for the base model with "model": "{base_names(config)[0]}"')
    if sign_in:
        announce(
            f"manylora: dashboard {url}/{sign_in} (signs in as admin, once, within 10 minutes)"
        )
    announce(f"manylora: listening on {url}")
    sys.stdout.flush()
