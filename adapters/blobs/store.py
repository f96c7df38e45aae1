"""Opens the blob store that the settings name: a folder, or S3 with a folder of copies."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from weft.adapters.blobs.local import PIECE_BYTES, BlobReader, BlobWriter, LocalBlobs
from weft.config import GIB, RegistryConfig, environment
from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.adapters.blobs.bucket import Bucket

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""Variables that may name a server other than Amazon's."""


class BlobStore(Protocol):
    """Blobs by SHA-256: durable once committed, hashed on every read. Thread-safe and safe among processes.

    Methods that take a digest raise ValueError when it is not 64 lower-case hex digits, and CapacityError
    (storage.unavailable) where the blobs are behind a network that fails.
    """

    @property
    def bucket(self) -> Bucket | None:
        """Where the blobs' objects lie; None where blobs lie in a folder."""

    def create(self) -> BlobWriter:
        """Start a new blob; raises CapacityError when the disk is full (code storage.full)."""

    def open(self, sha256: str, pause: Callable[[], None] = ...) -> AbstractContextManager[BlobReader]:
        """Open a blob for reading it once, from its beginning; `pause` is called after each piece of a millisecond.

        Raises AdapterUnavailableError when it is missing (adapter_blob_missing) or corrupt (adapter_blob_corrupt).
        """

    def peek(self, sha256: str, num_bytes: int) -> tuple[bytes, int]:
        """The first bytes of a blob, not checked against its digest, and the size of all of it; raises as `open`."""

    def delete(self, sha256: str) -> bool:
        """Remove a blob for good. Returns whether it was there."""

    def digests(self) -> Iterator[str]:
        """Digests of stored blobs, except those so young that another server may be about to publish a version."""

    def sweep(self, max_age_s: float) -> int:
        """Remove temporary files of crashed writers, of more than this age in seconds. Returns how many."""

    def reach(self) -> None:
        """Return if the store answers; raises CapacityError (storage.unavailable) where it does not."""

    def probe(self) -> None:
        """Store, read and delete a few bytes.

        Raises:
            ConfigError: The store refuses, and why.
            CapacityError: It cannot be reached now (code storage.unavailable), or it is full (storage.full).
        """


def open_blobs(registry: RegistryConfig, data_dir: Path) -> BlobStore:
    """Open the store. S3 is not asked yet: see `probe`.

    Raises:
        ConfigError: `registry.blob_url` names S3, and obstore is not installed or does not take the AWS_... variables.
    """
    folder = LocalBlobs(registry.blob_dir(data_dir))
    if registry.s3_place is None:
        return folder
    try:
        from weft.adapters.blobs.bucket import Bucket
        from weft.adapters.blobs.s3 import S3Blobs
    except ModuleNotFoundError as error:
        message = "registry.blob_url names S3, for which obstore is missing: pip install 'weft[s3]'."
        raise ConfigError(message, param="registry.blob_url") from error
    bucket = Bucket(*registry.s3_place, allow_http=may_lack_tls())
    return S3Blobs(bucket, cache=folder, cache_bytes=int(registry.blob_cache_gib * GIB))


def read_pieces(blobs: BlobStore, sha256: str) -> Generator[bytes, None, None]:
    """A blob's bytes; the last piece comes only if the whole blob has its digest.

    Raises:
        AdapterUnavailableError: The blob is missing or corrupt; possibly after its first pieces.
        CapacityError: The store cannot be reached.
    """
    with blobs.open(sha256) as reader:
        left = reader.size
        while left:
            piece = bytearray(min(left, PIECE_BYTES))
            left -= reader.readinto(memoryview(piece))
            if not left:
                reader.verify()
            yield bytes(piece)


def may_lack_tls() -> bool:
    """Whether the environment names an endpoint of S3 without TLS, which nothing else allows."""
    return next(filter(None, map(environment().get, _ENDPOINTS)), "").startswith("http://")
