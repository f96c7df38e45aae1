"""`manylora serve`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from manylora.config import Config as Settings
from manylora.config import GatewayConfig, environment
from manylora.engine.process.worker_process import start_worker

ConfigT = TypeVar("ConfigT", Settings, GatewayConfig)
Model = Annotated[
    str | None, typer.Option(help="Folder or hub id of the base model. [env: MANYLORA_MODEL__PATH]")
]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda. [default: auto]")]
Dtype = Annotated[
    str | None, typer.Option(help="auto, float32, bfloat16 or float16. [default: auto]")
]
Weights = Annotated[
    str | None, typer.Option(help="auto, bf16 (as --dtype says), int8 or int4. [default: auto]")
]
Config = Annotated[Path | None, typer.Option(help="Settings in YAML. [env: MANYLORA_CONFIG]")]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder of the database, adapters and keys. [default: manylora-data]"),
]
Port = Annotated[int | None, typer.Option(help="Port to bind. [default: 8000]")]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(help="sqlite:///FILE or postgresql://... [default: SQLite in the data folder]"),
]
MemoryGib = Annotated[float | None, typer.Option(help="Memory for KV cache and adapters, in GiB.")]
Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.NAME=VALUE",
        help="Any setting of `manylora config init`; repeat for more.",
    ),
]


def serve(  # noqa: PLR0913 - one parameter per option
    model: Model = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the base for clients.")
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(
            help="all; of many servers gateway or replica: docs/cluster.md. [default: all]"
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to bind. [default: 127.0.0.1]")] = None,
    port: Port = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Separate port for /metrics, without a key.")
    ] = None,
    auth: Annotated[
        str | None,
        typer.Option(
            help="off lets everybody in as admin, on a loopback address only. [default: on]"
        ),
    ] = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    blob_url: Annotated[
        str | None,
        typer.Option(
            help="Where adapters are stored: a folder, or s3://BUCKET[/PREFIX] with keys, region and endpoint in the "
            "AWS_... environment. [default: blobs/ in the data folder]"
        ),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    weights: Weights = None,
    memory_gib: MemoryGib = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt plus output, in tokens.")
    ] = None,
    config: Config = None,
    settings: Setting = None,
) -> None:
    """Serve a base model and its adapters over HTTP."""
    address: dict[str, object] = {
        "role": role,
        "host": host,
        "port": port,
        "metrics_port": metrics_port,
    }
    formats: dict[str, object] = {"device": device, "dtype": dtype, "weights": weights}
    options: dict[str, dict[str, object]] = {
        "model": {
            "path": model,
            "served_name": served_model_name,
            **formats,
            "max_model_len": max_model_len,
        },
        "memory": {"gib": memory_gib},
        "server": {**address, "auth": auth, "data_dir": data_dir},
        "registry": {"database_url": database_url, "blob_url": blob_url},
    }
    code = _run(options, settings, config)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is closed; the end of the interpreter would take seconds


def _run(
    options: Mapping[str, Mapping[str, object]], assignments: list[str] | None, file: Path | None
) -> int:
    """Serve in the role of the settings, and return the exit code."""
    as_gateway = _merged(options, assignments, file, GatewayConfig)
    if as_gateway.server.role == "gateway":
        from manylora.server.cluster.serve import serve_gateway

        return serve_gateway(as_gateway, typer.echo)
    config = settings_of(options, assignments, file)
    from manylora.server.http.connection_room import raise_descriptor_limit

    raise_descriptor_limit()  # the engine inherits it
    worker = start_worker()  # it imports torch while this process imports the server
    try:
        from manylora.server.serve import serve as run

        return run(config, typer.echo, worker)
    finally:
        worker.process.kill()  # in case the server could not start and has not closed it


def settings_of(
    options: Mapping[str, Mapping[str, object]], assignments: list[str] | None, file: Path | None
) -> Settings:
    """Merge the settings of the command line, the environment and the file.

    Args:
        options: Options by section and name; None is not given.
        assignments: Settings of `--set`, which override all others.
        file: File of `--config`.

    Raises:
        ConfigError: A setting is wrong.
    """
    return _merged(options, assignments, file, Settings)


def _merged(
    options: Mapping[str, Mapping[str, object]],
    assignments: list[str] | None,
    file: Path | None,
    kind: type[ConfigT],
) -> ConfigT:
    from manylora.server.settings import load_config, merge_trees, parse_assignments

    return load_config(
        merge_trees(options, parse_assignments(assignments or [])), environment(), file, kind
    )
