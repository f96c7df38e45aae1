"""Replicas that Ray keeps, behind gateways that are plain processes: what tests of a `Cluster` do with them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cluster_up import servers_in
from idleness import wait_until
from manylora.config import environment as inherited
from manylora.launch.server_process import ServerProcess
from manylora_cluster import PEPPER, Cluster
from manylora_server import ADMIN_KEY, DEMO_MODEL, START_TIMEOUT_S, ManyloraServer


class RayCluster(Cluster):
    """Ray starts the replicas again itself."""

    num_replicas: int

    def start_replica(self, folder: str) -> str:  # noqa: ARG002 - Ray chooses
        """Wait until Ray has replaced the replica that was killed; returns its name."""
        before = set(self.replicas)
        self.find_replicas()
        (name,) = set(self.replicas) - before
        return name

    def find_replicas(self) -> None:
        """Wait until the gateway sees all replicas, and find their processes."""
        wait_until(self._all_run)
        listed = self.servers()
        for process in servers_in(self.root / "ray"):
            data_dir = Path(process.cmdline()[process.cmdline().index("--data-dir") + 1])
            name = (data_dir / "server-id").read_text().strip()
            if name not in self.replicas:
                popen: Any = process  # has what tests use of a Popen
                self.replicas[name] = ManyloraServer(
                    listed[name]["url"], popen, data_dir, self.root / "ray.log"
                )

    def _all_run(self) -> bool:
        return (
            len([each for each in self.servers().values() if "running" in each])
            == self.num_replicas
        )


@contextmanager
def ray_cluster(root: Path, num_replicas: int) -> Iterator[RayCluster]:
    """Start Ray on two CPUs, half of one for each replica, and a gateway."""
    database_url = f"sqlite:///{root}/registry.sqlite"
    token = root / "ray.token"
    token.write_text("0" * 64)
    for number in range(
        num_replicas
    ):  # names that share the adapters of the tests evenly, which chance does not always
        folder = root / "ray" / f"replica-{number}"
        folder.mkdir(parents=True)
        (folder / "server-id").write_text(f"srv_{10 + number:024x}\n")
    # Ray's sockets have no room for the long paths of pytest.
    with tempfile.TemporaryDirectory(prefix="ray") as short, ExitStack() as stack:
        env = {
            **inherited(),
            "MANYLORA_ADMIN_KEY": ADMIN_KEY,
            "MANYLORA_PEPPER": PEPPER,
            "MANYLORA_REGISTRY__DATABASE_URL": database_url,
            "MANYLORA_REGISTRY__BLOB_URL": str(root / "blobs"),
            "MANYLORA_MODEL__PATH": str(DEMO_MODEL),
            "MANYLORA_MODEL__THREADS": "1",
            "MANYLORA_MEMORY__GIB": "0.0625",
            "MANYLORA_MEMORY__POISON": "true",
            "MANYLORA_SERVER__DATA_DIR": str(root / "ray"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_TMPDIR": short,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_COLOR_PREFIX": "0",
        }
        plan = {"replicas": num_replicas, "cpus": 0.5, "address": None}
        log = root / "ray.log"
        driver = ServerProcess("ray", ["cluster", "ray", json.dumps(plan)], env, log=log)
        try:
            cluster = RayCluster(root, database_url, stack)
            cluster.num_replicas = num_replicas
            driver.wait_listening(START_TIMEOUT_S)
            cluster.start_gateway()
            cluster.find_replicas()
            yield cluster
        finally:
            driver.stop()
            wait_until(lambda: not servers_in(root / "ray"))
