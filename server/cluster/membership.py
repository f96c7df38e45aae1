"""This server's row in the registry's list of servers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import structlog

from weft.errors import CapacityError
from weft.registry.servers import BEAT_S, Server, Servers
from weft.server.cluster.wire import REPORT_S
from weft.server.drain import first_of
from weft.server.threads import cancel_all

log = structlog.get_logger("weft.server")
NOTICE_S = 4 * REPORT_S
"""Seconds between saying that a replica drains and refusing requests: gateways choose others meanwhile."""
GATEWAY_NOTICE_S = 3.0
"""The same for a gateway: load balancers ask for /ready less often."""


class Membership:
    """Keeps a server's row in the registry."""

    def __init__(self, servers: Servers, server: Server) -> None:
        self.server = server
        self._servers = servers
        self._beating: asyncio.Task[None] | None = None
        self._has_changed = asyncio.Event()

    async def start(self) -> None:
        """List the server; raises CapacityError if the database cannot answer."""
        await self._servers.announce(self.server)
        self._beating = asyncio.create_task(self._beat(), name="weft-beat")

    async def drain(self) -> None:
        """Say that this server takes no new requests soon, and give others the time to notice."""
        self.server = replace(self.server, state="draining")
        self._has_changed.set()
        await asyncio.sleep(GATEWAY_NOTICE_S if self.server.role == "gateway" else NOTICE_S)

    async def stop(self) -> None:
        """Take the server off the list."""
        await cancel_all([self._beating] if self._beating else [])
        try:
            await self._servers.leave(self.server)
        except CapacityError:
            log.warning("server_still_listed", name=self.server.name)  # its row ages

    async def _beat(self) -> None:
        while True:
            await first_of(BEAT_S, self._has_changed)
            self._has_changed.clear()
            await self._announce()

    async def _announce(self) -> None:
        try:
            before = await self._servers.announce(self.server)
        except CapacityError:
            log.warning("beat_failed", name=self.server.name)  # gateways keep what they know
            return
        if before not in (None, self.server.boot_id):
            hint = "Give each server an empty data folder of its own (--data-dir), not a copy of another one's."
            log.error("another_server_has_this_name", name=self.server.name, boot_id=before, hint=hint)
