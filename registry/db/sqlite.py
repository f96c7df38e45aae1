"""SQLite: WAL mode with an fsync per commit; writers take their lock at BEGIN.

A transaction that has read can always write: it never finds that another one wrote in between.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from manylora.errors import CapacityError

logger = logging.getLogger(__name__)
LOST = "db.lost"
"""Code of the error while the file is not at its path."""
BUSY_TIMEOUT_MS = 5000
MAX_READERS = 8
"""Connections, and threads, of the engine for single reads: as many as reads at the same time."""
CACHE_KIB = 512
"""Cache of each connection; the operating system caches the file for all of them."""


def open_sqlite(url: URL) -> AsyncEngine:
    """An engine for a SQLite file."""
    # No cache of prepared statements: an INSERT of many rows takes 100 kB, for each number of rows and each
    # connection. Preparing a statement again costs less than the way to the connection's thread.
    engine = create_async_engine(
        _of_existing(url.set(drivername="sqlite+aiosqlite")),
        pool_size=4,
        max_overflow=4,
        connect_args={"cached_statements": 0, "factory": _Connection},
    )
    event.listen(engine.sync_engine, "connect", _set_up_connection)
    event.listen(engine.sync_engine, "begin", _begin)
    return engine


def open_sqlite_reader(url: URL) -> Engine:
    """A second engine for the same file, for reads in our threads: aiosqlite changes threads six times a statement."""
    engine = create_engine(_of_existing(url.set(drivername="sqlite")), pool_size=MAX_READERS)
    event.listen(engine, "connect", _set_up_connection)
    return engine


def is_busy(error: DBAPIError) -> bool:
    """True if another process holds a lock that SQLite does not wait for by itself."""
    return getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY


def is_full(error: DBAPIError) -> bool:
    """True if the disk is full."""
    return getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


class DatabaseFiles:
    """The file of the database with its log and index (-wal, -shm), and whether they are at their paths. Thread-safe.

    Connections to deleted files go on as if nothing was wrong, and what they write may be gone when they close.

    Args:
        path: Where the database is.
    """

    def __init__(self, path: Path) -> None:
        self._paths = [Path(f"{path}{suffix}") for suffix in ("", "-wal", "-shm")]
        self._lost: list[str] = []
        with suppress(OSError):  # SQLite says what is wrong with the path
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        self._main = _identity(path)
        self._identities: list[tuple[int, int] | None] = []
        self._keeper: sqlite3.Connection | None = None

    def keep(self) -> None:
        """Keep a connection until `close`. While there is one, SQLite itself deletes neither log nor index."""
        self._keeper = sqlite3.connect(self._paths[0], check_same_thread=False)
        self._keeper.execute("SELECT count(*) FROM sqlite_master").fetchall()
        self._identities = [self._main, *map(_identity, self._paths[1:])]

    def close(self) -> None:
        """Close the connection, unless the database was never opened."""
        if self._keeper is not None:
            self._keeper.close()

    def look(self) -> None:
        """See which files are at the paths now, for `check`. Blocks."""
        before = self._lost
        self._lost = [
            str(path)
            for path, identity in zip(self._paths, self._identities, strict=True)
            if _identity(path) != identity
        ]
        if self._lost and not before:
            logger.error(
                "%s was deleted or replaced. Requests are refused, and their usage stays in the journal: put the same "
                "file back at its path, or restart the server to use what is there then.",
                " and ".join(self._lost),
            )
        elif before and not self._lost:
            logger.info("%s is back", " and ".join(before))

    def check(self) -> None:
        """Return if the files were at their paths when `look` was called last.

        Raises:
            CapacityError: One was deleted or replaced; code db.lost.
        """
        if self._lost:
            message = (
                "A file of the database was deleted or replaced while the server runs; "
                "its operator must put it back, or restart the server."
            )
            raise CapacityError(message, retry_after_s=5.0, code=LOST)


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of the file at a path; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _of_existing(url: URL) -> URL:
    """The URL of the file, which is not made if it is missing: an empty one would stand in for a deleted one."""
    named = url.set(database=f"file:{quote(os.path.abspath(url.database or ''))}")
    return named.update_query_dict({"mode": "rw", "uri": "true"})


class _Connection(sqlite3.Connection):
    """Ends its transaction when it is closed. By itself SQLite keeps it, and its lock, as long as a statement has rows.

    A cancelled task leaves such a statement, in a cycle of objects that may live for minutes.
    """

    def close(self) -> None:
        """Roll back, and close."""
        with suppress(
            sqlite3.Error
        ):  # closing ends the transaction of a file that cannot be read any more
            self.rollback()
        super().close()


def _set_up_connection(connection: DBAPIConnection, _record: object) -> None:
    # Else the driver begins transactions by itself: too late, and never IMMEDIATE.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql(
        "BEGIN IMMEDIATE" if connection.get_execution_options().get("manylora_writer") else "BEGIN"
    )
