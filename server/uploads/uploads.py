"""Uploads that this server takes in: their checks, the files of those in pieces, and those in progress.

No two requests make the same change, and no tenant sends too much at once. A crash loses all that is in progress, and
nothing of it is needed after one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from manylora.errors import BusyError, RateLimitError
from manylora.server.process.threads import in_thread

if TYPE_CHECKING:
    from manylora.server.uploads.staged_files import StagedFiles
    from manylora.server.uploads.validation import AdapterValidator

STREAMS = 2
"""Files that a tenant may send at once."""
RETRY_S = 2.0
"""Retry-After in seconds of what is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Uploads:
    """The parts that take uploads in, and the uploads and retries that are under way. Thread: the event loop's."""

    validator: AdapterValidator
    staged: StagedFiles
    """Files of uploads in pieces, while they come."""
    streams: Counter[str] = field(default_factory=Counter, init=False)
    """Files that are coming, by tenant."""
    reserved: Counter[str] = field(default_factory=Counter, init=False)
    """Bytes that are coming in uploads of one request, by tenant."""
    _taken: set[tuple[str, str, str]] = field(default_factory=set, init=False)

    def retrying(self, caller: str, key: str | None) -> AbstractContextManager[None]:
        """Make the change that a caller knows by this key; None is no key.

        Raises:
            BusyError: It is being made; code idempotency.in_progress.
        """
        doing = "A request with this Idempotency-Key is in progress"
        return self._taking(
            [] if key is None else [("retry", caller, key)], doing, "idempotency.in_progress"
        )

    def writing(self, upload_id: str, *files: str) -> AbstractContextManager[None]:
        """Be the only one that writes these files of an upload.

        Raises:
            BusyError: Another request does; code upload.busy.
        """
        doing = "Another request sends this file or completes this upload"
        return self._taking([("file", upload_id, file) for file in files], doing, "upload.busy")

    def stream(self, tenant_id: str) -> AbstractContextManager[None]:
        """Take a file from the tenant.

        Raises:
            RateLimitError: Two are coming already; code upload.too_many.
        """
        if self.streams[tenant_id] >= STREAMS:
            message = f"A tenant may send {STREAMS} files at once; wait for one to end."
            raise RateLimitError(message, retry_after_s=RETRY_S, code="upload.too_many")
        return _counted(self.streams, tenant_id, 1)

    def reserving(self, tenant_id: str, num_bytes: int) -> AbstractContextManager[None]:
        """Count these bytes as coming."""
        return _counted(self.reserved, tenant_id, num_bytes)

    async def sweep(self, open_ids: Callable[[], Awaitable[Set[str]]]) -> int:
        """Delete the files of uploads that are gone.

        Args:
            open_ids: Reads the ids of the uploads that still take bytes.

        Returns:
            Number of uploads whose files were deleted.
        """
        # First the files, then the rows: files are made after their row.
        staged = await in_thread(self.staged.ids)
        gone = set(staged) - await open_ids()
        doomed = gone - {upload_id for _, upload_id, _ in self._taken}
        for upload_id in doomed:
            await in_thread(self.staged.delete, upload_id)
        return len(doomed)

    @contextmanager
    def _taking(self, tokens: list[tuple[str, str, str]], doing: str, code: str) -> Iterator[None]:
        if not self._taken.isdisjoint(tokens):
            raise BusyError(f"{doing}; ask again in a moment.", retry_after_s=RETRY_S, code=code)
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
