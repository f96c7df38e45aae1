"""Row of this server in the registry's list of servers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import structlog

from manylora.errors import CapacityError
from manylora.registry.servers import BEAT_S, Server, Servers
from manylora.server.cluster.wire import REPORT_S
from manylora.server.process.drain import first_of
from manylora.server.process.threads import cancel_all

log = structlog.get_logger("manylora.server")
NOTICE_S = {"replica": 4 * REPORT_S, "gateway": 3.0}
"""Seconds between saying that a server drains and refusing requests. Meanwhile gateways choose other replicas, and load
balancers, which ask for /ready less often, choose other gateways."""


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
        self._beating = asyncio.create_task(self._beat(), name="manylora-beat")

    def drain(self) -> float:
        """Say that this server takes no new requests soon; returns how many seconds others need to notice."""
        self.server = replace(self.server, state="draining")
        self._has_changed.set()
        return NOTICE_S[self.server.role]

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
            hint = "Give each server its own data folder (--data-dir), not a copy."
            log.error("server_name_taken", name=self.server.name, boot_id=before, hint=hint)
