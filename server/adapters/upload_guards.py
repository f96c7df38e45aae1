"""What this process is taking in right now, so that two requests do not do the same thing or too much at once.

A crash leaves nothing of it, and needs nothing of it. Thread: the event loop's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from weakref import WeakValueDictionary

from weft.errors import BusyError, RateLimitError
from weft.registry.records import VersionFacts
from weft.server.adapters.staged_files import FILES

STREAMS = 2
"""Files of uploads in pieces that a tenant may send at once."""
RETRY_S = 2.0


class SingleFlight:
    """A result for all who ask for it at about the same time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._facts: VersionFacts | None = None

    async def result(self, find: Callable[[], Awaitable[VersionFacts]]) -> VersionFacts:
        """What the first that had one found; errors are everyone's own."""
        async with self._lock:
            if self._facts is None:
                self._facts = await find()
            return self._facts


class Intake:
    """Who is at what."""

    def __init__(self) -> None:
        self._checks: WeakValueDictionary[Hashable, SingleFlight] = WeakValueDictionary()
        self._taken: set[Hashable] = set()
        self._streams: Counter[str] = Counter()
        self._reserved: Counter[str] = Counter()

    def retrying(self, who: str, key: str | None) -> AbstractContextManager[None]:
        """Make the change that a client knows by this key; None is no key.

        Raises:
            BusyError: It is being made; code idempotency.in_progress.
        """
        busy = BusyError(
            "A request with this Idempotency-Key is in progress; ask again in a moment.",
            retry_after_s=RETRY_S,
            code="idempotency.in_progress",
        )
        return self._taking([] if key is None else [("retry", who, key)], busy)

    def writing(self, upload_id: str, *files: str) -> AbstractContextManager[None]:
        """Be the only one at these files of an upload.

        Raises:
            BusyError: Somebody is; code upload.busy.
        """
        busy = BusyError(
            "Another request sends this file or completes this upload; ask again in a moment.",
            retry_after_s=RETRY_S,
            code="upload.busy",
        )
        return self._taking([("file", upload_id, file) for file in files], busy)

    def is_writing(self, upload_id: str) -> bool:
        """Whether somebody is at a file of the upload."""
        return any(token in self._taken for token in (("file", upload_id, file) for file in FILES))

    def stream(self, tenant_id: str) -> AbstractContextManager[None]:
        """Take a file from the tenant.

        Raises:
            RateLimitError: Two are coming already; code upload.too_many.
        """
        if self._streams[tenant_id] >= STREAMS:
            raise RateLimitError(
                f"A tenant may send {STREAMS} files at once; wait for one to end.",
                retry_after_s=RETRY_S,
                code="upload.too_many",
            )
        return _counted(self._streams, tenant_id, 1)

    async def check_once(self, content: Hashable, check: Callable[[], Awaitable[VersionFacts]]) -> VersionFacts:
        """The facts of an upload, found once for identical ones that come at once."""
        return await self._checks.setdefault(content, SingleFlight()).result(check)

    def reserved(self, tenant_id: str) -> int:
        """Bytes that are coming from the tenant in uploads of one request."""
        return self._reserved[tenant_id]

    def reserving(self, tenant_id: str, num_bytes: int) -> AbstractContextManager[None]:
        """Count these bytes as coming."""
        return _counted(self._reserved, tenant_id, num_bytes)

    @contextmanager
    def _taking(self, tokens: list[Hashable], busy: BusyError) -> Iterator[None]:
        if not self._taken.isdisjoint(tokens):
            raise busy
        self._taken.update(tokens)
        try:
            yield
        finally:
            self._taken.difference_update(tokens)


@contextmanager
def _counted(counter: Counter[str], name: str, amount: int) -> Iterator[None]:
    counter[name] += amount
    try:
        yield
    finally:
        counter[name] -= amount
        if not counter[name]:
            del counter[name]
