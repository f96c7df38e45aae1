"""`manylora serve`."""

from __future__ import annotations

import os
import sys

import typer

from manylora.cli.config import GivenSettings, settings_command
from manylora.config import GatewayConfig
from manylora.engine.process.worker_process import start_worker


@settings_command(
    model="model.path",
    served_model_name="model.served_name",
    role="server.role",
    host="server.host",
    port="server.port",
    metrics_port="server.metrics_port",
    auth="server.auth",
    data_dir="server.data_dir",
    database_url="registry.database_url",
    blob_url="registry.blob_url",
    device="model.device",
    dtype="model.dtype",
    weights="model.weights",
    memory_gib="memory.gib",
    max_model_len="model.max_model_len",
)
def serve(given: GivenSettings) -> None:
    """Serve a base model and its adapters over HTTP."""
    code = _run(given)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is closed; the end of the interpreter would take seconds


def _run(given: GivenSettings) -> int:
    """Serve in the role of the settings, and return the exit code."""
    as_gateway = given.load(GatewayConfig)
    if as_gateway.server.role == "gateway":
        from manylora.server.cluster.serve import serve_gateway

        return serve_gateway(as_gateway, typer.echo)
    config = given.load()
    from manylora.server.process.descriptors import raise_descriptor_limit

    raise_descriptor_limit()  # the engine inherits it
    worker = start_worker()  # it imports torch while this process imports the server
    try:
        from manylora.server.serve import serve as run

        return run(config, typer.echo, worker)
    finally:
        worker.process.kill()  # in case the server could not start and has not closed it
