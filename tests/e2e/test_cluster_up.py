"""`manylora cluster up` without Ray: what it starts, starts again and ends."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster_up import ClusterUp, arguments, cluster_up, servers_in
from idleness import wait_until
from manylora_server import MANYLORA


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterUp]:
    with cluster_up(tmp_path_factory.mktemp("up"), "--set", "server.drain_s=20") as running:
        running.tenant("acme")
        yield running


def ask(cluster: ClusterUp) -> str:
    answer = cluster.tenant("acme").post(
        "/v1/completions", json={"model": "manylora-demo", "prompt": "x", "max_tokens": 2}
    )
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_its_secrets_are_for_this_user_alone_and_its_servers_share_cores_and_adapters(
    cluster: ClusterUp,
) -> None:
    assert ask(cluster)
    assert "replica_not_reached" not in cluster.log.read_text()  # it listens before it is listed
    assert (cluster.data_dir / "cluster.pepper").stat().st_mode & 0o777 == 0o600
    assert {each.name for each in cluster.data_dir.glob("*-*")} >= {"replica-0", "replica-1"}
    environ = cluster.child("replica-1").environ()
    cores = sorted(os.sched_getaffinity(0))
    assert environ["MANYLORA_MODEL__THREADS"] == str(max(1, len(cores) // 2))
    parts = [cluster.child(f"replica-{number}").cpu_affinity() for number in range(2)]
    assert (
        [core for part in parts for core in part] == cores
        if len(cores) > 1
        else parts == [cores, cores]
    )
    assert sorted(cluster.child("gateway").cpu_affinity()) == cores
    assert environ["MANYLORA_REGISTRY__BLOB_URL"] == str(cluster.data_dir / "blobs")
    assert "MANYLORA_PEPPER" not in json.dumps(cluster.child("replica-1").cmdline())


def test_a_killed_replica_comes_back_under_its_name(cluster: ClusterUp) -> None:
    names = {each["name"] for each in cluster.admin.get("/v1/servers").json()["data"]}
    pid = cluster.kill("replica-0")
    assert all(ask(cluster) for _ in range(20))
    cluster.wait_restarted("replica-0", pid)
    wait_until(lambda: cluster.num_replicas() == 2)
    assert {each["name"] for each in cluster.admin.get("/v1/servers").json()["data"]} == names
    assert (
        "manylora: replica-0 ended with status -9 and starts again in 0.5 s"
        in cluster.log.read_text()
    )


def test_a_killed_gateway_comes_back_at_its_address(cluster: ClusterUp) -> None:
    pid = cluster.kill("gateway")
    cluster.wait_restarted("gateway", pid)
    cluster.wait_ready()
    assert ask(cluster)


def test_sigterm_lets_streams_end_and_drains_the_gateway_before_the_replicas(
    cluster: ClusterUp,
) -> None:
    """The last of the tests that share a cluster."""
    with cluster.streaming(600) as lines:
        cluster.process.send_signal(signal.SIGTERM)
        wait_until(lambda: cluster.admin.get("/ready").status_code == 503)
        assert ask(cluster)  # a load balancer may not have noticed yet
        assert cluster.process.wait(60) == 0
    assert "data: [DONE]" in lines
    log = cluster.log.read_text()
    drained = [
        log.index(f'{name} | {{"cut": 0, "event": "drained"')
        for name in ("gateway", "replica-0", "replica-1")
    ]
    assert drained[0] == min(drained)
    assert servers_in(cluster.data_dir) == []


def test_the_third_signal_waits_for_nothing(tmp_path: Path) -> None:
    with cluster_up(tmp_path, num_replicas=1) as cluster:
        cluster.child("replica-0").suspend()
        for _ in range(3):
            cluster.process.send_signal(signal.SIGTERM)
            time.sleep(1)  # signals that come together are one
        assert cluster.process.wait(60) == 0
        assert servers_in(cluster.data_dir) == []


def test_its_servers_end_when_it_is_killed(tmp_path: Path) -> None:
    with cluster_up(tmp_path, "--set", "server.drain_s=1", num_replicas=1) as cluster:
        engines = [each for server in servers_in(cluster.data_dir) for each in server.children()]
        assert engines
        cluster.process.kill()
        wait_until(lambda: not servers_in(cluster.data_dir))
        wait_until(
            lambda: (
                not any(
                    each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in engines
                )
            )
        )


def test_ctrl_c_ends_it_while_it_starts(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as sink:
        words = [*MANYLORA, *arguments(tmp_path / "d"), "--replicas", "1"]
        process = subprocess.Popen(words, stdout=sink, stderr=subprocess.STDOUT, cwd=tmp_path)
        wait_until(lambda: len(servers_in(tmp_path / "d")) == 2)
        wait_until(lambda: "loading model" in (tmp_path / "log").read_text())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert servers_in(tmp_path / "d") == []
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_wrong_setting_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    status, output = failed(tmp_path, "--model", str(tmp_path / "empty"))
    assert (status, "model.path: cannot read" in output) == (2, True), output
    assert "Traceback" not in output


def test_a_server_that_does_not_start_ends_all(tmp_path: Path) -> None:
    folder = tmp_path / "d" / "replica-0" / "usage"
    folder.mkdir(parents=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, output = failed(tmp_path)
    assert status == 1, output
    assert "replica-0 | manylora: server.data_dir is in use by another Manylora process" in output
    assert (
        output.splitlines()[-1]
        == "manylora: replica-0 ended with status 2 while it started; its last lines say why."
    )
    assert servers_in(tmp_path / "d") == []


def failed(tmp_path: Path, *more: str) -> tuple[int, str]:
    """Status and output of a command that does not start."""
    done = subprocess.run(
        [*MANYLORA, *arguments(tmp_path / "d"), "--replicas", "1", *more],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr
