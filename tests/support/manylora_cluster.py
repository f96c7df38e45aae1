"""Real gateways and replicas, each a process of its own, over one registry and one blob store."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from idleness import wait_until
from manylora_server import ManyloraServer, engines, manylora_server

PEPPER = "pepper-of-the-cluster-0123456789"


@dataclass
class Cluster:
    """What runs, and what tests do with it."""

    root: Path
    database_url: str
    stack: ExitStack
    replicas: dict[str, ManyloraServer] = field(default_factory=dict)
    """By the name that the registry has."""
    gateways: list[ManyloraServer] = field(default_factory=list)

    @property
    def gateway(self) -> ManyloraServer:
        return self.gateways[-1]

    def start_replica(self, folder: str) -> str:
        """Start a replica, on a folder that another one may have used before; returns its name.

        Names are fixed: with random ones all adapters of a test may be one replica's.
        """
        data_dir = self.root / folder / "data"
        data_dir.mkdir(parents=True, exist_ok=True)
        (data_dir / "server-id").write_text(f"srv_{folder}\n")
        server = self._start(
            folder,
            "--role",
            "replica",
            "--memory-gib",
            "0.0625",
            "--blob-url",
            str(self.root / "blobs"),
        )
        name = (server.data_dir / "server-id").read_text().strip()
        self.replicas[name] = server
        return name

    def start_gateway(self, folder: str = "gateway") -> ManyloraServer:
        server = self._start(folder, "--role", "gateway")
        self.gateways.append(server)
        return server

    def _start(self, folder: str, *arguments: str) -> ManyloraServer:
        place = self.root / folder
        return self.stack.enter_context(
            manylora_server(
                place, *arguments, "--database-url", self.database_url, MANYLORA_PEPPER=PEPPER
            )
        )

    def servers(self) -> dict[str, dict[str, Any]]:
        """What the gateway says of all servers, by name."""
        return {each["name"]: each for each in self.gateway.admin.get("/v1/servers").json()["data"]}

    def wait_for(self, *ready: str) -> None:
        """Wait until these replicas, and no others, take requests for the gateway."""

        def is_so() -> bool:
            return {name for name, seen in self.servers().items() if "running" in seen} == set(
                ready
            )

        wait_until(is_so)

    def engine(self, name: str) -> dict[str, Any]:
        """The state of a replica's engine, through the gateway."""
        answer = self.gateway.admin.get("/v1/engine", params={"server": name})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def kill(self, server: ManyloraServer) -> None:
        """kill -9 of a server and its engine, as when the machine goes."""
        victims = engines(server)
        server.process.kill()
        for each in victims:
            each.send_signal(signal.SIGKILL)
        server.process.wait()
        self.replicas = {
            name: other for name, other in self.replicas.items() if other is not server
        }


@contextmanager
def manylora_cluster(
    root: Path, num_replicas: int, database_url: str | None = None
) -> Iterator[Cluster]:
    """Start replicas and a gateway, and wait until it sees all of them."""
    with ExitStack() as stack:
        root.mkdir(parents=True, exist_ok=True)
        cluster = Cluster(root, database_url or f"sqlite:///{root}/registry.sqlite", stack)
        for number in range(num_replicas):
            cluster.start_replica(f"replica{number}")
        cluster.start_gateway()
        cluster.wait_for(*cluster.replicas)
        yield cluster
