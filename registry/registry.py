"""The registry: what exists, who may use it, and who did.

Opened once by the server. Each subject is an object of its own; each of its methods is one transaction. Knows blobs by
digest only: the caller deletes the files that a delete leaves without a reference.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from weft.registry import audit
from weft.registry.adapters import Adapters
from weft.registry.batches import Batches, Files
from weft.registry.cache import Changes, ReadThroughCache
from weft.registry.db.clock import Clock, utc_now
from weft.registry.db.database import Database
from weft.registry.keys import KeyRing, Keys, read_pepper
from weft.registry.records import AuditEntry
from weft.registry.sessions import Sessions
from weft.registry.tenants import Tenants
from weft.registry.transactions import Shared
from weft.registry.uploads import Uploads
from weft.registry.usage.journal import Journal
from weft.registry.usage.ledger import UsageLedger


class Registry:
    """Tenants, keys, adapters and usage over one database.

    Thread: the event loop that opened it. All methods raise `CapacityError` (code db.unavailable or
    storage.full) when the database cannot answer; names and texts that cannot be stored raise
    `InvalidRequestError`. `actor` is who did it, for the audit log: a key id, or `admin`.
    """

    def __init__(
        self,
        database: Database,
        ledger: UsageLedger,
        key_ring: KeyRing,
        clock: Clock,
        monotonic: Callable[[], float],
        changes: Changes,
    ) -> None:
        shared = Shared(database, key_ring, clock, monotonic, changes)
        self.tenants = Tenants(shared)
        self.keys = Keys(shared)
        self.sessions = Sessions(shared)
        self.adapters = Adapters(shared)
        self.usage = ledger
        """The usage ledger: `record`, `progress`, `flush`, `query`, `summary`."""
        self.uploads = Uploads(database, clock)
        """Uploads in pieces, and the answers to changes that are sent again."""
        self.files = Files(database, clock)
        self.batches = Batches(database, clock)
        self._database = database
        self._answers: ReadThroughCache[str, bool] = ReadThroughCache(monotonic)

    @classmethod
    async def open(
        cls,
        database_url: str | None,
        data_dir: Path,
        admin_key: str | None = None,
        *,
        pepper: str | None = None,
        clock: Clock = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> Registry:
        """Open the database, bring its schema up to date, and replay the usage journal.

        Args:
            database_url: SQLAlchemy URL; None takes SQLite in `data_dir`.
            data_dir: Folder of database, pepper and journal; made (mode 0700) when missing. One process at a time.
            admin_key: The secret that makes an admin; None means that nobody can be one by key.
            pepper: Secret that key digests are made with; None takes `data_dir`/pepper, made at first use.
            clock: Gives the present moment.
            monotonic: Seconds that never jump, for the ages of cached keys and of unmoved usage.

        Raises:
            ConfigError: The URL is not understood, another process has the folder, or a newer Weft wrote the database.
        """
        secret = await asyncio.to_thread(_prepare, data_dir, pepper)
        database = await Database.open(database_url, data_dir)

        try:
            ledger = UsageLedger(database, await Journal.open(data_dir / "usage"), clock=clock, monotonic=monotonic)
            await ledger.start()
        except BaseException:
            await database.close()
            raise
        changes = Changes(lambda: audit.last_entry(database), monotonic)
        key_ring = KeyRing(secret, admin_key, clock, monotonic, changes)
        return cls(database, ledger, key_ring, clock, monotonic, changes)

    async def close(self) -> None:
        """Move the journal to the database as far as it goes, and close everything."""
        try:
            await self.usage.close()
        finally:
            await self._database.close()

    async def check(self) -> None:
        """Return if the database answers, or did within the last minute: so long, known keys are served without it."""

        async def ask() -> bool:
            await self._database.check()
            return True

        await self._answers.ask("answers", ask)

    async def list_audit(
        self, before: int | None = None, limit: int = 100, tenant: str | None = None
    ) -> tuple[AuditEntry, ...]:
        """Changes, newest first, of all tenants or one; `before` is the id of the last one seen."""
        async with self._database.read() as session:
            return await audit.list_entries(session, before, limit, tenant)


def _prepare(data_dir: Path, pepper: str | None) -> bytes:
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    return read_pepper(data_dir, pepper)
