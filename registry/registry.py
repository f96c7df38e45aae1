"""The registry: one object per subject, over one database. The server opens it once.

It knows blobs by their digest only: after a delete the caller removes the blobs that nothing refers to any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import select

from manylora.data_folder import prepare_folder, read_pepper
from manylora.registry import audit
from manylora.registry.access.keys import KeyRing, Keys
from manylora.registry.access.sessions import Sessions
from manylora.registry.access.tenants import Tenants
from manylora.registry.adapters import Adapters
from manylora.registry.batches import Batches, Files
from manylora.registry.cache import Changes, ReadThroughCache
from manylora.registry.db.clock import Clock, utc_now
from manylora.registry.db.database import Database
from manylora.registry.db.models import AuditRow, KeyRow
from manylora.registry.grants import Grants
from manylora.registry.limits import Limits
from manylora.registry.names import check_text
from manylora.registry.records import Resolution
from manylora.registry.removal import EphemeralVersions
from manylora.registry.servers import Servers
from manylora.registry.uploads import Uploads
from manylora.registry.usage.journal import Journal
from manylora.registry.usage.ledger import UsageLedger
from manylora.registry.usage.prices import PriceTable


class Registry:
    """Tenants, keys, adapters and usage.

    Thread: the event loop that opened it. All methods raise `CapacityError` (code db.unavailable or storage.full) when
    the database cannot answer, and `InvalidRequestError` for texts that cannot be stored. `actor` is written into the
    audit log: the id of a key, or `admin`.
    """

    def __init__(
        self,
        database: Database,
        ledger: UsageLedger,
        pepper: bytes,
        admin_key: str | None,
        clock: Clock,
        monotonic: Callable[[], float],
    ) -> None:
        changes = Changes(lambda: audit.last_entry(database), monotonic)
        resolved: ReadThroughCache[tuple[str, str], Resolution] = ReadThroughCache(
            monotonic, changes
        )
        tenant_limits: ReadThroughCache[str, Limits] = ReadThroughCache(monotonic, changes)
        self.key_ring = KeyRing(database, pepper, admin_key, clock, monotonic, changes)
        self.tenants = Tenants(database, clock, self.key_ring, tenant_limits, resolved)
        self.keys = Keys(database, clock, self.key_ring)
        self.sessions = Sessions(database, clock, self.key_ring)
        self.adapters = Adapters(database, clock, resolved)
        self.ephemeral = EphemeralVersions(database, clock, resolved)
        self.grants = Grants(database, clock, resolved)
        self.usage = ledger
        self.prices: PriceTable | None = None
        """Prices of tokens; None shows no cost."""
        self.uploads = Uploads(database, clock)
        self.files = Files(database, clock)
        self.batches = Batches(database, clock)
        self.servers = Servers(database)
        self.database = database
        self._answers: ReadThroughCache[str, object] = ReadThroughCache(monotonic)

    @classmethod
    async def open(
        cls,
        database_url: str | None,
        data_dir: Path,
        admin_key: str | None = None,
        *,
        pepper: str | None = None,
        grace_s: float = 0.0,
        clock: Clock = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> Registry:
        """Open the database, bring its schema up to date, and replay the usage journal.

        Args:
            database_url: SQLAlchemy URL; None takes SQLite in `data_dir`.
            data_dir: Folder of database, pepper and journal; made (mode 0700) when missing. One process at a time.
            admin_key: The admin's secret; None: no key is the admin's.
            pepper: Secret with which keys are digested; None takes `data_dir`/pepper, made at first use.
            grace_s: Seconds in which another server may say what a request got that this one was killed under.
            clock: Gives the present moment.
            monotonic: Seconds that never jump, for the ages of answers and of usage in the journal.

        Raises:
            ConfigError: The URL is not understood, the folder cannot be written, another process has it, a newer
                Manylora wrote the database, or the pepper of its keys is missing.
        """
        await asyncio.to_thread(prepare_folder, data_dir)
        database = await Database.open(database_url, data_dir)

        try:
            has_keys = bool(
                await database.rows(select(KeyRow.id).where(KeyRow.revoked_at.is_(None)).limit(1))
            )
            secret = await asyncio.to_thread(read_pepper, data_dir, pepper, has_keys=has_keys)
            ledger = UsageLedger(
                database, await Journal.open(data_dir / "usage"), clock=clock, monotonic=monotonic
            )
            await ledger.start(grace_s)
        except BaseException:
            await database.close()
            raise
        return cls(database, ledger, secret, admin_key, clock, monotonic)

    async def close(self) -> None:
        """Move the journal to the database as far as it goes, and close everything."""
        try:
            await self.usage.close()
        finally:
            await self.database.close()

    async def check(self) -> None:
        """Return if requests can be served to their end.

        The database may have been away for a minute: known keys are served for as long without it.

        Raises:
            CapacityError: They cannot; code db.unavailable, db.lost, storage.full or storage.unavailable.
        """
        self.usage.check()
        await self._answers.ask("answers", self.database.check)

    async def last_change(self) -> int:
        """Number of the last change by any server."""
        return await audit.last_entry(self.database)

    async def list_audit(
        self, before: int | None = None, limit: int = 100, tenant: str | None = None
    ) -> tuple[AuditRow, ...]:
        """Changes of all tenants or of one, newest first; `before` is the id of the last entry seen."""
        entries = select(AuditRow).order_by(AuditRow.id.desc()).limit(limit)
        if before is not None:
            entries = entries.where(AuditRow.id < before)
        if tenant is not None:
            entries = entries.where(AuditRow.tenant == check_text(tenant, "tenant", 512))
        return tuple(entry for (entry,) in await self.database.rows(entries))
