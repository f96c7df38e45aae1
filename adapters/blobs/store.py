"""Opens the blob store that the settings name: a folder, or S3 with a folder of copies."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from manylora.adapters.blobs.local import PIECE_BYTES, LocalBlobs
from manylora.config import GIB, RegistryConfig, environment
from manylora.errors import ConfigError

if TYPE_CHECKING:
    from manylora.adapters.blobs.s3 import S3Blobs

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""Variables that may name a server other than Amazon's."""
BlobStore: TypeAlias = "LocalBlobs | S3Blobs"
"""Blobs by SHA-256: durable once committed, hashed on every read. Thread-safe and safe among processes.

Methods that take a digest raise ValueError when it is not 64 lower-case hex digits, and CapacityError
(storage.unavailable) where the blobs are behind a network that fails.
"""


def open_blobs(registry: RegistryConfig, data_dir: Path) -> BlobStore:
    """Open the store. S3 is not asked yet: see `probe`.

    Raises:
        ConfigError: `registry.blob_url` names S3, and obstore is not installed or does not take the AWS_... variables.
    """
    folder = registry.blob_dir(data_dir)
    if registry.s3_place is None:
        return LocalBlobs(folder)
    try:
        from manylora.adapters.blobs.bucket import Bucket
        from manylora.adapters.blobs.s3 import S3Blobs
    except ModuleNotFoundError as error:
        message = (
            "registry.blob_url names S3, for which obstore is missing: pip install 'manylora[s3]'."
        )
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
    """Return True if the environment names an endpoint of S3 without TLS, which nothing else allows."""
    return next(filter(None, map(environment().get, _ENDPOINTS)), "").startswith("http://")
