"""A server for a benchmark: started, given tenants, keys and adapters, and ended with the benchmark."""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from manylora import demo
from manylora.adapters.checkpoint.folder import CONFIG
from manylora.benchmarks.http.generator import Target
from manylora.benchmarks.report import SETTINGS, Figures, Options
from manylora.client import Client
from manylora.client.checkpoint import checkpoint_bytes
from manylora.config import environment
from manylora.errors import ConfigError, ManyloraError
from manylora.launch.server_process import PROGRAM, running_server
from manylora.server.auth.admin_key import admin_key

BASE_NAME = "base"
MIB = 1 << 20
TENANT = "benchmark"
READY_WITHIN_S = 600.0
"""Longest wait for a server to start; a large model takes long, and one from a hub is downloaded first."""
UNLIMITED = dict.fromkeys(
    ("requests_per_minute", "tokens_per_minute", "concurrent_requests", "tokens_per_month")
)
"""Limits of the tenants of benchmarks: none, unlike the defaults of new tenants."""
DEMO: Options = {
    "model": (demo.MODEL, "folder of the base; the demo model by default", Path),
    "adapters": (demo.ADAPTERS, "folder of folders of its adapters", Path),
    **SETTINGS,
    "seed": (0, "", int),
}
"""Options of benchmarks that serve the demo model by default."""
_UPLOADS = 4
_IDLE_WITHIN_S = 120.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class OwnServer:
    """A running server, and a client with its admin key."""

    admin: Client
    ready: Figures
    """The model and the memory, as the engine reported them when it was ready."""
    pid: int
    keys: dict[str, str] = field(default_factory=dict)
    """A key of each tenant."""

    def client(self, tenant: str) -> Client:
        """A client of a tenant without limits, which is made on first use."""
        if tenant not in self.keys:
            self.admin.create_tenant(tenant, UNLIMITED)
            self.keys[tenant] = str(self.admin.create_key(tenant)["key"])
        return Client(self.admin.url, self.keys[tenant])

    def target(self, tenant: str, model: str = BASE_NAME) -> Target:
        """A model of this server for a load."""
        with self.client(tenant) as client:
            return Target(
                f"{client.url}/v1", self.keys[tenant], model, int(self.ready["vocab_size"])
            )

    def adapters(self, tenant: str, folders: Path, count: int, first: int = 0) -> list[Target]:
        """Upload copies of adapters that differ in their last weights, several at a time.

        Args:
            tenant: Their owner.
            folders: Folder of the folders of adapters, which are copied in turn.
            count: Copies in all.
            first: Number of the first copy; copies of one number are the same adapter.
        """
        originals = [
            (folder.name, *checkpoint_bytes(folder, None)) for folder in sorted(folders.iterdir())
        ]
        target = self.target(tenant)

        def one(number: int) -> Target:
            name, config, weights = originals[number % len(originals)]
            own = f"{name}-{number}"
            files = {"config": config, "weights": variant(weights, number)}
            client.request("POST", "/v1/adapters", data={"name": own}, files=files)
            return replace(target, model=own)

        with self.client(tenant) as client, ThreadPoolExecutor(_UPLOADS) as threads:
            return list(threads.map(one, range(first, first + count)))

    def usage(self, *, has_children: bool = False) -> dict[str, float]:
        """CPU seconds, MiB and open files of its own process, or of those below it as well."""
        top = psutil.Process(self.pid)
        found: dict[str, float] = {"cpu_s": 0.0, "rss_mib": 0.0, "open_files": 0}
        for process in [top, *(top.children(recursive=True) if has_children else [])]:
            with contextlib.suppress(psutil.NoSuchProcess):  # a child that has just ended
                times = process.cpu_times()
                found["cpu_s"] += times.user + times.system
                found["rss_mib"] += process.memory_info().rss / MIB
                found["open_files"] += process.num_fds()
        return found

    def wait_idle(self) -> None:
        """Return once no request runs or waits.

        Raises:
            ManyloraError: Some still do after a long time.
        """
        deadline = time.monotonic() + _IDLE_WITHIN_S
        while num_left := sum(engine["running"] + engine["waiting"] for engine in self.engines()):
            if time.monotonic() > deadline:
                left = f"{num_left} requests run or wait"
                raise ManyloraError(
                    f"The engine was not idle {_IDLE_WITHIN_S:.0f} s after its last client left: {left}."
                )
            time.sleep(_POLL_S)

    def engines(self) -> list[Figures]:
        """The status of each engine."""
        servers = self.admin.servers()
        if servers is None:
            return [self.admin.engine()]
        replicas = [server for server in servers["data"] if server["role"] == "replica"]
        return [self.admin.engine(replica["name"]) for replica in replicas]


