"""Files of uploads in pieces, while they come: one folder per upload, with names of our own.

What was received is what lies there, so a crash needs no bookkeeping: the client asks how far it got. Whether the
bytes are right is found out when the upload is completed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weft.adapters.blobs.local import full_disk_is_capacity
from weft.errors import ConflictError
from weft.registry.records import CONFIG_FILE, WEIGHTS_FILE

FILES = (CONFIG_FILE, WEIGHTS_FILE)
_ID = re.compile(r"upl_[0-9a-f]{26}")
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC


class StagedWriter:
    """One file on its way in."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, chunk: bytes | bytearray) -> None:
        """Append bytes.

        Raises:
            CapacityError: The disk is full (code storage.full).
        """
        rest = memoryview(chunk)
        with full_disk_is_capacity():
            while rest:
                rest = rest[os.write(self._fd, rest) :]

    def sync(self) -> None:
        """Make what was written durable."""
        with full_disk_is_capacity():
            os.fsync(self._fd)


class StagedFiles:
    """A folder of folders. Thread-safe; one writer for each file."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def sizes(self, upload_id: str) -> dict[str, int]:
        """Bytes of each file that were received."""
        sizes = dict.fromkeys(FILES, 0)
        for name in FILES:
            with suppress(FileNotFoundError):
                sizes[name] = (self._folder(upload_id) / name).stat(follow_symlinks=False).st_size
        return sizes

    @contextmanager
    def appending(self, upload_id: str, name: str, offset: int | None) -> Iterator[StagedWriter]:
        """Go on with a file at `offset`, or begin it anew when None.

        Raises:
            ConflictError: The file does not end at `offset`; code upload.offset_mismatch.
            CapacityError: The disk is full (code storage.full).
        """
        folder = self._folder(upload_id)
        with full_disk_is_capacity():
            folder.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | _FLAGS, 0o600)
        try:
            received = os.fstat(fd).st_size
            if offset is None:
                os.ftruncate(fd, 0)
            elif offset != received:
                raise ConflictError(
                    f"{received} bytes of the file were received; go on with byte {received}.",
                    code="upload.offset_mismatch",
                    param="content-range",
                )
            yield StagedWriter(fd)
        finally:
            os.close(fd)

    def read(self, upload_id: str, name: str, piece_bytes: int) -> Iterator[bytes]:
        """A file's bytes in pieces."""
        with os.fdopen(os.open(self._folder(upload_id) / name, os.O_RDONLY | _FLAGS), "rb") as file:
            while piece := file.read(piece_bytes):
                yield piece

    def delete(self, upload_id: str, *names: str) -> None:
        """Remove these files, or without names the whole folder; what is not there is no error."""
        folder = self._folder(upload_id)
        for name in names:
            (folder / name).unlink(missing_ok=True)
        if not names:
            with suppress(FileNotFoundError):
                shutil.rmtree(folder)

    def ids(self) -> list[str]:
        """Uploads that have a folder."""
        return [name for name in os.listdir(self._root) if _ID.fullmatch(name)]

    def _folder(self, upload_id: str) -> Path:
        if not _ID.fullmatch(upload_id):
            raise ValueError(f"no id of an upload: {upload_id!r}")
        return self._root / upload_id
