"""Replicas kept by Ray Serve: it places, restarts and scales them. Requests and tokens never travel through Ray.

Each replica of the deployment starts `manylora serve --role replica` on its node. That announces itself in the
registry, where gateways find it, so a gateway needs no Ray, and replicas that run do not need Ray's head.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import ray
from ray import serve

from manylora.config import environment
from manylora.errors import ConfigError, ManyloraError
from manylora.registry.access.keys import keyed_digest
from manylora.server.cluster.launch.children import Child
from manylora.server.cluster.launch.scaling import BUSY, DOWN_AFTER_S, WAIT, desired_replicas
from manylora.server.cluster.launch.up import METRICS_PORT, SECRETS, SLACK_S
from manylora.server.cluster.wire import CLUSTER, SHARED, STATE_PATH, Report
from manylora.server.settings import load_config

APP = "manylora"
HEALTH_S = 2.0
"""Seconds between two looks at whether a replica lives."""
ANSWER_S = 10.0
OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray takes: nothing is stored there."""


class ManyloraReplica:
    """A replica on this node, in a process of its own.

    Args:
        settings: Variables of the replica's environment beside this node's own.
        host: Address to bind; this node's when None.
    """

    _child: Child | None = None

    def __init__(self, settings: Mapping[str, str], host: str | None) -> None:
        environ = {**environment(), **settings, METRICS_PORT: "null"}
        for name in SECRETS:
            if name not in environ:
                raise ConfigError(
                    f"{name} is not in the environment of this Ray node; all servers share its value."
                )
        self._config = load_config({}, environ)
        folder, lock = _free_folder(self._config.server.data_dir)
        place = (
            "--host",
            host or ray.util.get_node_ip_address(),
            "--port",
            "0",
            "--data-dir",
            str(folder),
        )
        self._child = Child(
            "replica", ("serve", "--role", "replica", *place), environ, held=(lock,)
        )
        os.close(lock)
        self._http = httpx.AsyncClient(
            base_url=self._child.wait_ready(), trust_env=False, timeout=ANSWER_S
        )
        self._token = keyed_digest(environ["MANYLORA_PEPPER"].encode(), SHARED)

    async def check_health(self) -> None:
        """Return if the replica lives and answers: it restarts its engine itself. Called by Ray."""
        if self._child is None or self._child.poll() is not None:
            os._exit(1)  # Ray starts another at once, not after some failed checks
        await self._http.get("/ready")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the autoscaling policy reads. Called by Ray."""
        async with self._http.stream("GET", STATE_PATH, headers={CLUSTER: self._token}) as answer:
            line = await anext(answer.aiter_lines())
        report = msgspec.json.decode(line, type=Report)
        return {WAIT: report.backlog_s, BUSY: report.running / self._config.scheduler.max_running}

    def __del__(self) -> None:
        """Drain the replica. Called by Ray before it ends this process."""
        if self._child is not None:
            self._child.end(self._config.server.drain_s + SLACK_S / 2)


def app(plan: dict[str, Any]) -> Any:  # noqa: ANN401 - an Application of Ray Serve, which has no types here
    """The Serve application.

    Args:
        plan: `replicas` (1); `max_replicas`, where Ray is to scale; `cpus` and `gpus` that Ray reserves for a replica
            (`model.threads` or 1, and 0); `settings`, variables beside those of the nodes' environment; `host` to bind.
    """
    settings = plan.get("settings") or {}
    config = load_config({}, {**environment(), **settings})
    replicas, gpus = plan.get("replicas") or 1, plan.get("gpus") or 0
    cpus = plan.get("cpus") or config.model.threads or 1
    scaled = {
        "min_replicas": replicas,
        "max_replicas": max(replicas, plan.get("max_replicas") or 0),
        "policy": {"policy_function": f"{desired_replicas.__module__}:{desired_replicas.__name__}"},
        "look_back_period_s": 11,
        "upscale_delay_s": 0,
        "downscale_delay_s": DOWN_AFTER_S,
    }
    deployment = serve.deployment(
        ManyloraReplica,
        autoscaling_config=scaled,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        placement_group_bundles=[{"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}],
        max_ongoing_requests=10_000,
        health_check_period_s=HEALTH_S,
        graceful_shutdown_timeout_s=config.server.drain_s + SLACK_S / 2,
    )
    return deployment.bind(settings, plan.get("host"))


def keep(plan: dict[str, Any], announce: Callable[[str], object]) -> None:
    """Have Ray keep replicas with the settings of this process's environment, until a signal ends that.

    Raises:
        ManyloraError: Ray cannot be reached, or a replica does not start.
    """
    own = {name: value for name, value in environment().items() if name.startswith("MANYLORA_")}
    settings = {name: own[name] for name in own.keys() - SECRETS}
    local = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    address, host = plan["address"], None if plan["address"] else "127.0.0.1"
    try:
        ray.init(address or "local", logging_level="warning", **({} if address else local))
        serve.start(proxy_location="Disabled")
        serve.run(app({**plan, "settings": settings, "host": host}), name=APP, route_prefix=None)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
        raise ManyloraError(f"Ray does not run the replicas: {error}") from error
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os._exit(1) if asked.is_set() else asked.set())
    announce(f"manylora: replicas run on {ray.get_runtime_context().gcs_address}")
    asked.wait()
    serve.delete(APP)  # without Ray's head it never ends, nor hears a signal
    serve.shutdown()
    ray.shutdown()


def _free_folder(data_dir: Path) -> tuple[Path, int]:
    """A folder for a replica on this node that no other has, and its lock: with it come the name and the journal."""
    numbers = itertools.count()
    while True:
        folder = data_dir / f"replica-{next(numbers)}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "in-use", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return folder, lock
