"""Blobs by SHA-256 in a local folder: durable once committed, hashed again on every read.

Layout below the root, all folders 0700: `sha256/ab/cd/<64 hex>` and `tmp/`. Names are computed here and never taken
from a client. Every open is relative to a folder that was itself opened without following links. Knows nothing of
what a blob means, or what refers to it.

The folder is not kept by obstore's LocalStore, which S3 could share: that returns from a write before the bytes are on
disk, follows links, and has no errors for a full or read-only disk. obstore is also an extra that only S3 needs.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from manylora.errors import AdapterUnavailableError, CapacityError

if TYPE_CHECKING:
    from manylora.adapters.blobs.bucket import Bucket

PIECE_BYTES = 1 << 20
"""Most bytes that are read and hashed in one go: about a millisecond."""
REST_BYTES = 1 << 14
"""Most bytes that `verify` reads in one go. It mostly finds none."""
PROBE_BYTES = 1 << 12
"""Bytes written to see if the disk takes any: a quota is not in its free space."""
CORRUPT = "adapter_blob_corrupt"
"""Error code for bytes that do not have their digest."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a full disk or a used up quota."""
_PASSING = frozenset(
    {
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.ENOENT,
        errno.EMFILE,
        errno.ENFILE,
        errno.EIO,
        errno.ESTALE,
    }
)
"""Other errors that an operator can repair while the server runs."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_CREATE_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class BlobWriter:
    """Writes one blob to a temporary file, and hashes it.

    Use as a context manager: leaving it without `commit` discards. Not thread-safe.
    """

    def __init__(self, blobs: LocalBlobs) -> None:
        self._blobs = blobs
        self._name = secrets.token_hex(16) + ".part"
        self._hash = hashlib.sha256()
        self.size = 0
        with disk_trouble_is_capacity(), _folder(blobs.root, ("tmp",)) as folder:
            self._fd = os.open(self._name, _CREATE_FLAGS, 0o600, dir_fd=folder)

    @property
    def path(self) -> Path:
        """Place of the temporary file, from which all bytes written before can be read."""
        return self._blobs.root / "tmp" / self._name

    def write(self, chunk: bytes | bytearray | memoryview) -> None:
        """Append bytes.

        Raises:
            CapacityError: The disk is full (code storage.full); discard the writer.
        """
        self._hash.update(chunk)
        write_all(self._fd, chunk)
        self.size += len(chunk)

    def sha256(self) -> str:
        """Hex digest of everything written so far."""
        return self._hash.hexdigest()

    def prepare(self) -> None:
        """Do the slow part of `commit` beforehand, outside the transaction that publishes: all but the rename.

        Raises:
            CapacityError: The bytes cannot be kept (code storage.full or storage.unavailable); discard the writer.
        """
        with disk_trouble_is_capacity():
            os.fsync(self._fd)

    def commit(self) -> str:
        """Make the blob durable under its digest, replacing an equal one (which repairs a corrupt one).

        Returns:
            The digest, 64 hex digits.

        Raises:
            CapacityError: The bytes cannot be kept (code storage.full or storage.unavailable); discard the writer.
        """
        digest = self.sha256()
        with disk_trouble_is_capacity():
            os.fsync(self._fd)
            self._blobs.make_folders(digest)
            with (
                _folder(self._blobs.root, ("tmp",)) as source,
                _folder(self._blobs.root, parents(digest)) as target,
            ):
                os.rename(self._name, digest, src_dir_fd=source, dst_dir_fd=target)
                self._close()
                os.fsync(target)
        return digest

    def discard(self) -> None:
        """Remove the temporary file. Does nothing after `commit` or a second time."""
        if self._fd < 0:
            return
        self._close()
        with (
            contextlib.suppress(OSError),
            _folder(self._blobs.root, ("tmp",)) as folder,
        ):  # else a sweep removes it
            os.unlink(self._name, dir_fd=folder)

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> BlobWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


class BlobReader:
    """Reads one blob in pieces, and hashes them as they are read.

    Do not trust the bytes before `verify` has returned. The reader keeps none of them in memory. Not thread-safe.

    Args:
        fd: What to read from; not closed here.
        sha256: Its digest; None for bytes that cannot have changed since they were hashed.
        pause: Called after each piece of about a millisecond.
    """

    def __init__(self, fd: int, sha256: str | None, pause: Callable[[], None]) -> None:
        self._fd = fd
        self._sha256 = sha256
        self._pause = pause
        self._hash = hashlib.sha256()
        self.size = os.fstat(fd).st_size
        """Bytes in all."""

    def readinto(self, buffer: memoryview) -> int:
        """Fill `buffer` with the bytes that follow, and return how many that was: all of it.

        Raises:
            AdapterUnavailableError: The blob ends before (adapter_blob_corrupt).
        """
        filled = 0
        while filled < len(buffer):
            got = self._read_piece(buffer[filled : filled + PIECE_BYTES])
            if got == 0:
                raise corrupt(self._sha256 or "unknown")
            filled += got
        return filled

    def verify(self) -> None:
        """Read what is left and check the digest of everything.

        Raises:
            AdapterUnavailableError: The bytes no longer have this digest (adapter_blob_corrupt).
        """
        rest = memoryview(bytearray(REST_BYTES))
        while self._sha256 is not None and self._read_piece(rest):
            pass
        if self._sha256 is not None and self._hash.hexdigest() != self._sha256:
            raise corrupt(self._sha256)

    def _read_piece(self, buffer: memoryview) -> int:
        got = os.readv(self._fd, [buffer])
        if self._sha256 is not None:
            self._hash.update(buffer[:got])
        self._pause()
        return got


class LocalBlobs:
    """A folder of blobs. Thread-safe and safe among processes: all state is in the file system.

    Methods that take a digest raise ValueError when it is not 64 lower-case hex digits.
    """

    bucket: Bucket | None = None
    """Bucket of the blobs, if this is a folder of copies."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root).absolute()
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("sha256", "tmp"):
            with contextlib.suppress(FileExistsError):
                (self.root / name).mkdir(mode=0o700)
            with _folder(self.root, (name,)):
                pass
        with _folder(self.root, ()) as folder:
            os.fsync(folder)

    def create(self) -> BlobWriter:
        """Start a new blob.

        Raises:
            CapacityError: The disk is full (code storage.full).
        """
        return BlobWriter(self)

    def path(self, sha256: str) -> Path:
        """Place of a blob, which need not exist."""
        return self.root.joinpath(*parents(sha256), sha256)

    @contextlib.contextmanager
    def open(self, sha256: str, pause: Callable[[], None] = lambda: None) -> Iterator[BlobReader]:
        """Open a blob for reading it once, from its beginning.

        Args:
            sha256: Its name.
            pause: Called after each piece of about a millisecond.

        Raises:
            AdapterUnavailableError: Missing (adapter_blob_missing), or not even a file (adapter_blob_corrupt).
        """
        with self._open(sha256) as fd:
            yield BlobReader(fd, sha256, pause)

    def peek(self, sha256: str, num_bytes: int) -> tuple[bytes, int]:
        """Read the beginning of a blob, unchecked against its digest, and its size.

        Raises:
            AdapterUnavailableError: Missing (adapter_blob_missing), or not even a file (adapter_blob_corrupt).
        """
        with self._open(sha256) as fd:
            return os.pread(fd, num_bytes, 0), os.fstat(fd).st_size

    def delete(self, sha256: str) -> None:
        """Remove a blob for good; one that is not there is no error."""
        with (
            contextlib.suppress(FileNotFoundError),
            _folder(self.root, parents(sha256)) as folder,
        ):
            os.unlink(sha256, dir_fd=folder)
            os.fsync(folder)

    def digests(self) -> Iterator[str]:
        """Digests of all stored blobs, in no particular order."""
        for path in self.root.glob("sha256/??/??/*"):
            if _DIGEST.fullmatch(path.name):
                yield path.name

    def sweep(self, max_age_s: float) -> int:
        """Remove temporary files that a crash left behind.

        Args:
            max_age_s: Keep files written to more recently than this many seconds ago.

        Returns:
            How many files were removed.
        """
        oldest = time.time() - max_age_s
        removed = 0
        with _folder(self.root, ("tmp",)) as folder:
            for name in os.listdir(folder):
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime <= oldest:
                        os.unlink(name, dir_fd=folder)
                        removed += 1
        return removed

    def check_room(self, num_bytes: int) -> None:
        """Return if a blob of this size can be stored, as far as the disk says beforehand.

        Raises:
            CapacityError: It cannot (code storage.full or storage.unavailable).
        """
        with disk_trouble_is_capacity(), _folder(self.root, ("tmp",)) as folder:
            disk = os.fstatvfs(folder)
            if disk.f_blocks and disk.f_bavail * disk.f_frsize < num_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with self.create() as writer:
            writer.write(bytes(PROBE_BYTES))

    def reach(self) -> None:
        """Return if blobs can be deleted, which in a folder is always so."""

    def probe(self) -> None:
        """Make sure that blobs can be stored; raises CapacityError when the disk is full (code storage.full)."""
        with self.create():
            pass

    def make_folders(self, sha256: str) -> None:
        """Make the folders above a blob, each durable in its parent."""
        names = parents(sha256)
        for depth in range(1, len(names)):
            with _folder(self.root, names[:depth]) as folder:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(names[depth], 0o700, dir_fd=folder)
                os.fsync(folder)

    @contextlib.contextmanager
    def _open(self, sha256: str) -> Iterator[int]:
        try:
            fd = open_below(self.root, parents(sha256), sha256)
        except FileNotFoundError:
            raise missing(sha256) from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise corrupt(sha256) from error
            raise
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise corrupt(sha256)
            yield fd
        finally:
            os.close(fd)


