"""Blobs by SHA-256 in a bucket of S3, with copies in a local folder.

The object of a blob is `<prefix>/sha256/ab/cd/<64 hex>`. What is read comes from a copy, which is fetched on first use
and gets its name only if it has the digest; copies are hashed again on every read. Objects come and go in requests of
at most 8 MiB, each with its own time limit. Keys, region and endpoint are obstore's business, which reads AWS_... .
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from weft.adapters.blobs import local
from weft.errors import AdapterUnavailableError, CapacityError, ConfigError

logger = logging.getLogger(__name__)

PART_BYTES = 8 << 20
"""Of an object, in one request."""
PARTS_AT_ONCE = 4
CONNECT_S = 5.0
REQUEST_S = 30.0
"""Limit of a request, and of the time after which a failed one is not tried again."""
RETRIES = 3
DOWN_S = 5.0
"""After S3 gave no answer, nothing else waits for it for as long."""
UNCLAIMED_S = 3600.0
"""Age in seconds from which an object that no version refers to may be swept: another server may be about to publish a
version of a younger one."""
FETCH_LOCKS = 64
FETCHES = 3
_OBJECT = re.compile(r"sha256/([0-9a-f]{2})/([0-9a-f]{2})/(\1\2[0-9a-f]{60})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_KIND = re.compile(r"kind: (\w{1,64})")
_METADATA_SERVICE = "/latest/api/token"


class S3Writer(local.BlobWriter):
    """Writes one blob to a temporary file beside the copies, until S3 has all of it."""

    def __init__(self, blobs: S3Blobs, cache: local.LocalBlobs) -> None:
        super().__init__(cache)
        self._s3 = blobs
        self._sent: str | None = None

    def prepare(self) -> None:
        """Send the bytes to S3, which confirms them; a blob that is there already is replaced."""
        self._s3.put(self)
        self._sent = self.sha256()

    def commit(self) -> str:
        """Make sure that S3 has the blob, and keep the file as a copy."""
        # What was sent before may have been deleted meanwhile, as a blob that no version refers to.
        if self._sent != self.sha256() or not self._s3.holds(self):
            self.prepare()
        self._s3.make_room(self.size)
        return super().commit()


class S3Blobs:
    """A `BlobStore` in a bucket. Thread-safe; several servers may share the bucket, one machine's processes the cache.

    Args:
        bucket: Its name.
        prefix: Folder in the bucket; may be empty.
        cache: Where copies and unfinished blobs lie.
        cache_bytes: Most bytes of copies; one that is larger is kept alone, until there is another.
        allow_http: Let the endpoint be one without TLS.
        request_s: Limit of each request, in seconds.
        clock: Seconds that never jump.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        cache: local.LocalBlobs,
        cache_bytes: int,
        allow_http: bool = False,
        request_s: float = REQUEST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limit = timedelta(seconds=request_s)
        try:
            self._store = S3Store(
                bucket,
                prefix=prefix or None,
                disable_bulk_delete=True,  # not every S3 has it
                client_options={
                    "allow_http": allow_http,
                    "connect_timeout": timedelta(seconds=min(CONNECT_S, request_s)),
                    "timeout": limit,
                },
                retry_config={"max_retries": RETRIES, "retry_timeout": limit},
            )
        except (BaseError, ValueError) as error:
            raise ConfigError(
                "registry.blob_url names S3, but an AWS_... variable of the environment is not understood "
                f"({type(error).__name__}).",
                param="registry.blob_url",
            ) from error
        self._name = f"s3://{bucket}/{prefix}".rstrip("/")
        self._cache = cache
        self._cache_bytes = cache_bytes
        self._clock = clock
        self._down_until = 0.0
        self._fetching = [threading.Lock() for _ in range(FETCH_LOCKS)]

    def create(self) -> local.BlobWriter:
        """Start a new blob."""
        return S3Writer(self, self._cache)

    @contextlib.contextmanager
    def open(self, sha256: str, pause: Callable[[], None] = lambda: None) -> Iterator[local.BlobReader]:
        """Open the copy of a blob. A corrupt one is removed, and the next `open` fetches it again."""
        try:
            with contextlib.ExitStack() as stack:
                yield self._open_copy(stack, sha256, pause)
        except AdapterUnavailableError as error:
            if error.code == local.CORRUPT:
                self._cache.delete(sha256)
            raise

    def peek(self, sha256: str, num_bytes: int) -> tuple[bytes, int]:
        """The first bytes and the size, of the copy or else of the object; no copy is made."""
        try:
            return self._cache.peek(sha256, num_bytes)
        except AdapterUnavailableError:
            first, size = self._get(sha256, 0, num_bytes)
            return bytes(first), size

    def delete(self, sha256: str) -> bool:
        """Remove object and copy. Returns whether there was an object."""
        key = _key(sha256)
        with self._asking():
            was_there = self._size(key) is not None
            obstore.delete(self._store, key)
        self._cache.delete(sha256)
        return was_there

    def digests(self) -> Iterator[str]:
        """Digests of all objects that are old enough, and of copies; some come twice."""
        youngest = datetime.now(UTC) - timedelta(seconds=UNCLAIMED_S)
        young = set()
        with self._asking():
            for page in obstore.list(self._store, prefix="sha256"):
                for found in page:
                    if (match := _OBJECT.fullmatch(found["path"])) is None:
                        continue
                    if found["last_modified"] <= youngest:
                        yield match[3]
                    else:
                        young.add(match[3])
        yield from (sha256 for sha256 in self._cache.digests() if sha256 not in young)

    def sweep(self, max_age_s: float) -> int:
        """Remove temporary files of crashed writers."""
        return self._cache.sweep(max_age_s)

    def reach(self) -> None:
        """Return if S3 answers; raises CapacityError (storage.unavailable) where it does not."""
        with self._asking():
            self._size("probe/reach")

    def probe(self) -> None:
        """Store, read and delete a few bytes."""
        key, content = f"probe/{secrets.token_hex(16)}", secrets.token_bytes(16)
        with self._asking(is_probe=True):
            obstore.put(self._store, key, content)
            is_same = obstore.get(self._store, key).bytes() == content
            obstore.delete(self._store, key)
            next(iter(obstore.list(self._store, prefix="sha256")), None)
        if not is_same:
            raise self._refused("it gave back other bytes than were stored")

    def put(self, writer: local.BlobWriter) -> None:
        """Store a writer's bytes, in parts if there are many. Returns once S3 confirmed all of them."""
        with self._asking():
            key = _key(writer.sha256())
            obstore.put(self._store, key, writer.path, chunk_size=PART_BYTES, max_concurrency=PARTS_AT_ONCE)

    def holds(self, writer: local.BlobWriter) -> bool:
        """Whether there is an object of the digest and size of a writer's bytes."""
        with self._asking():
            return self._size(_key(writer.sha256())) == writer.size

    def make_room(self, num_bytes: int) -> None:
        """Remove copies, those used longest ago first, until as many bytes more may lie in the cache."""
        copies = []
        for sha256 in self._cache.digests():
            with contextlib.suppress(FileNotFoundError):
                found = self._cache.path(sha256).stat()
                copies.append((found.st_mtime, found.st_size, sha256))
        excess = sum(size for _, size, _ in copies) + num_bytes - self._cache_bytes
        for _, size, sha256 in sorted(copies):
            if excess <= 0:
                break
            self._cache.delete(sha256)  # a reader that has it open can read on
            excess -= size

    def _open_copy(self, stack: contextlib.ExitStack, sha256: str, pause: Callable[[], None]) -> local.BlobReader:
        for _ in range(FETCHES):
            try:
                blob = stack.enter_context(self._cache.open(sha256, pause))
            except AdapterUnavailableError as error:
                if error.code == local.CORRUPT:
                    raise
                self._fetch(sha256, pause)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.utime(self._cache.path(sha256))
                return blob
        raise self._unavailable()  # others needed the room each time, before it could be opened

    def _fetch(self, sha256: str, pause: Callable[[], None]) -> None:
        """Make a copy, unless another thread just did."""
        with self._fetching[int(sha256, 16) % FETCH_LOCKS]:
            if self._cache.path(sha256).exists():
                return
            with self._cache.create() as writer:
                while True:
                    part, size = self._get(sha256, writer.size, PART_BYTES)
                    for start in range(0, len(part), local.PIECE_BYTES):
                        writer.write(part[start : start + local.PIECE_BYTES])
                        pause()
                    if writer.size >= size or not part:
                        break
                if writer.sha256() != sha256:
                    logger.error("the object of blob %s in %s is corrupt", sha256, self._name)
                    raise local.corrupt(sha256)
                self.make_room(writer.size)
                writer.commit()

    def _get(self, sha256: str, start: int, num_bytes: int) -> tuple[memoryview, int]:
        """Bytes of an object, and the size of all of it."""
        with self._asking(sha256):
            try:
                found = obstore.get(self._store, _key(sha256), options={"range": (start, start + num_bytes)})
                return memoryview(found.bytes()), found.meta["size"]
            except BaseError as error:
                if reason_of(error)[0] != "InvalidRange":
                    raise
                return memoryview(b""), start  # the object ends here

    def _size(self, key: str) -> int | None:
        try:
            return obstore.head(self._store, key)["size"]
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def _asking(self, sha256: str | None = None, *, is_probe: bool = False) -> Iterator[None]:
        """Turn what obstore raises into our errors. Its words stay out of them and of the log: they quote requests."""
        if not is_probe and self._clock() < self._down_until:
            raise self._unavailable()
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            reason, is_answer = reason_of(error)
            if sha256 is not None and isinstance(error, FileNotFoundError) and reason != "NoSuchBucket":
                raise local.missing(sha256) from None
            logger.warning("%s: %s", self._name, reason)
            if is_probe and is_answer:
                raise self._refused(reason) from None
            if not is_answer:
                self._down_until = self._clock() + DOWN_S
            raise self._unavailable() from None

    def _refused(self, reason: str) -> ConfigError:
        keys = "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL"
        what = f"{self._name} cannot be used ({reason}). Weft puts, gets, deletes and lists objects there"
        return ConfigError(f"{what}: check registry.blob_url and {keys}.", param="registry.blob_url")

    def _unavailable(self) -> CapacityError:
        message = "The adapter store cannot be reached; try again."
        return CapacityError(message, retry_after_s=DOWN_S, code="storage.unavailable")


def _key(sha256: str) -> str:
    return "/".join((*local.parents(sha256), sha256))


def reason_of(error: Exception) -> tuple[str, bool]:
    """What went wrong in a word or two, and whether S3 said so, which it would do again."""
    text = str(error)
    code, status, kind = (found and found[1] for found in (part.search(text) for part in (_CODE, _STATUS, _KIND)))
    if _METADATA_SERVICE in text:
        return "no AWS credentials were found", True
    if status is None:
        return f"no answer: {kind or type(error).__name__}", False
    return code or f"status {status}", not status.startswith("5")
