"""Starts a cluster from this machine: a gateway and replicas as child processes, or with Ray to keep the replicas."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import httpx

from manylora.config import Config, environment, usable_cores
from manylora.data_folder import kept_secret, prepare_folder
from manylora.engine.execution.memory_plan import check_start, count_cuda_devices
from manylora.errors import ConfigError
from manylora.launch.server_process import HOST, ServerProcess
from manylora.registry.db.database import Database
from manylora.server.auth.admin_key import VARIABLE, admin_key, given_pepper
from manylora.server.http.listen import bind, url_of
from manylora.server.process.threads import cancel_all
from manylora.server.settings import environment_name

Announce = Callable[[str], object]
Starts = Mapping[str, Callable[[], ServerProcess]]
DATABASE_URL = environment_name("registry.database_url")
METRICS_PORT = environment_name("server.metrics_port")
SECRETS = (VARIABLE, "MANYLORA_PEPPER", DATABASE_URL)
"""Variables that all servers of a cluster have, and that never travel through Ray."""
FIRST_DELAY_S = 0.5
"""Seconds until a server that died is started again; they double with each death."""
LONGEST_DELAY_S = 30.0
STEADY_S = 60.0
"""The delay is the first one again for a server that lived longer than this."""
LOOK_S = 5.0
"""Seconds between two looks at whether a server answers, and longest wait for its answer."""
SILENT_LOOKS = 6
"""A server that fails this number of looks in a row was stopped or hangs; it is killed and started again."""
SLACK_S = 60.0
"""Seconds above `server.drain_s` after which a server that does not end is killed."""
RAY_DEFAULTS = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",  # without its head, Ray would end the replicas after a minute
}


def up(config: Config, replicas: int, plan: dict[str, object] | None, announce: Announce) -> None:
    """Run a gateway and replicas until a signal ends them: first the gateway is drained, then the replicas.

    Args:
        config: All settings; the address is the gateway's.
        replicas: How many to start.
        plan: For Ray: `address` of a running cluster, or None to start one here, and `max_replicas`.
        announce: Takes lines.

    Raises:
        ConfigError: A setting is wrong, the port is taken, or a package is missing.
        ManyloraError: A server ended while it started.
    """
    needed = {"aiohttp": "cluster", "ray": "ray"} if plan else {"aiohttp": "cluster"}
    for package, extra in needed.items():
        if find_spec(package) is None:
            raise ConfigError(f"This needs {package}: pip install 'manylora[{extra}]'.")
    check_start(config)
    with bind(config.server.host, config.server.port) as probe:
        url = url_of(config.server.host, probe)
    data_dir = config.server.data_dir.absolute()
    prepare_folder(data_dir)
    shared = _shared_environment(config, data_dir, replicas, announce)
    asyncio.run(_upgrade(shared[DATABASE_URL], data_dir))

    def server(
        name: str, role: str, *place: str, cores: Sequence[int] = (), **own: str
    ) -> Callable[[], ServerProcess]:
        arguments = ("serve", "--role", role, "--data-dir", str(data_dir / name), *place)
        return partial(ServerProcess, name, arguments, shared | own, cores=cores)

    gpus = 0 if config.model.device == "cpu" else count_cuda_devices()
    computing: dict[str, Callable[[], ServerProcess]] = {}
    if plan is not None:
        has_gpus = gpus > 0 or config.model.device == "cuda"
        words = json.dumps({**plan, "replicas": replicas, "gpus": int(has_gpus)})
        environ = _ray_environment(plan, data_dir) | shared
        computing["ray"] = partial(ServerProcess, "ray", ("cluster", "ray", words), environ)
    else:
        given = environment().get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
        visible = given.split(",")
        for number in range(replicas):
            name = f"replica-{number}"
            own = {METRICS_PORT: "null", "CUDA_VISIBLE_DEVICES": visible[number % len(visible)]}
            cores = () if gpus or config.model.threads else own_cores(number, replicas)
            computing[name] = server(
                name, "replica", "--host", HOST, "--port", "0", cores=cores, **own
            )
    gateway = {"gateway": server("gateway", "gateway", "--port", url.rpartition(":")[2])}
    asyncio.run(_run((gateway, computing), config.server.drain_s, announce, url))


async def _run(groups: Sequence[Starts], drain_s: float, announce: Announce, url: str) -> None:
    """Start all servers, start those again that die, and at a signal end group after group."""
    asked = asyncio.Event()
    hurried = asyncio.Event()
    loop = asyncio.get_running_loop()
    starts = {name: start for group in groups for name, start in group.items()}
    loop.set_default_executor(ThreadPoolExecutor(3 * len(starts)))
    running = {name: start() for name, start in starts.items()}

    def ask() -> None:
        for server in running.values() if asked.is_set() else ():
            # The second signal cuts what runs, and the third waits for nothing.
            (server.kill if hurried.is_set() else server.terminate)()
        (hurried if asked.is_set() else asked).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ask)
    asking = asyncio.create_task(asked.wait())
    starting = asyncio.gather(
        *(asyncio.to_thread(server.wait_listening) for server in running.values())
    )
    keeping: list[asyncio.Task[None]] = []
    try:
        await asyncio.wait((asking, starting), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            keeping += [
                asyncio.create_task(_keep(name, starts[name], running, announce)) for name in starts
            ]
            keeping.append(asyncio.create_task(_announce_ready(url, announce)))
            await asking
    finally:
        await cancel_all(keeping)
        for group in groups:
            await asyncio.gather(
                *(asyncio.to_thread(running[name].stop, drain_s + SLACK_S) for name in group)
            )
        await asyncio.gather(starting, return_exceptions=True)  # of a start that a signal ended


async def _announce_ready(url: str, announce: Announce) -> None:
    """Say that the gateway listens once it has a replica: what clients ask before is refused."""
    async with httpx.AsyncClient(trust_env=False) as client:
        is_ready = False
        while not is_ready:
            with suppress(httpx.TransportError):
                is_ready = (await client.get(f"{url}/ready")).is_success
            await asyncio.sleep(0.05)
    announce(f"manylora: listening on {url}")


async def _keep(
    name: str,
    start: Callable[[], ServerProcess],
    running: dict[str, ServerProcess],
    announce: Announce,
) -> None:
    delay_s = FIRST_DELAY_S
    started_s = time.monotonic()
    while True:
        watching = asyncio.create_task(_kill_if_silent(name, running[name], announce))
        status = await asyncio.to_thread(running[name].wait)
        await cancel_all([watching])
        delay_s = FIRST_DELAY_S if time.monotonic() - started_s > STEADY_S else delay_s
        announce(f"manylora: {name} ended with status {status} and starts again in {delay_s:g} s")
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, LONGEST_DELAY_S)
        started_s = time.monotonic()
        running[name] = start()


async def _kill_if_silent(name: str, server: ServerProcess, announce: Announce) -> None:
    """Ask a server for its health until it does not answer for a while. Ray is not asked: it has no HTTP."""
    url = await asyncio.to_thread(server.wait_listening)
    num_silent = 0
    if not url.startswith("http"):
        return
    async with httpx.AsyncClient(trust_env=False, timeout=LOOK_S) as client:
        while num_silent < SILENT_LOOKS:
            await asyncio.sleep(LOOK_S)
            num_silent += 1
            with suppress(httpx.TransportError):
                await client.get(f"{url}/health")
                num_silent = 0
    announce(f"manylora: {name} does not answer and is killed")
    server.kill()


def own_cores(number: int, replicas: int) -> Sequence[int]:
    """The part of our cores that one of the replicas computes on; empty for all of them, where there are too few.

    A step waits for its slowest thread. Where two engines share cores, threads of both are on one core now and then,
    and such a step takes twice as long. Neighbours in a part have their memory close to each other.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    start = number * len(cores) // replicas
    end = (number + 1) * len(cores) // replicas
    return cores[start:end] if len(cores) >= replicas else []


