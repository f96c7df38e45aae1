"""A real `manylora cluster up` in a process of its own, and what it starts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil

from idleness import wait_until
from manylora.config import environment as inherited
from manylora.launch.server_process import ServerProcess
from manylora_server import ADMIN_KEY, DEMO_MODEL, START_TIMEOUT_S, ManyloraServer


@dataclass
class ClusterUp(ManyloraServer):
    """The command, reached through its gateway."""

    def child(self, name: str) -> psutil.Process:
        """The server that uses this folder now."""
        (found,) = (
            each
            for each in servers_in(self.data_dir)
            if f"{self.data_dir}/{name}" in each.cmdline()
        )
        return found

    def kill(self, name: str) -> int:
        """kill -9 of a server and its engine; returns the pid."""
        child = self.child(name)
        for each in (*child.children(), child):
            each.kill()
        return child.pid

    def wait_restarted(self, name: str, old_pid: int) -> None:
        """Wait until another process serves under the name."""
        wait_until(lambda: self._pids(name) - {old_pid})
        wait_until(lambda: self.log.read_text().count(f"{name} | manylora: listening on") >= 2)

    def num_replicas(self) -> int:
        """Replicas that the gateway is connected to."""
        return sum("running" in each for each in self.admin.get("/v1/servers").json()["data"])

    @contextmanager
    def streaming(self, max_tokens: int) -> Iterator[list[str]]:
        """The lines of a stream of so many tokens, once they come; leaving the block waits for its end."""
        body = {
            "model": "manylora-demo",
            "prompt": "go on",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        client, started, lines = self.tenant("acme"), threading.Event(), list[str]()

        def read() -> None:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    started.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert started.wait(60)
        try:
            yield lines
        finally:
            reader.join()

    def _pids(self, name: str) -> set[int]:
        return {
            each.pid
            for each in servers_in(self.data_dir)
            if f"{self.data_dir}/{name}" in each.cmdline()
        }


def servers_in(data_dir: Path) -> list[psutil.Process]:
    """All server processes whose data folder is in this one, also those that another process started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            words = process.cmdline()
            if "serve" in words and any(word.startswith(f"{data_dir}/") for word in words):
                found.append(process)
    return found


def arguments(data_dir: Path) -> list[str]:
    """Arguments of `manylora` that start a cluster of the demo model, on a free port."""
    place = ("--port", "0", "--data-dir", str(data_dir), "--memory-gib", "0.0625")
    return ["cluster", "up", "--model", str(DEMO_MODEL), *place]


@contextmanager
def cluster_up(
    root: Path,
    *more: str,
    num_replicas: int = 2,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[ClusterUp]:
    """Start it, wait until its gateway sees all replicas, and end all that is left."""
    data_dir, log = root / "data", root / "up.log"
    words = [*arguments(data_dir), "--replicas", str(num_replicas), *more]
    env = {**inherited(), "MANYLORA_ADMIN_KEY": ADMIN_KEY, "OMP_NUM_THREADS": "1", **environment}
    process = ServerProcess("the cluster", words, env, log=log)
    try:
        url = process.wait_listening(START_TIMEOUT_S)
        running = ClusterUp(url=url, process=process, data_dir=data_dir, log=log)
        assert running.admin.get("/ready").status_code == 200
        wait_until(lambda: running.num_replicas() == num_replicas)
        yield running
        running.api.close()
        for client in (running.admin, *running.clients.values()):
            client.close()
    finally:
        process.stop()
        wait_until(lambda: not servers_in(data_dir))
