"""Stores and reads one blob, in any store."""

from __future__ import annotations

import hashlib

from manylora.adapters.blobs.store import BlobStore

CONTENT = b"some weights " * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def store(blobs: BlobStore, content: bytes = CONTENT) -> str:
    with blobs.create() as writer:
        writer.write(content)
        return writer.commit()


def read(blobs: BlobStore, sha256: str = DIGEST) -> bytes:
    with blobs.open(sha256) as blob:
        content = bytearray(blob.size)
        blob.readinto(memoryview(content))
        blob.verify()
    return bytes(content)
