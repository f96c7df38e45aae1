"""A real `manylora serve` in its own process, on a free port, with its own data folder."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import ssl
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil

from manylora.client import Client
from manylora.config import environment as inherited
from manylora.launch.server_process import PROGRAM, ServerProcess

ADMIN_KEY = "manylora-admin-key-of-the-tests-0123456789"
DEMO_MODEL = Path(__file__).resolve().parents[2] / "manylora" / "demo" / "manylora-demo"
DEMO_ADAPTERS = DEMO_MODEL.parent / "adapters"
DEMO_NAMES = sorted(folder.name for folder in DEMO_ADAPTERS.iterdir())
MANYLORA = (str(Path(sys.executable).with_name("manylora")),)
START_TIMEOUT_S = 180.0
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of a server without TLS: a context with the system's certificates takes 20 ms of a CPU to make."""


def free_port() -> int:
    """For programs that take no 0; below those that systems give to connections, so that none takes it meanwhile."""
    for port in random.SystemRandom().sample(range(15_000, 30_000), 100):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no port is free")


STEADY_MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "MALLOC_MMAP_THRESHOLD_": "131072",
}
"""Environment of a server whose RSS follows what is allocated. With an arena for each thread, and thresholds that rise,
it grows by leaps."""


@dataclass
class ManyloraServer:
    """One running server and what tests do with it."""

    url: str
    process: ServerProcess
    data_dir: Path
    log: Path
    tenants: dict[str, str] = field(default_factory=dict)
    """Tenant name to a key of all scopes."""
    clients: dict[str, httpx.Client] = field(default_factory=dict)
    """Tenant name to a client with that key; closed with the server."""

    @cached_property
    def admin(self) -> httpx.Client:
        return self.client(ADMIN_KEY)

    @cached_property
    def api(self) -> Client:
        """A client with the admin key, for what has to succeed; `admin` is for looking at answers."""
        return Client(self.url, ADMIN_KEY)

    def client(self, key: str | None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(
            base_url=self.url, headers=headers, timeout=60, trust_env=False, verify=NO_TLS
        )

    def tenant(self, name: str) -> httpx.Client:
        """A client of this tenant; the tenant is made on first use."""
        if name not in self.tenants:
            self.api.create_tenant(name)
            self.tenants[name] = self.new_key(name)
            self.clients[name] = self.client(self.tenants[name])
        return self.clients[name]

    def take_over(self, other: ManyloraServer) -> None:
        """Use the keys of another server over the same registry."""
        self.tenants = other.tenants
        self.clients = {name: self.client(key) for name, key in other.tenants.items()}

    def new_key(self, tenant: str, **fields: Any) -> str:
        return str(self.api.create_key(tenant, **{"name": "test", **fields})["key"])

    def upload(self, client: httpx.Client, name: str, folder: Path) -> httpx.Response:
        return upload_bytes(
            client,
            name,
            (folder / "adapter_config.json").read_bytes(),
            (folder / "adapter_model.safetensors").read_bytes(),
        )

    def publish(self, tenant: str, *names: str) -> httpx.Client:
        """A client of this tenant, which now has these adapters of the demo."""
        client = self.tenant(tenant)
        for name in names:
            answer = self.upload(client, name, DEMO_ADAPTERS / name)
            assert answer.status_code == 201, answer.text
        return client

    def ask(self, tenant: str, model: str, question: str) -> dict[str, Any]:
        """The chat completion of a good request, which must succeed."""
        messages = [{"role": "user", "content": question}]
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 64}
        answer = self.tenant(tenant).post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def engine(self) -> dict[str, Any]:
        return self.api.engine()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return once /ready is 200."""
        self.process.wait_ready(timeout_s)

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        return self.process.stop(60)


def upload_bytes(
    client: httpx.Client, name: str, config: bytes, weights: bytes, **fields: str
) -> httpx.Response:
    return client.post(
        "/v1/adapters",
        data={"name": name, **fields},
        files={
            "config": ("adapter_config.json", config, "application/json"),
            "weights": ("adapter_model.safetensors", weights, "application/octet-stream"),
        },
    )


@contextmanager
def manylora_server(
    data_dir: Path,
    *arguments: str,
    model: Path = DEMO_MODEL,
    program: str = PROGRAM,
    settings: Mapping[str, object] = MappingProxyType({}),
    **environment: str,
) -> Iterator[ManyloraServer]:
    """Start `manylora serve`, wait until it is ready, and end it by its own pid.

    `program` is a module that runs instead of the command; it may be one of `tests/support`.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    log = data_dir / "server.log"
    words = [
        *("serve", "--model", str(model), "--port", "0", "--data-dir", str(data_dir / "data")),
        *arguments,
        *(word for name, value in settings.items() for word in ("--set", f"{name}={value}")),
    ]
    env = {
        **inherited(),
        "MANYLORA_ADMIN_KEY": ADMIN_KEY,
        "OMP_NUM_THREADS": "1",
        "MANYLORA_MEMORY__POISON": "true",
        **({} if program == PROGRAM else {"PYTHONPATH": str(Path(__file__).parent)}),
        **environment,
    }
    process = ServerProcess("the server", words, env, log=log, program=program)
    try:
        # It takes a free port itself: one chosen here could be gone by then.
        url = process.wait_ready(START_TIMEOUT_S)
        server = ManyloraServer(url=url, process=process, data_dir=data_dir / "data", log=log)
        try:
            yield server
        finally:
            server.api.close()
            for client in (server.admin, *server.clients.values()):
                client.close()
    finally:
        process.stop(20)


def engines(server: ManyloraServer) -> list[psutil.Process]:
    """The children of the server that are engines: one, and none while it starts again."""
    found = []
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "manylora.engine.process.worker" in child.cmdline():
                found.append(child)
    return found


def expected_answers() -> dict[str, Any]:
    return dict(json.loads((DEMO_MODEL.parent / "expected.json").read_text()))


def stream_events(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> Iterator[dict[str, Any] | str]:
    """Server-sent events of a streaming call: JSON objects, and "[DONE]" at the end."""
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        if answer.status_code != 200:
            answer.read()
            raise AssertionError(f"{answer.status_code}: {answer.text}")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                yield data if data == "[DONE]" else json.loads(data)