def parents(sha256: str) -> tuple[str, str, str]:
    """Names of the folders above a blob."""
    if not _DIGEST.fullmatch(sha256):
        raise ValueError(f"A blob's digest is 64 lower-case hex digits, got {sha256!r}")
    return ("sha256", sha256[:2], sha256[2:4])


def open_below(root: Path, folders: Sequence[str], name: str) -> int:
    """Open a file for reading, step by step below `root`: no link is followed. Returns its descriptor."""
    with _folder(root, folders) as folder:
        return os.open(name, _READ_FLAGS, dir_fd=folder)


@contextlib.contextmanager
def _folder(root: Path, names: Sequence[str]) -> Iterator[int]:
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names:
            below = os.open(name, _FOLDER_FLAGS, dir_fd=fd)
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def disk_trouble_is_capacity() -> Iterator[None]:
    """Turn errors of the disk into a CapacityError: storage.full, or storage.unavailable for others that may pass."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            message = "The adapter store's disk is full; try again once space was freed."
            raise CapacityError(message, retry_after_s=30.0, code="storage.full") from error
        if error.errno not in _PASSING:
            raise
        message = f"The adapter store cannot be written now ({error.strerror}); try again once it is repaired."
        raise CapacityError(message, retry_after_s=30.0, code="storage.unavailable") from error


def write_all(fd: int, chunk: bytes | bytearray | memoryview) -> None:
    """Write all these bytes.

    Raises:
        CapacityError: The disk is full (code storage.full).
    """
    rest = memoryview(chunk)
    with disk_trouble_is_capacity():
        while rest:
            rest = rest[os.write(fd, rest) :]


def missing(sha256: str) -> AdapterUnavailableError:
    """The error for a blob that is not there."""
    message = f"The adapter's weights (sha256 {sha256}) are not in the blob store; upload the adapter again."
    return AdapterUnavailableError(message, code="adapter_blob_missing")


def corrupt(sha256: str) -> AdapterUnavailableError:
    """The error for bytes that have another digest."""
    message = f"The adapter's weights (sha256 {sha256}) no longer match their digest; upload the adapter again."
    return AdapterUnavailableError(message, code=CORRUPT)