def _shared_environment(
    config: Config, data_dir: Path, replicas: int, announce: Announce
) -> dict[str, str]:
    """The environment of all servers: every setting, and the secrets, made once."""
    environ = environment()
    key = admin_key(data_dir, environ)
    pepper = given_pepper(environ)
    if pepper is None and (data_dir / "pepper").exists():
        message = f"{data_dir} is the folder of a single server, whose keys would not work; choose another --data-dir."
        raise ConfigError(message, param="server.data_dir")
    for line in key.announcement:
        announce(f"manylora: {line}")
    model = Path(config.model.path)
    in_s3 = config.registry.s3_place is not None
    own = {
        "model.path": str(model.absolute()) if model.exists() else config.model.path,
        "model.threads": config.model.threads or max(1, usable_cores() // replicas),
        "server.advertised_url": None,
        "server.data_dir": data_dir,
        "registry.database_url": config.registry.database_url
        or f"sqlite:///{data_dir / 'registry.sqlite'}",
        "registry.blob_url": config.registry.blob_url if in_s3 else str(config.blob_dir.absolute()),
    }
    given = {
        f"{part}.{name}": value
        for part, names in asdict(config).items()
        for name, value in names.items()
    }
    settings = {
        environment_name(name): "null" if value is None else str(value)
        for name, value in (given | own).items()
    }
    kept = {
        VARIABLE: key.secret,
        "MANYLORA_PEPPER": pepper
        or kept_secret(data_dir / "cluster.pepper", secrets.token_hex(32)),
    }
    return {**environ, **settings, **kept, "MANYLORA_CONFIG": ""}  # the settings are complete


def _ray_environment(plan: Mapping[str, object], data_dir: Path) -> dict[str, str]:
    """Ray's own variables for a cluster of this machine, whose token is not written to the user's home."""
    if plan["address"] is not None:
        return {}
    token = data_dir / "ray.token"
    kept_secret(token, secrets.token_hex(32))
    return {**RAY_DEFAULTS, "RAY_AUTH_TOKEN_PATH": str(token)}


async def _upgrade(url: str, data_dir: Path) -> None:
    """Bring the database's schema up to date, once for all servers; raises ConfigError if it cannot be used."""
    await (await Database.open(url, data_dir)).close()
