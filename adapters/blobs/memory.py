"""Blobs in memory only: sealed memory files by SHA-256, which go with the process that has them. Linux only.

Sealed bytes never change: what was validated is what is loaded, so no reader hashes them again. Another process of the
same user can open them by their place, and has them from then on.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from weft.adapters.blobs.local import BlobReader, BlobWriter
from weft.errors import CapacityError, InvalidRequestError

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class MemoryWriter(BlobWriter):
    """Writes one blob to memory, and hashes it. A process that dies leaves nothing of it."""

    def __init__(self, blobs: MemoryBlobs) -> None:
        if sys.platform != "linux":
            raise InvalidRequestError("Ephemeral versions need a server on Linux.", param="ephemeral")
        self._memory = blobs
        self._hash = hashlib.sha256()
        self.size = 0
        self._fd = os.memfd_create("weft", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    @property
    def path(self) -> Path:
        """Where processes of this user open it, as long as it is neither discarded nor deleted."""
        return _path(self._fd)

    def write(self, chunk: bytes | bytearray | memoryview) -> None:
        """Append bytes.

        Raises:
            CapacityError: There would be more in memory than there may be (code storage.full).
        """
        self._memory.reserve(len(chunk))
        super().write(chunk)

    def prepare(self) -> None:
        """Seal the bytes: nobody can change them from now on."""
        if not fcntl.fcntl(self._fd, fcntl.F_GET_SEALS):
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)

    def commit(self) -> str:
        """Keep the blob under its digest."""
        digest = self.sha256()
        self._memory.keep(digest, self._fd)
        self._fd = -1
        return digest

    def discard(self) -> None:
        """Free the bytes. Does nothing after `commit` or a second time."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._memory.reserve(-self.size)


class MemoryPlace(NamedTuple):
    """Where a blob is open."""

    path: str
    inode: int
    """Of the file: a descriptor's number is given to others once it is closed."""


class MemoryBlobs:
    """The blobs that this process has in memory. Thread-safe.

    Args:
        most_bytes: Of all of them, those being written included.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._fds: dict[str, int] = {}
        self.num_bytes = 0
        """Of all blobs, those being written included."""

    def __contains__(self, sha256: str) -> bool:
        return sha256 in self._fds

    def create(self) -> MemoryWriter:
        """Start a new blob.

        Raises:
            InvalidRequestError: This system has no memory files.
        """
        return MemoryWriter(self)

    def reserve(self, num_bytes: int) -> None:
        """Count bytes that are being written; fewer than 0 are given back.

        Raises:
            CapacityError: There would be more than there may be (code storage.full).
        """
        with self._lock:
            if num_bytes > 0 and self.num_bytes + num_bytes > self._most_bytes:
                message = f"Ephemeral versions may take {self._most_bytes} bytes of this server's memory, in all."
                hint = "Keep fewer of them, or raise adapter.push_gib."
                raise CapacityError(f"{message} {hint}", retry_after_s=30.0, code="storage.full")
            self.num_bytes += num_bytes

    def keep(self, sha256: str, fd: int) -> None:
        """Take over a descriptor, whose bytes are counted; one of bytes that are here already is closed."""
        with self._lock:
            if sha256 in self._fds:
                self.num_bytes -= os.fstat(fd).st_size
                os.close(fd)
            else:
                self._fds[sha256] = fd

    def adopt(self, sha256: str, place: MemoryPlace) -> None:
        """Have a blob of another process, too.

        Raises:
            FileNotFoundError: It is gone, or something else has its descriptor now.
        """
        fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
        if os.fstat(fd).st_ino != place.inode:
            os.close(fd)
            raise FileNotFoundError(place.path)
        with self._lock:
            self.num_bytes += os.fstat(fd).st_size
        self.keep(sha256, fd)

    def place(self, sha256: str) -> MemoryPlace | None:
        """Where processes of this user open a blob until it is deleted; None where it is not here."""
        fd = self._fds.get(sha256)
        return None if fd is None else MemoryPlace(str(_path(fd)), os.fstat(fd).st_ino)

    @contextlib.contextmanager
    def open(self, sha256: str, pause: Callable[[], None] = lambda: None) -> Iterator[BlobReader | None]:
        """Open a blob for reading it once, also while it is deleted; None where it is not here."""
        with self._lock:
            fd = self._fds.get(sha256)
            own = None if fd is None else os.open(_path(fd), os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield None if own is None else BlobReader(own, None, pause)
        finally:
            if own is not None:
                os.close(own)

    def delete(self, sha256: str) -> None:
        """Let a blob go; what is not here is no error."""
        with self._lock:
            fd = self._fds.pop(sha256, None)
            if fd is not None:
                self.num_bytes -= os.fstat(fd).st_size
                os.close(fd)

    def digests(self) -> list[str]:
        """The blobs that are here."""
        return list(self._fds)


def _path(fd: int) -> Path:
    return Path(f"/proc/{os.getpid()}/fd/{fd}")
