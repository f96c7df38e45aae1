"""Uploads in progress in this process: no two requests make the same change, and no tenant sends too much at once.

A crash loses all of it, and nothing of it is needed after one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from manylora.errors import BusyError, RateLimitError
from manylora.registry.records import CONFIG_FILE, WEIGHTS_FILE

FILES = (CONFIG_FILE, WEIGHTS_FILE)
STREAMS = 2
"""Files that a tenant may send at once."""
RETRY_S = 2.0
"""Retry-After in seconds of what is refused."""


class UploadsInProgress:
    """Uploads and retries that are under way. Thread: the event loop's."""

    def __init__(self) -> None:
        self.streams: Counter[str] = Counter()
        """Files that are coming, by tenant."""
        self.reserved: Counter[str] = Counter()
        """Bytes that are coming in uploads of one request, by tenant."""
        self._taken: set[tuple[str, str, str]] = set()

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

    def is_writing(self, upload_id: str) -> bool:
        """Return true if a request writes a file of the upload."""
        return not self._taken.isdisjoint(("file", upload_id, file) for file in FILES)

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
