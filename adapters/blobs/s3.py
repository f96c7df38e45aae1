"""Blobs by SHA-256 in a bucket of S3, with copies in a local folder.

The object of a blob is `<prefix>/sha256/ab/cd/<64 hex>`. What is read comes from a copy, which is fetched on first use
and gets its name only if it has the digest; copies are hashed again on every read. Objects come and go in requests of
at most 8 MiB.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from manylora.adapters.blobs import local
from manylora.adapters.blobs.bucket import PART_BYTES, Bucket
from manylora.errors import AdapterUnavailableError

logger = logging.getLogger(__name__)

UNCLAIMED_S = 3600.0
"""Age in seconds from which an object that no version refers to may be swept: another server may be about to publish a
version of a younger one."""
FETCH_LOCKS = 64
FETCHES = 3
_OBJECT = re.compile(r"sha256/([0-9a-f]{2})/([0-9a-f]{2})/(\1\2[0-9a-f]{60})")


class S3Writer(local.BlobWriter):
    """Writes one blob to a temporary file beside the copies, until S3 has all of it."""

    def __init__(self, blobs: S3Blobs) -> None:
        super().__init__(blobs)
        self._s3 = blobs
        self._sent: str | None = None

    def prepare(self) -> None:
        """Send the bytes to S3, which confirms them; a blob that is there already is replaced."""
        self._sent = self.sha256()
        self._s3.bucket.put(_key(self._sent), self.path)

    def commit(self) -> str:
        """Make sure that S3 has the blob, and keep the file as a copy."""
        digest = self.sha256()
        # What was sent before may have been deleted meanwhile, as a blob that no version refers to.
        if self._sent != digest or self._s3.bucket.size(_key(digest)) != self.size:
            self.prepare()
        self._s3.make_room(self.size)
        return super().commit()


class S3Blobs(local.LocalBlobs):
    """A bucket of blobs, and a folder of copies.

    Several servers may share the bucket, and processes of one machine the folder.

    Args:
        bucket: Where objects lie.
        cache: Folder of copies and unfinished blobs.
        cache_bytes: Most bytes of copies; one that is larger is kept alone, until there is another.
    """

    bucket: Bucket

    def __init__(self, bucket: Bucket, *, cache: Path, cache_bytes: int) -> None:
        super().__init__(cache)
        self.bucket = bucket
        self._cache_bytes = cache_bytes
        self._fetching = [threading.Lock() for _ in range(FETCH_LOCKS)]

    def create(self) -> S3Writer:
        """Start a new blob."""
        return S3Writer(self)

    @contextlib.contextmanager
    def open(
        self, sha256: str, pause: Callable[[], None] = lambda: None
    ) -> Iterator[local.BlobReader]:
        """Open the copy of a blob. A corrupt one is removed, and the next `open` fetches it again."""
        try:
            with contextlib.ExitStack() as stack:
                yield self._open_copy(stack, sha256, pause)
        except AdapterUnavailableError as error:
            if error.code == local.CORRUPT:
                super().delete(sha256)
            raise

    def peek(self, sha256: str, num_bytes: int) -> tuple[bytes, int]:
        """Read the beginning of a blob, and its size, from the copy or else from the object; no copy is made."""
        try:
            return super().peek(sha256, num_bytes)
        except AdapterUnavailableError:
            first, size = self._get(sha256, 0, num_bytes)
            return bytes(first), size

    def delete(self, sha256: str) -> None:
        """Remove object and copy; what is not there is no error."""
        self.bucket.delete(_key(sha256))
        super().delete(sha256)

    def digests(self) -> Iterator[str]:
        """Digests of all objects that are old enough, and of copies; some come twice."""
        youngest = datetime.now(UTC) - timedelta(seconds=UNCLAIMED_S)
        young = set()
        for found in self.bucket.objects("sha256"):
            if (match := _OBJECT.fullmatch(found["path"])) is None:
                continue
            if found["last_modified"] <= youngest:
                yield match[3]
            else:
                young.add(match[3])
        yield from (sha256 for sha256 in super().digests() if sha256 not in young)

    def reach(self) -> None:
        """Return if S3 answers; raises CapacityError (storage.unavailable) where it does not."""
        self.bucket.size("probe/reach")

    def probe(self) -> None:
        """Store, read and delete a few bytes.

        Raises:
            ConfigError: S3 refuses, and why.
            CapacityError: It cannot be reached now (code storage.unavailable).
        """
        self.bucket.probe("sha256")

    def make_room(self, num_bytes: int) -> None:
        """Remove copies, those used longest ago first, until `num_bytes` more bytes may lie in the folder."""
        copies = []
        for sha256 in super().digests():
            with contextlib.suppress(FileNotFoundError):
                found = self.path(sha256).stat()
                copies.append((found.st_mtime, found.st_size, sha256))
        excess = sum(size for _, size, _ in copies) + num_bytes - self._cache_bytes
        for _, size, sha256 in sorted(copies):
            if excess <= 0:
                break
            super().delete(sha256)  # a reader that has it open can read on
            excess -= size

    def _open_copy(
        self, stack: contextlib.ExitStack, sha256: str, pause: Callable[[], None]
    ) -> local.BlobReader:
        for _ in range(FETCHES):
            try:
                blob = stack.enter_context(super().open(sha256, pause))
            except AdapterUnavailableError as error:
                if error.code == local.CORRUPT:
                    raise
                self._fetch(sha256, pause)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.utime(self.path(sha256))
                return blob
        raise self.bucket.unavailable()  # others needed the room each time, before it could be opened

    def _fetch(self, sha256: str, pause: Callable[[], None]) -> None:
        """Make a copy, unless another thread just did."""
        with self._fetching[int(sha256, 16) % FETCH_LOCKS]:
            if self.path(sha256).exists():
                return
            with super().create() as writer:
                while True:
                    part, size = self._get(sha256, writer.size, PART_BYTES)
                    for start in range(0, len(part), local.PIECE_BYTES):
                        writer.write(part[start : start + local.PIECE_BYTES])
                        pause()
                    if writer.size >= size or not part:
                        break
                if writer.sha256() != sha256:
                    logger.error("the object of blob %s in %s is corrupt", sha256, self.bucket.name)
                    raise local.corrupt(sha256)
                self.make_room(writer.size)
                writer.commit()

    def _get(self, sha256: str, start: int, num_bytes: int) -> tuple[memoryview, int]:
        """Bytes of an object, and the size of all of it."""
        try:
            return self.bucket.get(_key(sha256), start, num_bytes)
        except FileNotFoundError:
            raise local.missing(sha256) from None


def _key(sha256: str) -> str:
    return "/".join((*local.parents(sha256), sha256))
