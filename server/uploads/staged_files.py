"""Files of uploads in pieces while they come, where all servers that share the blobs see them.

What was received is what lies there, so a crash needs no bookkeeping. Where blobs lie in a folder, the files lie in a
folder too, and a lock lets one server write a file. Where blobs lie in S3, each piece that came is an object named by
its offset; pieces of two servers may overlap, none replaces another, and the digest decides whether they fit.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from manylora.adapters.blobs.local import PIECE_BYTES, disk_trouble_is_capacity, write_all
from manylora.adapters.blobs.store import BlobStore
from manylora.config import Config
from manylora.errors import BusyError, CapacityError, ConflictError
from manylora.server.uploads.in_progress import FILES, RETRY_S

if TYPE_CHECKING:
    from manylora.adapters.blobs.bucket import Bucket

OBJECT_BYTES = 8 << 20
"""Most bytes of a piece in S3, which wait in memory until they are sent."""
MAX_SHORT = 1000
"""Most pieces of a file in S3 that are less than half as large; each costs requests."""
_ID = re.compile(r"upl_[0-9a-f]{26}")
_PIECE = re.compile(r"uploads/upl_[0-9a-f]{26}/([a-z_.]+)/(\d{16})-[0-9a-f]{16}")
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


def open_staged(config: Config, blobs: BlobStore) -> StagedFiles:
    """Staged files beside the blobs; with the default folder of blobs, in a folder of the data folder."""
    if blobs.bucket is not None:
        return StagedObjects(blobs.bucket)
    return StagedFolder(
        (config.blob_dir if config.registry.blob_url else config.server.data_dir) / "uploads"
    )


class StagedFolder:
    """Files of uploads, by the upload's id and the file's name, in a folder: one folder per upload.

    Thread-safe and safe among servers.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def sizes(self, upload_id: str) -> dict[str, int]:
        """Bytes of each file that were received."""
        sizes = dict.fromkeys(FILES, 0)
        for name in FILES:
            # Opened, since a network file system answers `stat` from its cache.
            with suppress(FileNotFoundError), self._open(upload_id, name) as file:
                sizes[name] = os.fstat(file.fileno()).st_size
        return sizes

    def writer(self, upload_id: str, name: str) -> FolderWriter:
        """Make a writer that adds to a file; nothing is opened yet."""
        return FolderWriter(self._root / _checked(upload_id) / name)

    def read(self, upload_id: str, name: str) -> Iterator[bytes]:
        """A file's bytes in pieces of `PIECE_BYTES`.

        Raises:
            FileNotFoundError: It is not there, or was deleted meanwhile.
            BusyError: A server writes it; code upload.busy.
        """
        with self._open(upload_id, name) as file:
            _lock(file.fileno(), fcntl.LOCK_SH)
            while piece := file.read(PIECE_BYTES):
                yield piece

    def delete(self, upload_id: str, *names: str) -> None:
        """Remove these files, or without names the whole folder; what is not there is no error."""
        folder = self._root / _checked(upload_id)
        for name in names:
            (folder / name).unlink(missing_ok=True)
        if not names:
            with suppress(FileNotFoundError):
                shutil.rmtree(folder)

    def ids(self) -> list[str]:
        """Uploads that have a folder."""
        return [name for name in os.listdir(self._root) if _ID.fullmatch(name)]

    def _open(self, upload_id: str, name: str) -> BufferedReader:
        return os.fdopen(
            os.open(self._root / _checked(upload_id) / name, os.O_RDONLY | _FLAGS), "rb"
        )


