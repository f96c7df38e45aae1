"""What the parts of the registry share: one database, and the answers of it that are kept for a moment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from sqlalchemy.ext.asyncio import AsyncSession

from weft.registry.cache import Changes, ReadThroughCache
from weft.registry.db.clock import Clock
from weft.registry.db.database import Database
from weft.registry.limits import Limits
from weft.registry.records import Resolution

if TYPE_CHECKING:
    from weft.registry.keys import KeyRing


class Invalidates(Protocol):
    """Keeps answers of the database."""

    def forget(self) -> None:
        """Something changed: no earlier answer counts any more."""


class Shared:
    """What the parts of the registry have in common.

    Args:
        database: Where everything is.
        key_ring: Tells who holds a secret, and remembers it.
        clock: Gives the present moment.
        monotonic: Seconds that never jump, for the ages of answers.
        changes: Tells since when nothing has changed.
    """

    def __init__(
        self,
        database: Database,
        key_ring: KeyRing,
        clock: Clock,
        monotonic: Callable[[], float],
        changes: Changes,
    ) -> None:
        self.database = database
        self.key_ring = key_ring
        self.clock = clock
        self.resolved: ReadThroughCache[tuple[str, str], Resolution] = ReadThroughCache(monotonic, changes)
        self.tenant_limits: ReadThroughCache[str, Limits] = ReadThroughCache(monotonic, changes)


class Transactions:
    """Base of the parts of the registry. Each of their methods is one transaction."""

    def __init__(self, shared: Shared) -> None:
        self._database = shared.database
        self._key_ring = shared.key_ring
        self._clock = shared.clock
        self._resolved = shared.resolved
        self._tenant_limits = shared.tenant_limits

    @asynccontextmanager
    async def _change(self, *touched: Invalidates) -> AsyncIterator[AsyncSession]:
        """A transaction that writes, after which the answers that it touches count no more.

        Others stay, so that an outage of the database right after a change stops nobody whom it did not concern.
        """
        has_begun = False
        try:
            async with self._database.write() as session:
                has_begun = True
                yield session
        finally:
            # Also when the caller is cancelled: the change may have been committed.
            for answers in touched if has_begun else ():
                answers.forget()
