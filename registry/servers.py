"""The servers that share this registry: how each is reached, and in what state it is.

A server writes its row when it takes requests, when its state changes, and every `BEAT_S` seconds. Whether it lives
right now is not asked here: gateways stay connected to the replicas that they find here and see that themselves. All
times are by one clock, that of the database.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

from sqlalchemy import delete, select

from manylora.registry.db.clock import from_micros
from manylora.registry.db.database import Database, database_us
from manylora.registry.db.models import ServerRow
from manylora.registry.records import to_record

BEAT_S = 5.0
GONE = timedelta(seconds=30)
"""Time without a beat after which a server is no longer listed."""
Role = Literal["gateway", "replica"]
State = Literal["ready", "draining"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A gateway or a replica."""

    name: str
    """Id in the server's data folder, which restarts keep."""
    role: Role
    boot_id: str
    """Id of this run: another one after each start."""
    url: str
    """Address at which gateways reach it."""
    version: str
    """Version of Manylora."""
    state: State = "ready"
    model: str = ""
    """Name of the base for clients; empty for a gateway."""
    base: str = ""
    """Digest of the base's shape; empty for a gateway."""


@dataclass(eq=False)
class Servers:
    """The part of the registry that lists servers. Each method is one transaction."""

    database: Database

    async def announce(self, server: Server) -> str | None:
        """Write a server's row, or say that it still is there; returns the boot id that the row had before."""
        async with self.database.write() as session:
            now = from_micros(await database_us(session))
            before = await session.scalar(
                select(ServerRow.boot_id).where(ServerRow.name == server.name)
            )
            await session.merge(ServerRow(**asdict(server), seen_at=now))
            await session.execute(delete(ServerRow).where(ServerRow.seen_at < now - 2 * GONE))
        return before

    async def leave(self, server: Server) -> None:
        """Delete the row of a server that ends, unless it was started again meanwhile."""
        async with self.database.write() as session:
            own = (ServerRow.name == server.name, ServerRow.boot_id == server.boot_id)
            await session.execute(delete(ServerRow).where(*own))

    async def listed(self, role: Role | None = None) -> list[Server]:
        """The servers with a recent beat, by name."""
        rows = select(ServerRow).order_by(ServerRow.name)
        if role is not None:
            rows = rows.where(ServerRow.role == role)
        async with self.database.read() as session:
            since = from_micros(await database_us(session)) - GONE
            found = await session.scalars(rows.where(ServerRow.seen_at >= since))
            return [to_record(Server, row) for row in found]


def server_name(data_dir: Path) -> str:
    """Name of this server, made at the first start. Only one process at a time uses the folder."""
    path = data_dir / "server-id"
    if not path.exists():
        temporary = path.with_suffix(".new")
        temporary.write_text(f"srv_{secrets.token_hex(12)}\n")
        temporary.replace(path)
    return path.read_text().strip()
