"""A real `weft cluster up` in a process of its own, and what it starts."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from weft.config import environment as inherited
from weft_cluster import wait_until
from weft_server import ADMIN_KEY, ANNOUNCEMENT, DEMO_MODEL, START_TIMEOUT_S, WEFT, WeftServer


@dataclass
class ClusterUp(WeftServer):
    """The command, reached through its gateway."""

    def child(self, name: str) -> psutil.Process:
        """The server that uses this folder now."""
        (found,) = (each for each in servers_in(self.data_dir) if f"{self.data_dir}/{name}" in each.cmdline())
        return found

    def kill(self, name: str) -> int:
        """kill -9 of a server and its engine; returns the pid."""
        child = self.child(name)
        for each in (*child.children(), child):
            each.kill()
        return child.pid

    def wait_restarted(self, name: str, old_pid: int) -> None:
        """Wait until another process serves under the name."""
        wait_until(lambda: self._pids(name) - {old_pid}, START_TIMEOUT_S)
        wait_until(lambda: self.log.read_text().count(f"{name} | weft: listening on") >= 2, START_TIMEOUT_S)

    def num_replicas(self) -> int:
        """Replicas that the gateway is connected to."""
        return sum("running" in each for each in self.admin.get("/v1/servers").json()["data"])

    def _pids(self, name: str) -> set[int]:
        return {each.pid for each in servers_in(self.data_dir) if f"{self.data_dir}/{name}" in each.cmdline()}


def servers_in(data_dir: Path) -> list[psutil.Process]:
    """All server processes whose data folder is in this one, also those that another process started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            words = process.cmdline()
            if "serve" in words and any(word.startswith(f"{data_dir}/") for word in words):
                found.append(process)
    return found


@contextmanager
def cluster_up(root: Path, *arguments: str, **environment: str) -> Iterator[ClusterUp]:
    """Start it, wait until its gateway sees two replicas, and end all that is left."""
    data_dir, log = root / "data", root / "up.log"
    command = [*WEFT, "cluster", "up", "--model", str(DEMO_MODEL), "--port", "0", "--data-dir", str(data_dir)]
    command += ["--memory-gib", "0.0625", *arguments]
    env = {**inherited(), "WEFT_ADMIN_KEY": ADMIN_KEY, "OMP_NUM_THREADS": "1", **environment}
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=env, cwd=root)
    try:

        def announced() -> re.Match[str] | None:
            assert process.poll() is None, log.read_text()
            return ANNOUNCEMENT.search(log.read_text())

        wait_until(announced, START_TIMEOUT_S)
        match = announced()
        assert match is not None
        running = ClusterUp(url=match[1], process=process, data_dir=data_dir, log=log)
        assert running.admin.get("/ready").status_code == 200
        wait_until(lambda: running.num_replicas() == 2)
        yield running
        running.api.close()
        for client in (running.admin, *running.clients.values()):
            client.close()
    finally:
        for _ in range(3):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
        process.kill()
        process.wait()
        wait_until(lambda: not servers_in(data_dir))
