"""A gateway's connections to replicas: which there are, by the registry; and what each reports, over a stream.

A replica counts as ready while its stream is open and says so. When the stream breaks, or says nothing for some
seconds, the replica is lost, and the requests that it was computing for this gateway are cut. A replica that has
drained ends its stream: it has sent all its answers, and those that are still on their way go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import aiohttp
import msgspec
import structlog

from manylora.registry.servers import Server, Servers
from manylora.server.cluster.router import Router
from manylora.server.cluster.wire import CLUSTER, SILENT_S, STATE_PATH, Report
from manylora.server.http.wire import MAX_HEAD_BYTES
from manylora.server.process.threads import cancel_all, repeat

log = structlog.get_logger("manylora.server")
LIST_S = 1.0
"""Seconds between two looks at the registry's list."""
RECONNECT_S = 0.25
CONNECT_S = 2.0
MAX_LINE = 16 << 20
"""A replica whose report has a line of more bytes is lost."""
TICKS = 10
"""Parts of the time after which a silent replica is lost. They are counted one by one: a gateway that stood still for a
while finds its timers due before it has read what replicas said meanwhile, and that is one part."""
TROUBLE_S = 60.0
"""Seconds between two lines of the log about a replica that is not reached."""
_decode = msgspec.json.Decoder(Report).decode


class _RefusedError(ConnectionError):
    """A server does not take this one for a gateway."""


class Links:
    """All replicas, kept in `router`. Thread: the event loop's."""

    def __init__(self, servers: Servers, router: Router, token: str) -> None:
        self.reports: dict[str, Report] = {}
        """The newest of each replica that is connected; of adapters it has the changes."""
        self._servers = servers
        self.router = router
        self.token = token
        """Shows replicas that a gateway asks."""
        self._followed: dict[str, tuple[Server, asyncio.Task[None]]] = {}
        """By name: its row, and what reads its reports."""
        self._cuts: dict[str, set[Callable[[], None]]] = {}
        self._lister: asyncio.Task[None] | None = None
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            max_field_size=MAX_HEAD_BYTES,  # an answer may repeat what the request's headers said
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def start(self) -> None:
        """Read the list, and follow it from then on; raises CapacityError if the database cannot answer."""
        await self._look()
        self._lister = asyncio.create_task(
            repeat(self._look, LIST_S, "servers_not_listed"), name="manylora-replicas"
        )

    async def close(self) -> None:
        """End all connections."""
        readers = [reader for _, reader in self._followed.values()]
        await cancel_all([*readers, *([self._lister] if self._lister else [])])
        await self.session.close()

    @property
    def listed(self) -> list[Server]:
        """The replicas that the registry lists, and those that are connected all the same."""
        return [server for server, _ in self._followed.values()]

    @property
    def base_names(self) -> list[str]:
        """Names of the base, the one that clients call it by first."""
        served = [server.model for server in self.listed if server.model]
        reported = [name for report in self.reports.values() for name in report.base_names]
        return list(dict.fromkeys([*served, *reported]))

    @contextmanager
    def using(self, name: str, cut: Callable[[], None]) -> Iterator[None]:
        """Call `cut` if the replica is lost during the block."""
        self._cuts.setdefault(name, set()).add(cut)
        try:
            yield
        finally:
            self._cuts[name].discard(cut)

    async def _look(self) -> None:
        """Connect to the replicas that are new, and let those go that are not listed and not connected any more."""
        newest = {server.name: server for server in await self._servers.listed("replica")}
        for name, (server, reader) in list(self._followed.items()):
            found = newest.get(name)
            is_same = found is not None and (found.boot_id, found.url) == (
                server.boot_id,
                server.url,
            )
            if not is_same and (found is not None or name not in self.reports):
                reader.cancel()
                del self._followed[name]
                self._lose(name)
        for name, server in newest.items():
            if name in self._followed:
                reader = self._followed[name][1]
            else:
                reader = asyncio.create_task(self._keep_reading(server), name=f"manylora-{name}")
            self._followed[name] = server, reader
        self._tell_router()

    def _tell_router(self) -> None:
        ready = {name for name, report in self.reports.items() if report.state == "ready"}
        self.router.set_replicas(
            replace(server, state="ready" if server.name in ready else "draining")
            for server in self.listed
        )

    async def _keep_reading(self, server: Server) -> None:
        now_s = asyncio.get_running_loop().time
        told_s = float("-inf")
        while True:
            has_drained = False
            try:
                await self._read(server)
                has_drained = (
                    server.name in self.reports and self.reports[server.name].state == "draining"
                )
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                if server.name in self.reports or now_s() - told_s >= TROUBLE_S:
                    told_s = now_s()
                    event = "replica_not_reached"
                    hint = "Let its server.advertised_url be an address for gateways."
                    if isinstance(error, _RefusedError):
                        event = "replica_refuses"
                        hint = "Give all servers one MANYLORA_PEPPER and one version."
                    elif server.name in self.reports:
                        event = "replica_lost"
                        hint = "Look whether it runs; it is asked again when it reports."
                    log.warning(
                        event, name=server.name, url=server.url, error=repr(error), hint=hint
                    )
            if has_drained:
                told_s = now_s()
            self._lose(server.name, cuts=not has_drained)
            await asyncio.sleep(RECONNECT_S)

    async def _read(self, server: Server) -> None:
        tiers: dict[str, str] = {}
        async with asyncio.timeout(SILENT_S):
            answer = await self.session.get(
                server.url + STATE_PATH, headers={CLUSTER: self.token}, allow_redirects=False
            )
        async with answer:
            if answer.status != 200:
                await asyncio.sleep(LIST_S)
                raise _RefusedError(f"HTTP {answer.status}")
            rest = b""
            num_silent = 0
            while not answer.content.at_eof():
                try:
                    async with asyncio.timeout(SILENT_S / TICKS):
                        data = await answer.content.readany()
                except TimeoutError:
                    num_silent += 1
                    if num_silent == TICKS:
                        raise
                    continue
                num_silent = 0
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > MAX_LINE:
                    raise msgspec.DecodeError("a line without an end")
                for line in lines:
                    self._take(server, _decode(line), tiers)

    def _take(self, server: Server, report: Report, tiers: dict[str, str]) -> None:
        if report.boot_id != server.boot_id:
            raise msgspec.DecodeError("another server answers at this address")
        for digest, tier in report.tiers.items():
            if tier is None:
                tiers.pop(digest, None)
            else:
                tiers[digest] = tier
        before = self.reports.get(server.name)
        self.reports[server.name] = report
        if before is None or before.state != report.state:
            self._tell_router()
        self.router.report(
            server.name, server.boot_id, backlog_s=report.backlog_s, rate=report.rate, tiers=tiers
        )

    def _lose(self, name: str, *, cuts: bool = True) -> None:
        if self.reports.pop(name, None) is not None:
            self._tell_router()
            for cut in list(self._cuts.get(name, ())) if cuts else ():
                cut()
