"""An append-only journal on disk: lines with a checksum, and one fsync for all callers that wait.

The journal is a folder of numbered files. One process writes a file until it is closed; nobody writes to it after that.
When a write failed, the journal tries in the background whether it can be written again, and says so until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from manylora.adapters.blobs.local import FULL
from manylora.errors import CapacityError, ConfigError

MAX_FILE_BYTES = 4 << 20

PROBE_S = 1.0
"""Seconds between two tries after a write failed."""
PROBE_BYTES = 64 << 10
"""Room for many events; less would soon be used up."""

_LOCK = "lock"
_SUFFIX = ".journal"

logger = logging.getLogger(__name__)

PayloadT = TypeVar("PayloadT")
ResultT = TypeVar("ResultT")


def encode_line(payload: bytes) -> bytes:
    """A line: eight hex digits of CRC-32, the payload, a newline.

    Raises:
        ValueError: The payload holds a newline.
    """
    if b"\n" in payload:
        raise ValueError("expected a payload without newlines")
    return b"%08x %b\n" % (zlib.crc32(payload), payload)


def read_lines(path: Path, decode: Callable[[bytes], PayloadT]) -> tuple[list[PayloadT], int]:
    """Read a file. Leaves out damaged lines, and the half line that a crash may leave at the end.

    Returns:
        The decoded payloads, and the number of damaged lines: complete ones with a wrong checksum, or with a payload
        for which `decode` raises msgspec.DecodeError.
    """
    *complete, _torn = path.read_bytes().split(b"\n")
    decoded = []
    for line in complete:
        checksum, _, payload = line.partition(b" ")
        if checksum == b"%08x" % zlib.crc32(payload):
            with contextlib.suppress(msgspec.DecodeError):
                decoded.append(decode(payload))
    return decoded, len(complete) - len(decoded)


class JournalFiles:
    """The folder: the file being written, and the closed files. Blocks. Thread: one at a time.

    Where the folder or the file being written was deleted or replaced, both are made again with all that was written:
    the bytes of a deleted file stay as long as it is open.
    """

    def __init__(self, folder: Path, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        try:
            self._lock_fd = _lock(folder)
        except BlockingIOError as error:
            message = f"server.data_dir is in use by another Manylora process ({folder.parent})"
            hint = "stop it, or choose another folder."
            raise ConfigError(f"{message}; {hint}", param="server.data_dir") from error
        self.closed = sorted(folder.glob(f"*{_SUFFIX}"))
        """Closed files, oldest first; at the start those of the last process."""
        self._next_number = 1 + max((int(path.stem) for path in folder.glob("[0-9]*.*")), default=0)
        self._fd: int | None = None
        self._path = folder
        self._size = 0

    def write(self, lines: bytes, *, durable: bool) -> None:
        """Append whole lines; with `durable` they survive a power cut after this returns.

        Raises:
            OSError: None of the lines was written.
        """
        self._find_place()
        self._append(lines, durable=durable)

    def probe(self) -> None:
        """Write some bytes beside the files, and remove them; raises OSError if that fails."""
        self._find_place()
        path = self._folder / "probe"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            _write_all(fd, bytes(PROBE_BYTES))
            os.fsync(fd)
        finally:
            os.close(fd)
            path.unlink()

    def _append(self, lines: bytes, *, durable: bool) -> None:
        if self._fd is None:
            self._fd = self._open_next()
        try:
            _write_all(self._fd, lines)
            if durable:
                os.fsync(self._fd)
        except OSError:
            # After a failed write or fsync the end of the file is unknown: cut it off, and go on in a new file.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            self._end_file()
            raise
        self._size += len(lines)
        if self._size >= self._max_file_bytes:
            self._end_file()

    def close_current(self) -> None:
        """Close the file being written, if there is one; the next write begins a new file.

        Raises:
            OSError: It was deleted, and cannot be written again now; it is kept open.
        """
        if self._fd is not None:
            self._find_place()
        self._end_file()

    def _end_file(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            self.closed.append(self._path)
            os.close(fd)

    def _find_place(self) -> None:
        """Make folder and file again if others are at their paths now."""
        if not _is_at(self._lock_fd, self._folder / _LOCK):
            self._folder.mkdir(mode=0o700, exist_ok=True)  # in the data folder, which must be there
            lock_fd = _lock(self._folder)
            os.close(self._lock_fd)
            self._lock_fd = lock_fd
            logger.error(
                "usage journal: %s was deleted or replaced, and is made again", self._folder
            )
        if self._fd is None or _is_at(self._fd, self._path):
            return
        lost = self._fd
        lost_path = self._path
        lost_size = self._size
        self._fd = None
        try:
            self._append(os.pread(lost, lost_size, 0), durable=True)
        except OSError:
            self._fd, self._path, self._size = lost, lost_path, lost_size  # for a later try
            raise
        os.close(lost)
        logger.error("usage journal: %s was deleted or replaced, and is written again", lost_path)

    def discard(self, path: Path, *, is_damaged: bool) -> None:
        """Delete a closed file, after its events are in the database; a damaged one is renamed to `.damaged`."""
        with contextlib.suppress(FileNotFoundError):  # somebody else deleted it
            path.rename(path.with_suffix(".damaged")) if is_damaged else path.unlink()
        self.closed.remove(path)

    def close(self) -> None:
        """Close the file being written and let go of the folder."""
        try:
            self.close_current()
        finally:
            self._end_file()
            os.close(self._lock_fd)

    def _open_next(self) -> int:
        path = self._folder / f"{self._next_number:016d}{_SUFFIX}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._next_number += 1
        try:
            _sync_folder(self._folder)
        except OSError:
            os.close(fd)
            path.unlink()
            raise
        self._path = path
        self._size = 0
        return fd


class Journal:
    """The journal for an event loop: appends wait together for one fsync in a thread. Thread: one event loop."""

    def __init__(self, files: JournalFiles) -> None:
        self._files = files
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manylora-journal")
        self._lines: list[bytes] = []
        self._waiters: list[asyncio.Future[None]] = []
        self._turn = asyncio.Lock()
        self._writer: asyncio.Task[None] | None = None
        self._prober: asyncio.Task[None] | None = None
        self._trouble: OSError | None = None
        """Error of the last write; None while writes succeed."""
        self._is_closed = False

    @classmethod
    async def open(cls, folder: Path) -> Journal:
        """Lock the folder.

        Raises:
            ConfigError: Another process uses it.
        """
        return cls(await asyncio.to_thread(JournalFiles, folder))

    @property
    def closed(self) -> tuple[Path, ...]:
        """Closed files, oldest first."""
        return tuple(self._files.closed)

    def check(self) -> None:
        """Return if what is appended will be on disk, as far as is known.

        Raises:
            CapacityError: The last write failed; code storage.full or storage.unavailable.
        """
        if self._trouble is not None:
            raise _refusal(self._trouble)

    async def append(self, payload: bytes, *more: bytes) -> None:
        """Append payloads as one group; returns when they are durable.

        Raises:
            CapacityError: They are not on disk; code storage.full or storage.unavailable.
        """
        self.append_soon(payload, *more)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def append_soon(self, *payloads: bytes) -> None:
        """Append payloads with the next group; does not wait, and causes no fsync.

        Written payloads survive the death of the process. A power cut before the next `append` may lose them.

        Raises:
            CapacityError: The journal was closed; code storage.unavailable.
        """
        if self._is_closed:
            raise CapacityError(
                "The usage journal is closed: the server is stopping.", code="storage.unavailable"
            )
        self._lines += [encode_line(payload) for payload in payloads]
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_all_groups())

    async def seal(self) -> tuple[Path, ...]:
        """Write what was appended, close the file, and return all closed files, oldest first."""
        async with self._turn:
            await self._write_group()
            await self._run(self._files.close_current)
        return self.closed

    async def discard(self, path: Path, *, is_damaged: bool) -> None:
        """Delete a closed file, after its events are in the database; a damaged one is kept for the operator."""
        await self._run(lambda: self._files.discard(path, is_damaged=is_damaged))

    async def close(self) -> None:
        """Write what was appended, and unlock the folder."""
        self._is_closed = True
        if self._prober is not None:
            self._prober.cancel()
        try:
            await self.seal()
        finally:
            await self._run(self._files.close)
            self._thread.shutdown()

    async def _write_all_groups(self) -> None:
        while self._lines:
            async with self._turn:
                await self._write_group()

    async def _write_group(self) -> None:
        """Write everything that waits as one group, and tell the waiting callers the result."""
        lines, self._lines = self._lines, []
        waiters, self._waiters = self._waiters, []
        if not lines:
            return
        try:
            await self._run(lambda: self._files.write(b"".join(lines), durable=bool(waiters)))
        except OSError as error:
            self._note_trouble(error)
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(_refusal(error))
        else:
            self._end_trouble()
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _note_trouble(self, error: OSError) -> None:
        if self._trouble is None:
            logger.error(
                "usage journal: cannot be written, so that requests are refused: %s", error
            )
            self._prober = asyncio.create_task(self._probe(), name="manylora-journal-probe")
        self._trouble = error

    def _end_trouble(self) -> None:
        if self._trouble is not None:
            self._trouble = None
            logger.info("usage journal: can be written again")

    async def _probe(self) -> None:
        """Try to write until that succeeds, here or elsewhere."""
        while self._trouble is not None:
            await asyncio.sleep(PROBE_S)
            try:
                await self._run(self._files.probe)
            except OSError as error:
                self._trouble = error
            else:
                self._end_trouble()

    async def _run(self, work: Callable[[], ResultT]) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _refusal(error: OSError) -> CapacityError:
    if error.errno in FULL:
        return CapacityError(
            "The disk that holds the usage journal is full; free some space.", code="storage.full"
        )
    return CapacityError(
        "The usage journal cannot be written now; try again.", code="storage.unavailable"
    )


def _lock(folder: Path) -> int:
    """The descriptor that keeps the folder; BlockingIOError where another process has it."""
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _is_at(fd: int, path: Path) -> bool:
    """True if the open file is the one that this path names."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _write_all(fd: int, lines: bytes) -> None:
    rest = memoryview(lines)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