class FolderWriter:
    """Adds bytes to one file in a folder. Its methods wait for the disk. After an error it can only be closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def open(self, offset: int | None) -> None:
        """Open and lock the file, and begin at `offset`, where it ends; None empties it first.

        Raises:
            ConflictError: It does not end there, or was deleted; codes upload.offset_mismatch, upload.ended.
            BusyError: Another server writes it; code upload.busy.
            CapacityError: The disk is full, or cannot be used; codes storage.full, storage.unavailable.
        """
        with disk_trouble_is_capacity():
            try:
                self._path.parent.mkdir(mode=0o700, exist_ok=True)
                self._fd = os.open(
                    self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _FLAGS, 0o600
                )
            except FileNotFoundError:  # another server deleted the folder between the two
                raise ConflictError(
                    "The upload has ended; make a new one.", code="upload.ended"
                ) from None
        _lock(self._fd, fcntl.LOCK_EX)
        if offset is None:
            os.ftruncate(self._fd, 0)
        else:
            _check_offset(offset, os.fstat(self._fd).st_size)

    def write(self, chunk: bytearray) -> None:
        """Append bytes; raises CapacityError as `open` does."""
        write_all(self._fd, chunk)

    def close(self) -> None:
        """Make the bytes durable, and let others write; raises CapacityError as `open` does."""
        if self._fd < 0:
            return
        try:
            with disk_trouble_is_capacity():
                os.fsync(self._fd)
        finally:
            os.close(self._fd)
            self._fd = -1


class StagedObjects:
    """Files of uploads in a bucket: an object `uploads/<upload>/<file>/<offset>-<random>` per piece."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def sizes(self, upload_id: str) -> dict[str, int]:
        """Bytes of each file that follow each other from its beginning."""
        return {name: _chain(pieces)[1] for name, pieces in self._pieces(upload_id).items()}

    def writer(self, upload_id: str, name: str) -> ObjectWriter:
        """Make a writer that adds to a file; nothing is asked yet."""
        return ObjectWriter(
            self._bucket,
            f"uploads/{_checked(upload_id)}/{name}",
            lambda: self._pieces(upload_id)[name],
        )

    def read(self, upload_id: str, name: str) -> Iterator[bytes]:
        """A file's bytes, an object at a time."""
        for piece, skipped in _chain(self._pieces(upload_id)[name])[0]:
            yield bytes(self._bucket.get(piece.key, skipped, piece.size - skipped)[0])

    def delete(self, upload_id: str, *names: str) -> None:
        """Remove the pieces of these files, or without names all of the upload."""
        pieces = self._pieces(upload_id)
        self._bucket.delete([piece.key for name in names or FILES for piece in pieces[name]])

    def ids(self) -> list[str]:
        """Uploads that have objects."""
        return [name for name in self._bucket.folders("uploads") if _ID.fullmatch(name)]

    def _pieces(self, upload_id: str) -> dict[str, list[_Piece]]:
        pieces: dict[str, list[_Piece]] = {name: [] for name in FILES}
        for found in self._bucket.objects(f"uploads/{_checked(upload_id)}"):
            if match := _PIECE.fullmatch(found["path"]):
                pieces[match[1]].append(_Piece(int(match[2]), found["size"], found["path"]))
        return pieces


class _Piece(NamedTuple):
    offset: int
    """Place in the file at which it begins."""
    size: int
    key: str


class ObjectWriter:
    """`FolderWriter` for a bucket: sends what came as one object when it is large enough, and at the end.

    Every method raises CapacityError (storage.unavailable) while S3 is away.
    """

    def __init__(self, bucket: Bucket, folder: str, pieces: Callable[[], list[_Piece]]) -> None:
        self._bucket = bucket
        self._folder = folder
        self._pieces = pieces
        self._offset = 0
        self._pending = bytearray()

    def open(self, offset: int | None) -> None:
        """Look where the file ends, or delete what is there.

        Raises:
            ConflictError: It does not end at `offset`, or came in too many small pieces; codes
                upload.offset_mismatch, upload.too_many_pieces.
        """
        pieces = self._pieces()
        if offset is None:
            self._bucket.delete([piece.key for piece in pieces])
            return
        _check_offset(offset, _chain(pieces)[1])
        if sum(piece.size < OBJECT_BYTES // 2 for piece in pieces) >= MAX_SHORT:
            message = f"The file came in {MAX_SHORT} small pieces; send it again from byte 0, without Content-Range."
            raise ConflictError(message, code="upload.too_many_pieces", param="content-range")
        self._offset = offset

    def write(self, chunk: bytearray) -> None:
        """Append bytes."""
        if len(self._pending) + len(chunk) > OBJECT_BYTES:
            self.close()
        self._pending += chunk

    def close(self) -> None:
        """Send what is left."""
        if self._pending:
            # Never a name that is taken: what another server stored stays.
            key = f"{self._folder}/{self._offset:016}-{secrets.token_hex(8)}"
            self._bucket.put(key, self._pending)
            self._offset += len(self._pending)
            self._pending = bytearray()


StagedFiles: TypeAlias = StagedFolder | StagedObjects


def _chain(pieces: list[_Piece]) -> tuple[list[tuple[_Piece, int]], int]:
    """Pieces that make up the beginning of a file.

    Returns:
        Each with how many of its bytes the ones before it have; and where the last one ends.
    """
    chain: list[tuple[_Piece, int]] = []
    end = 0
    for piece in sorted(pieces):
        if piece.offset <= end < piece.offset + piece.size:
            chain.append((piece, end - piece.offset))
            end = piece.offset + piece.size
    return chain, end


def _check_offset(offset: int, received: int) -> None:
    if offset != received:
        message = f"{received} bytes of the file were received; go on with byte {received}."
        raise ConflictError(message, code="upload.offset_mismatch", param="content-range")


def _lock(fd: int, kind: int) -> None:
    """Lock a file among servers until it is closed."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        message = (
            "Another server receives this file or completes this upload; ask again in a moment."
        )
        raise BusyError(message, retry_after_s=RETRY_S, code="upload.busy") from None
    except OSError as error:
        message = f"The folder of uploads must be on a file system with flock: {error.strerror}."
        raise CapacityError(message, code="storage.unavailable") from error


def _checked(upload_id: str) -> str:
    if not _ID.fullmatch(upload_id):
        raise ValueError(f"no id of an upload: {upload_id!r}")
    return upload_id
