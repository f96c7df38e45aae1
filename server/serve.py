"""Opens a server with an engine: a single one, or a replica."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from functools import partial

import structlog

from manylora.adapters.blobs.memory import MemoryBlobs
from manylora.adapters.blobs.store import BlobStore, open_blobs
from manylora.config import GIB, Config
from manylora.engine.execution.memory_plan import check_start
from manylora.engine.model.spec import resolve_model
from manylora.engine.process.client import EngineClient
from manylora.engine.process.worker_process import Worker
from manylora.engine.status import EngineReady
from manylora.engine.text.tokenizer import Tokenizer
from manylora.errors import CapacityError, NotFoundError
from manylora.registry.db.models import TenantRow
from manylora.registry.registry import Registry
from manylora.server.app import create_app
from manylora.server.auth.callers import DEFAULT_TENANT
from manylora.server.batches.worker import BatchWorker
from manylora.server.core_services import CallerLimits
from manylora.server.http.body import BodyReader
from manylora.server.limits.accounts import Accounts
from manylora.server.limits.gate import Gate
from manylora.server.process.threads import cancel_all
from manylora.server.run import Announce, Role, Start, run_server
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
from manylora.server.versions.garbage import BlobGarbage, EphemeralWeights, Sweeper
from manylora.server.versions.names import ModelNames
from manylora.server.versions.pins import PinKeeper

log = structlog.get_logger("manylora.server")


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
    check_start(config)
    check_format_name(config.model.tool_format)
    _leave_out_torch()
    return run_server(config, announce, partial(_open, config, worker))


def _leave_out_torch() -> None:
    """Make `transformers` bring the tokenizer alone: seconds less to start, and 300 MB less memory.

    Other processes compute: the engine, and the checks of uploads.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # Python takes None as a module that is missing
    logging.getLogger("transformers").addFilter(
        lambda record: "PyTorch was not found" not in record.getMessage()
    )


async def _open(config: Config, worker: Worker | None, start: Start) -> Role:
    if config.server.role == "replica":  # its room is not entered otherwise
        from manylora.server.cluster.replica import Duties, join

        duties = Duties()
        services = await open_services(config, start, worker, duties.is_own)
        start.listen()  # gateways connect as soon as it is listed
        app, membership = await join(create_app(services), services, start.url, start.stack, duties)
        start.shutdown.before_drain = membership.drain
    else:
        services = await open_services(config, start, worker)
        start.listen()
        app = create_app(services)
    about = f'ask for the base model with "model": "{services.served_name}"'
    return Role(app, partial(metrics_response, services), about)


async def open_services(
    config: Config,
    start: Start,
    worker: Worker | None,
    keeps_pin: Callable[[str, int], bool] = lambda *_: True,
) -> Services:
    """Open blobs, engine and tokenizer.

    Args:
        config: The settings.
        start: The parts that a server of any role has; its stack closes what is opened, in reverse.
        worker: As of `EngineClient`.
        keeps_pin: As of `PinKeeper`.

    Raises:
        ConfigError: A setting is wrong.
        EngineUnavailableError: The engine does not start.
    """
    registry = start.registry
    stack = start.stack
    if config.registry.price_file:
        registry.prices = read_prices(config.registry.price_file)
    blobs = await asyncio.to_thread(open_blob_store, config)
    engine = EngineClient(config, announce=start.announce, worker=worker)
    stack.push_async_callback(engine.close)
    ready, tokenizer = await _start(engine, config.model.path)
    format_of(tokenizer, config.model.tool_format)
    chats = ChatRenderer(tokenizer)
    stack.push_async_callback(chats.close)
    grammars = GrammarChecker(tokenizer.folder)
    stack.push_async_callback(grammars.close)
    if (fault := await chats.try_template()) is not None:
        start.announce(f"manylora: chats are refused: {fault}")
    staged = await asyncio.to_thread(open_staged, config, blobs)
    uploads = Uploads(validator=AdapterValidator(ready, blobs, base_names(config)), staged=staged)
    stack.push_async_callback(uploads.validator.close)
    accounts = Accounts()
    if config.server.role == "replica":  # only servers over one database share limits
        from manylora.server.limits.shared_accounts import open_shared_accounts

        accounts = await open_shared_accounts(registry, start.name, stack)
    metrics = metrics_of(config, ready)
    versions = versions_of(config, start.name, registry, blobs, engine, uploads.validator, metrics)
    versions.pins.keeps_pin = keeps_pin
    services = Services(
        config=config,
        server_name=start.name,
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
        drain=start.shutdown.drain,
        metrics=metrics,
        default_tenant=await _default_tenant(registry) if config.server.auth == "off" else None,
    )
    stack.push_async_callback(versions.garbage.close)
    stack.push_async_callback(cancel_all, [await sweeper_of(services).start()])
    await versions.pins.sync()
    batches = BatchWorker(services, start.name)
    stack.push_async_callback(batches.stop)
    batches.start()
    return services


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
    return Sweeper(
        garbage=services.versions.garbage,
        sweep_staged=partial(services.uploads.sweep, services.registry.uploads.open_ids),
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
