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
from manylora.engine.text.tokenizer import Tokenizer, read_object
from manylora.errors import CapacityError, NotFoundError
from manylora.registry.db.models import TenantRow
from manylora.registry.registry import Registry
from manylora.registry.servers import server_name
from manylora.server.adapters.staged_files import open_staged
from manylora.server.adapters.validation import AdapterValidator
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
from manylora.server.drain import Drain
from manylora.server.garbage import Sweeper
from manylora.server.limits.database_turns import database_turns
from manylora.server.limits.gate import Gate
from manylora.server.limits.windows import Accounts
from manylora.server.listen import (
    ApiServer,
    Shutdown,
    bind,
    listen,
    listen_beside,
    metrics_app,
    run_until_signal,
    url_of,
)
from manylora.server.logs import configure_logs
from manylora.server.long_work import keep_interpreter_moving
from manylora.server.pins import sync_pins
from manylora.server.sandbox.chat_renderer import ChatRenderer
from manylora.server.sandbox.grammar_checker import GrammarChecker
from manylora.server.services import Services, base_names
from manylora.server.status.metrics import Metrics
from manylora.server.status.routes import metrics_response
from manylora.server.status.vllm_names import VllmNames
from manylora.server.threads import cancel_all
from manylora.server.tools.formats import check_format_name, format_of
from manylora.server.usage.price_file import read_prices

log = structlog.get_logger("manylora.server")
Announce = Callable[[str], None]
WITNESS_S = 10.0
"""For so long after a replica starts again, gateways may say what clients got of the requests it was killed under."""


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
    is_duty: Callable[[str, int], bool] = lambda *_: True,
    worker: Worker | None = None,
) -> Services:
    """Open registry, blobs, engine and tokenizer; `stack` closes them in reverse.

    Args:
        config: The settings.
        key: The admin's key.
        announce: Told how the start goes on.
        stack: Closes what was opened.
        drain: Counts the requests that run.
        is_duty: As of `Services`.
        worker: As of `EngineClient`.

    Raises:
        ConfigError: A setting is wrong.
        EngineUnavailableError: The engine does not start.
    """
    prices = read_prices(config.registry.price_file) if config.registry.price_file else None
    pepper, is_replica = given_pepper(environment()), config.server.role == "replica"
    if is_replica:
        check_shared_secrets("replica", pepper, environment().get(VARIABLE))
    registry = await Registry.open(
        config.registry.database_url,
        config.server.data_dir,
        key.secret,
        pepper=pepper,
        grace_s=WITNESS_S if is_replica else 0.0,
    )
    stack.push_async_callback(registry.close)
    registry.database.share(database_turns())
    blobs = await asyncio.to_thread(open_blob_store, config)
    engine = EngineClient(config, announce=announce, worker=worker)
    stack.push_async_callback(engine.close)
    ready, (tokenizer, tokenizer_settings) = await _start(engine, config.model.path)
    format_of(tokenizer, config.model.tool_format)
    chats = ChatRenderer(tokenizer)
    stack.push_async_callback(chats.close)
    grammars = GrammarChecker(tokenizer.folder)
    stack.push_async_callback(grammars.close)
    if (fault := await chats.try_template()) is not None:
        announce(f"manylora: chats are refused: {fault}")
    name = await asyncio.to_thread(server_name, config.server.data_dir)
    validator = AdapterValidator(ready, blobs, base_names(config))
    stack.push_async_callback(validator.close)
    metrics, scheduler = metrics_of(config, ready), config.scheduler
    accounts = Accounts()
    if is_replica:  # only servers over one database share limits
        from manylora.server.limits.leases import open_leased_accounts

        accounts = await open_leased_accounts(registry, name, stack)
    services = Services(
        config=config,
        registry=registry,
        engine=engine,
        ready=ready,
        tokenizer=tokenizer,
        chats=chats,
        grammars=grammars,
        tokenizer_settings=tokenizer_settings,
        blobs=blobs,
        validator=validator,
        metrics=metrics,
        gate=Gate(
            scheduler.max_wait_s,
            scheduler.max_waiting,
            lambda: engine.load,
            time.monotonic,
            metrics.refused,
        ),
        drain=drain,
        staged=await asyncio.to_thread(open_staged, config, blobs),
        server_name=name,
        is_duty=is_duty,
        accounts=accounts,
        memory=MemoryBlobs(int(config.adapter.push_gib * GIB)),
        prices=prices,
        default_tenant=await _default_tenant(registry) if config.server.auth == "off" else None,
    )
    stack.callback(services.long_work.close)
    stack.push_async_callback(cancel_all, services.removals)  # the next start deletes what is left
    stack.push_async_callback(cancel_all, [await Sweeper(services).start()])
    await sync_pins(services)
    batches = BatchWorker(services, name)
    stack.push_async_callback(batches.stop)
    batches.start()
    return services


def metrics_of(config: Config, ready: EngineReady) -> Metrics:
    """The metrics, under the names that the settings ask for."""
    has_aliases = config.server.metrics_aliases != "none"
    return Metrics(VllmNames(base_names(config)[0], ready.memory.slots) if has_aliases else None)


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


async def _start(
    engine: EngineClient, model: str
) -> tuple[EngineReady, tuple[Tokenizer, dict[str, object]]]:
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
    except (
        CapacityError
    ) as error:  # it may come back, and adapters that are cached or resident are served meanwhile
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
