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
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from manylora.adapters.blobs.local import BlobReader, BlobWriter, missing
from manylora.errors import CapacityError, InvalidRequestError

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class MemoryWriter(BlobWriter):
    """Writes one blob to memory, and hashes it. A process that dies leaves nothing of it."""

    def __init__(self, blobs: MemoryBlobs, owner: str, most_bytes: int) -> None:
        if sys.platform != "linux":
            raise InvalidRequestError(
                "Ephemeral versions need a server on Linux.", param="ephemeral"
            )
        self._memory = blobs
        self._owner = owner
        self._most_bytes = most_bytes
        self._hash = hashlib.sha256()
        self.size = 0
        self._fd = os.memfd_create("manylora", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    @property
    def path(self) -> Path:
        """Path at which processes of this user open it, until it is discarded or deleted."""
        return _path(self._fd)

    def write(self, chunk: bytes | bytearray | memoryview) -> None:
        """Append bytes.

        Raises:
            CapacityError: There would be more in memory than there may be (code storage.full).
        """
        self._memory.reserve(len(chunk), self._owner, self._most_bytes)
        super().write(chunk)

    def prepare(self) -> None:
        """Seal the bytes: nobody can change them from now on."""
        if not fcntl.fcntl(self._fd, fcntl.F_GET_SEALS):
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)

    def commit(self) -> str:
        """Keep the blob under its digest."""
        digest = self.sha256()
        self._memory.keep(digest, self._fd, self._owner)
        self._fd = -1
        return digest

    def discard(self) -> None:
        """Free the bytes. Does nothing after `commit` or a second time."""
        if self._fd >= 0:
            self._close()
            self._memory.give_back(self.size, self._owner)


class MemoryPlace(NamedTuple):
    """A descriptor of this process that has a blob open."""

    path: str
    inode: int
    """Inode of the file: the number of a closed descriptor is given to others."""


class MemoryBlobs:
    """The blobs that this process has in memory. Thread-safe.

    Args:
        most_bytes: Limit of the size of all of them, those being written included.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._lock = threading.Lock()
        self._blobs: dict[str, tuple[int, str]] = {}
        """Descriptor and owner."""
        self._owned = Counter[str]()
        self.num_bytes = 0
        """Size of all blobs, those being written included."""

    def __contains__(self, sha256: str) -> bool:
        return sha256 in self._blobs

    def create(self, owner: str = "", most_bytes: int | None = None) -> MemoryWriter:
        """Start a new blob.

        Args:
            owner: The bytes count to it; those that two owners have count to the first.
            most_bytes: Limit of all blobs of the owner; None is only the limit of all blobs.

        Raises:
            InvalidRequestError: This system has no memory files.
        """
        return MemoryWriter(self, owner, self.most_bytes if most_bytes is None else most_bytes)

    def reserve(self, num_bytes: int, owner: str, most_bytes: int) -> None:
        """Count bytes that an owner writes, which may have at most `most_bytes`.

        Raises:
            CapacityError: There would be more than there may be (code storage.full).
        """
        with self._lock:
            message = None
            if self.num_bytes + num_bytes > self.most_bytes:
                message = f"Ephemeral versions may take {self.most_bytes} bytes of this server's memory, in all."
            elif self._owned[owner] + num_bytes > most_bytes:
                message = f"Ephemeral versions of one tenant may take {most_bytes} bytes of this server's memory."
            if message is not None:
                hint = "Keep fewer of them, or raise adapter.push_gib."
                raise CapacityError(f"{message} {hint}", retry_after_s=30.0, code="storage.full")
            self.num_bytes += num_bytes
            self._owned[owner] += num_bytes

    def give_back(self, num_bytes: int, owner: str) -> None:
        """No longer count bytes."""
        with self._lock:
            self.num_bytes -= num_bytes
            self._owned[owner] -= num_bytes
            if not self._owned[owner]:
                del self._owned[owner]

    def keep(self, sha256: str, fd: int, owner: str) -> None:
        """Take over a descriptor, whose bytes are counted; one of bytes that are here already is closed."""
        with self._lock:
            is_new = self._blobs.setdefault(sha256, (fd, owner))[0] == fd
        if not is_new:
            self._drop(fd, owner)

    def adopt(self, sha256: str, place: MemoryPlace) -> None:
        """Have a blob of another process, too.

        Raises:
            FileNotFoundError: It is gone, or something else has its descriptor now.
        """
        fd = os.open(place.path, os.O_RDONLY | os.O_CLOEXEC)
        found = os.fstat(fd)
        if found.st_ino != place.inode:
            os.close(fd)
            raise FileNotFoundError(place.path)
        self.give_back(-found.st_size, "")
        self.keep(sha256, fd, "")

    def place(self, sha256: str) -> MemoryPlace | None:
        """The place at which processes of this user open a blob until it is deleted; None if it is not here."""
        fd, _ = self._blobs.get(sha256, (None, None))
        return None if fd is None else MemoryPlace(str(_path(fd)), os.fstat(fd).st_ino)

    @contextlib.contextmanager
    def open(self, sha256: str, pause: Callable[[], None] = lambda: None) -> Iterator[BlobReader]:
        """Open a blob for reading it once, also while it is deleted.

        Raises:
            AdapterUnavailableError: It is not here (adapter_blob_missing).
        """
        with self._lock:
            if sha256 not in self._blobs:
                raise missing(sha256)
            own = os.open(_path(self._blobs[sha256][0]), os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield BlobReader(own, None, pause)
        finally:
            os.close(own)

    def delete(self, sha256: str) -> None:
        """Let a blob go; what is not here is no error."""
        with self._lock:
            found = self._blobs.pop(sha256, None)
        if found is not None:
            self._drop(*found)

    def _drop(self, fd: int, owner: str) -> None:
        self.give_back(os.fstat(fd).st_size, owner)
        os.close(fd)

    def digests(self) -> list[str]:
        """The blobs that are here."""
        return list(self._blobs)


def _path(fd: int) -> Path:
    return Path(f"/proc/{os.getpid()}/fd/{fd}")
