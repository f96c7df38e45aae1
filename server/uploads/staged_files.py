"""Files of uploads in pieces while they come, where all servers that share the blobs see them.

Each piece that came lies under a name with its offset: in a folder where blobs lie in a folder, else in S3. What was
received is what lies there, so a crash needs no bookkeeping. Pieces of two servers may overlap, none replaces another,
and the digest decides whether they fit.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from manylora.adapters.blobs.local import disk_trouble_is_capacity, write_all
from manylora.adapters.blobs.store import BlobStore
from manylora.config import Config
from manylora.errors import ConflictError
from manylora.registry.records import FILES
from manylora.server.http.body import STREAM_BYTES

if TYPE_CHECKING:
    from manylora.adapters.blobs.bucket import Bucket

MAX_SHORT = 1000
"""Most pieces of a file that are less than half as large; each costs requests."""
_ID = re.compile(r"upl_[0-9a-f]{26}")
_PIECE = re.compile(r"uploads/upl_[0-9a-f]{26}/([a-z_.]+)-(\d{16})-[0-9a-f]{16}")
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def open_staged(config: Config, blobs: BlobStore) -> StagedFiles:
    """Staged files beside the blobs; with the default folder of blobs, in the data folder."""
    if blobs.bucket is not None:
        return StagedFiles(blobs.bucket)
    return StagedFiles(
        PieceFolder(config.blob_dir if config.registry.blob_url else config.server.data_dir)
    )


class PieceFolder:
    """Pieces as files in a folder, by the methods of `Bucket` that they need. Thread-safe, and safe among servers.

    Methods that write raise CapacityError (storage.full or storage.unavailable) where the disk takes nothing.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        (self._root / "uploads").mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, key: str, content: bytearray) -> None:
        """Store a piece. Returns once it is on disk."""
        path = self._root / key
        with disk_trouble_is_capacity():
            path.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                fd = os.open(path, _CREATE_FLAGS, 0o600)
            except FileNotFoundError:  # another server deleted the folder between the two
                message = "The upload has ended; make a new one."
                raise ConflictError(message, code="upload.ended") from None
            try:
                write_all(fd, content)
                os.fsync(fd)
            finally:
                os.close(fd)

    def get(self, key: str, start: int, num_bytes: int) -> tuple[bytes, int]:
        """Bytes of a piece, and its size; raises FileNotFoundError if there is none."""
        with self._open(key) as file:
            file.seek(start)
            return file.read(num_bytes), os.fstat(file.fileno()).st_size

    def delete(self, keys: Sequence[str]) -> None:
        """Remove pieces and folders; what is not there is no error."""
        for path in (self._root / key for key in keys):
            with suppress(FileNotFoundError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def objects(self, folder: str) -> Iterator[dict[str, Any]]:
        """The pieces in a folder."""
        with suppress(FileNotFoundError):
            for name in os.listdir(self._root / folder):
                key = f"{folder}/{name}"
                # Opened, since a network file system answers `stat` from its cache.
                with suppress(FileNotFoundError), self._open(key) as file:
                    yield {"path": key, "size": os.fstat(file.fileno()).st_size}

    def folders(self, folder: str) -> list[str]:
        """Names of the folders in a folder."""
        return os.listdir(self._root / folder)

    def _open(self, key: str) -> BufferedReader:
        return os.fdopen(os.open(self._root / key, _READ_FLAGS), "rb")


class StagedFiles:
    """Files of uploads, by the upload's id and the file's name: `uploads/<upload>/<file>-<offset>-<random>` is a piece.

    Its methods wait for the disk or S3.
    """

    def __init__(self, store: Bucket | PieceFolder) -> None:
        self._store = store

    def sizes(self, upload_id: str) -> dict[str, int]:
        """Bytes of each file that follow each other from its beginning."""
        return {name: _chain(pieces)[1] for name, pieces in self._pieces(upload_id).items()}

    def writer(self, upload_id: str, name: str, offset: int | None) -> Callable[[bytearray], None]:
        """Make a function that stores pieces of a file from `offset` on, where it ends; None empties it first.

        Raises:
            ConflictError: It does not end there, or came in too many small pieces; codes upload.offset_mismatch,
                upload.too_many_pieces.
        """
        pieces = self._pieces(upload_id)[name]
        if offset is None:
            self._store.delete([piece.key for piece in pieces])
            pieces = []
        end = offset or 0
        received = _chain(pieces)[1]
        if end != received:
            message = f"{received} bytes of the file were received; go on with byte {received}."
            raise ConflictError(message, code="upload.offset_mismatch", param="content-range")
        if sum(piece.size < STREAM_BYTES // 2 for piece in pieces) >= MAX_SHORT:
            message = f"The file came in {MAX_SHORT} small pieces; send it again from byte 0, without Content-Range."
            raise ConflictError(message, code="upload.too_many_pieces", param="content-range")

        def write(piece: bytearray) -> None:
            nonlocal end
            if piece:
                # Never a name that is taken: what another server stored stays.
                key = f"{_folder_of(upload_id)}/{name}-{end:016}-{secrets.token_hex(8)}"
                self._store.put(key, piece)
                end += len(piece)

        return write

    def read(self, upload_id: str, name: str) -> Iterator[bytes]:
        """A file's bytes, a piece at a time; raises FileNotFoundError if one was deleted meanwhile."""
        for piece, skipped in _chain(self._pieces(upload_id)[name])[0]:
            yield bytes(self._store.get(piece.key, skipped, piece.size - skipped)[0])

    def delete(self, upload_id: str, *names: str) -> None:
        """Remove the pieces of these files, or without names all of the upload; what is not there is no error."""
        pieces = self._pieces(upload_id)
        keys = [piece.key for name in names or FILES for piece in pieces[name]]
        self._store.delete(keys if names else [*keys, _folder_of(upload_id)])

    def ids(self) -> list[str]:
        """Uploads that have pieces."""
        return [name for name in self._store.folders("uploads") if _ID.fullmatch(name)]

    def _pieces(self, upload_id: str) -> dict[str, list[_Piece]]:
        pieces: dict[str, list[_Piece]] = {name: [] for name in FILES}
        for found in self._store.objects(_folder_of(upload_id)):
            match = _PIECE.fullmatch(found["path"])
            if match and match[1] in pieces:
                pieces[match[1]].append(_Piece(int(match[2]), found["size"], found["path"]))
        return pieces


class _Piece(NamedTuple):
    offset: int
    """Place in the file at which it begins."""
    size: int
    key: str


def _chain(pieces: list[_Piece]) -> tuple[list[tuple[_Piece, int]], int]:
    """Pieces that make up the beginning of a file.

    Returns:
        Each with the number of its bytes that the ones before it have; and where the last one ends.
    """
    chain: list[tuple[_Piece, int]] = []
    end = 0
    for piece in sorted(pieces):
        if piece.offset <= end < piece.offset + piece.size:
            chain.append((piece, end - piece.offset))
            end = piece.offset + piece.size
    return chain, end


def _folder_of(upload_id: str) -> str:
    if not _ID.fullmatch(upload_id):
        raise ValueError(f"no id of an upload: {upload_id!r}")
    return f"uploads/{upload_id}"