@contextlib.contextmanager
def plain_server(
    model: str | Path,
    settings: Sequence[str],
    folder: Path | None = None,
    program: str = PROGRAM,
    cores: Sequence[int] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[OwnServer]:
    """Serve a model until the block is left.

    Args:
        model: Folder or hub id of the base.
        settings: As of `manylora serve --set`, for example `memory.gib=1`. Those of the environment do not count: a
            benchmark must not reach the registry of a real server.
        folder: Of its data, which stays; None is a new one that goes with the server.
        program: The module that is run.
        cores: It runs on these; on all if empty.
        variables: More of its environment.

    Raises:
        ManyloraError: The server does not start.
    """
    plain = {
        name: value for name, value in environment().items() if not name.startswith("MANYLORA_")
    } | dict(variables or {})
    own = [f"--set={setting}" for setting in settings]
    options = ["--model", str(model), "--served-model-name", BASE_NAME, *own]
    with tempfile.TemporaryDirectory(prefix="manylora-") as own_folder:
        data_dir = folder or Path(own_folder)
        with running_server(data_dir, options, plain, program=program, cores=cores) as server:
            url = server.wait_ready(READY_WITHIN_S)
            with Client(url, admin_key(data_dir, plain).secret) as admin:
                yield OwnServer(admin, admin.engine()["ready"], server.pid)


@contextlib.contextmanager
def cluster(
    model: str | Path,
    settings: Sequence[str],
    num_replicas: int,
    program: str = PROGRAM,
    *,
    divides_cores: bool = False,
) -> Iterator[tuple[list[OwnServer], list[OwnServer]]]:
    """Serve a model from replicas and two gateways over one registry until the block is left.

    Args:
        model: As of `plain_server`.
        settings: Of the replicas.
        num_replicas: How many there are.
        program: The module that is run for each replica.
        divides_cores: Whether each replica has its own part of the cores, as it has on a machine of its own.

    Returns:
        The replicas, and the gateways.
    """
    shared = {"MANYLORA_ADMIN_KEY": secrets.token_hex(20), "MANYLORA_PEPPER": secrets.token_hex(20)}
    all_cores = sorted(os.sched_getaffinity(0)) if divides_cores else []
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="manylora-")))
        stores = [
            f"registry.database_url=sqlite:///{root}/registry.sqlite",
            f"registry.blob_url={root}/blobs",
        ]

        def start(name: str, own: Sequence[str], program: str, cores: Sequence[int]) -> OwnServer:
            opened = plain_server(model, [*stores, *own], root / name, program, cores, shared)
            return stack.enter_context(opened)

        replicas = [
            start(
                f"replica{number}",
                ["server.role=replica", *settings],
                program,
                all_cores[number::num_replicas],
            )
            for number in range(num_replicas)
        ]
        yield (
            replicas,
            [start(f"gateway{number}", ["server.role=gateway"], PROGRAM, ()) for number in (0, 1)],
        )


@contextlib.contextmanager
def own_server(
    model: str, adapters: Sequence[Path], settings: Sequence[str]
) -> Iterator[list[Target]]:
    """Serve a model with adapters until the block is left; the base is the first target.

    Args:
        model: As of `plain_server`, like the others.
        adapters: Folders as PEFT writes them; each is named after its folder.
        settings: As of `manylora serve --set`.

    Raises:
        ConfigError: A folder has no adapter, or two have one name.
        ManyloraError: The server does not start, or refuses an adapter; the message is its own.
    """
    names = [BASE_NAME, *(folder.resolve().name.lower() for folder in adapters)]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"adapters are named after their folders, which must differ: got {', '.join(names[1:])}"
        )
    for folder in adapters:
        if not (folder / CONFIG).is_file():
            raise ConfigError(f"{folder} is no folder of an adapter: it has no {CONFIG}")
    with plain_server(model, settings) as server, server.client(TENANT) as client:
        for name, folder in zip(names[1:], adapters, strict=True):
            client.push(folder, name)
        yield [server.target(TENANT, name) for name in names]


def variant(weights: bytes, number: int) -> bytes:
    """A copy of an adapter's weights with other last ones, which are finite in every dtype: mantissas differ."""
    return weights[:-4] + struct.pack("<HH", 0x3C00 | number >> 7, 0x3C00 | number & 127)
