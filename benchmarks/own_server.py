"""A server for a benchmark: started, given a tenant, a key and adapters, and ended with the benchmark."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from weft.config import environment
from weft.errors import ConfigError, WeftError
from weft.server.server_process import server_process

BASE_NAME = "base"
TENANT = "benchmark"
READY_WITHIN_S = 600.0
"""A large model takes its time, and one from a hub is fetched first."""


@dataclass(frozen=True, slots=True)
class Served:
    """Where to send requests."""

    url: str
    """With /v1."""
    key: str
    models: list[str]
    """The base, then the adapters."""


@contextlib.contextmanager
def own_server(
    model: str, adapters: Sequence[Path], settings: Sequence[str], ready_within_s: float = READY_WITHIN_S
) -> Iterator[Served]:
    """Serve a model with adapters until the block is left.

    Args:
        model: Folder or hub id of the base.
        adapters: Folders as PEFT writes them; each is named after its folder.
        settings: As of `weft serve --set`, for example `memory.gib=1`. Those of the environment do not count: a
            benchmark must not reach the registry of a real server.
        ready_within_s: How long the server may take to start.

    Raises:
        ConfigError: An adapter's folder lacks a file, or two have one name.
        WeftError: The server does not start, or refuses an adapter; the message is its own.
    """
    _, *names = server_names(adapters)
    files = {name: _read(folder) for name, folder in zip(names, adapters, strict=True)}
    plain = {name: value for name, value in environment().items() if not name.startswith("WEFT_")}
    options = ["--model", model, "--served-model-name", BASE_NAME]
    for setting in settings:
        options += ["--set", setting]
    with (
        tempfile.TemporaryDirectory(prefix="weft-") as folder,
        server_process(None, Path(folder), options, plain) as server,
    ):
        server.wait_ready(ready_within_s)
        admin = server.admin_key()
        with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as http:
            _call(http, "/v1/tenants", admin, json={"name": TENANT})
            key = str(_call(http, f"/v1/tenants/{TENANT}/keys", admin, json={})["key"])
            for name, content in files.items():
                _call(http, "/v1/adapters", key, data={"name": name}, files=content)
        yield Served(f"{server.url}/v1", key, [BASE_NAME, *files])


def server_names(adapters: Sequence[Path]) -> list[str]:
    """What the base and the adapters of these folders are called.

    Raises:
        ConfigError: Two folders have one name.
    """
    names = [BASE_NAME, *(folder.resolve().name.lower() for folder in adapters)]
    if len(set(names)) < len(names):
        raise ConfigError(f"adapters are named after their folders, which must differ: got {', '.join(names[1:])}")
    return names


def _read(folder: Path) -> dict[str, bytes]:
    try:
        return {
            "config": (folder / "adapter_config.json").read_bytes(),
            "weights": (folder / "adapter_model.safetensors").read_bytes(),
        }
    except OSError as error:
        raise ConfigError(f"{folder} is no folder of an adapter: {error.filename}: {error.strerror}") from error


def _call(http: httpx.Client, path: str, key: str, **content: Any) -> dict[str, Any]:  # noqa: ANN401 - a body
    answer = http.post(path, headers={"Authorization": f"Bearer {key}"}, **content)
    if not answer.is_success:
        raise WeftError(f"POST {path} was answered {answer.status_code}: {answer.text}")
    return dict(answer.json())
