"""`manylora cluster up --ray`, and the replica that Ray keeps."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from cluster_up import cluster_up, servers_in
from idleness import wait_until
from manylora.config import environment
from manylora.errors import ConfigError
from manylora_cluster import PEPPER
from manylora_server import ADMIN_KEY, DEMO_MODEL, MANYLORA

pytest.importorskip("ray", reason="docs/cluster.md says how to install Ray")
pytestmark = pytest.mark.ray


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """Short: Ray's sockets have no room for the paths of pytest."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        yield folder


def processes_of(ray_folder: str) -> list[psutil.Process]:
    """What lives of the Ray with its files there."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and any(ray_folder in word for word in process.info["cmdline"] or ())
    ]


def test_tokens_go_on_without_rays_head_and_nothing_is_left_at_the_end(
    tmp_path: Path, ray_folder: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    own = {
        "RAY_TMPDIR": ray_folder,
        "HOME": str(home),
        "XDG_CACHE_HOME": environment().get("XDG_CACHE_HOME", str(Path.home() / ".cache")),
    }
    with cluster_up(tmp_path, "--ray", "--set", "server.drain_s=5", environment=own) as cluster:
        assert (cluster.data_dir / "ray.token").stat().st_mode & 0o777 == 0o600
        with cluster.streaming(900) as lines:
            (head,) = (each for each in processes_of(ray_folder) if each.name() == "gcs_server")
            head.kill()
            assert lines[-1] != "data: [DONE]"
        assert "data: [DONE]" in lines
        client, body = (
            cluster.tenant("acme"),
            {"model": "manylora-demo", "prompt": "go on", "max_tokens": 4},
        )
        for _ in range(20):
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
        assert cluster.num_replicas() == 2
        assert list(home.glob(".ray*")) == []
        # Ray cannot drain the replicas any more: the third signal ends it, and they drain by themselves.
        cluster.process.send_signal(signal.SIGTERM)
        wait_until(
            lambda: "ray | INFO" in cluster.log.read_text().rpartition('"event": "drained"')[2]
        )
        for _ in range(2):
            cluster.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)  # signals that come together are one
        assert cluster.process.wait(60) == 0
        wait_until(lambda: not servers_in(cluster.data_dir))
    wait_until(
        lambda: (
            not any(each.name() in ("raylet", "gcs_server") for each in processes_of(ray_folder))
        )
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Ray imports
def test_a_replica_reports_its_load_and_is_drained_before_its_actor_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from manylora.launch.ray_serve import ManyloraReplica
    from manylora.launch.scaling import BUSY, WAIT

    monkeypatch.setenv("MANYLORA_ADMIN_KEY", ADMIN_KEY)
    monkeypatch.setenv("MANYLORA_PEPPER", PEPPER)
    settings = {
        "MANYLORA_MODEL__PATH": str(DEMO_MODEL),
        "MANYLORA_MEMORY__GIB": "0.0625",
        "MANYLORA_SERVER__DATA_DIR": str(tmp_path / "data"),
    }
    with pytest.raises(
        ConfigError,
        match="MANYLORA_REGISTRY__DATABASE_URL is not in the environment of this Ray node",
    ):
        ManyloraReplica(settings, "127.0.0.1")
    monkeypatch.setenv("MANYLORA_REGISTRY__DATABASE_URL", f"sqlite:///{tmp_path}/registry.sqlite")
    first, second = ManyloraReplica(settings, "127.0.0.1"), ManyloraReplica(settings, "127.0.0.1")
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"replica-0", "replica-1"}

    async def use() -> None:
        await first.check_health()
        assert await first.record_autoscaling_stats() == {WAIT: 0.0, BUSY: 0.0}
        first.__del__()
        ended: list[int] = []
        monkeypatch.setattr(os, "_exit", ended.append)
        with pytest.raises(httpx.TransportError):
            await first.check_health()
        assert ended == [1]
        await first._http.aclose()

    asyncio.run(use())
    (left,) = servers_in(tmp_path / "data")
    again = ManyloraReplica(settings, "127.0.0.1")  # takes the folder that is free
    assert len(servers_in(tmp_path / "data")) == 2
    for replica in (second, again):
        replica.__del__()
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE


def test_a_replica_that_does_not_start_ends_the_command_with_the_reason(
    tmp_path: Path, ray_folder: str
) -> None:
    env = {
        **environment(),
        "MANYLORA_MODEL__PATH": str(DEMO_MODEL),
        "RAY_TMPDIR": ray_folder,
        "RAY_AUTH_MODE": "disabled",
    }
    command = [*MANYLORA, "cluster", "ray", json.dumps({"address": None, "cpus": 0.5})]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, cwd=tmp_path
    )
    assert done.returncode == 1, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("manylora: "))
    assert line.startswith("manylora: Ray does not run the replicas: ")
    assert (
        "MANYLORA_ADMIN_KEY is not in the environment of this Ray node" in done.stdout + done.stderr
    )
