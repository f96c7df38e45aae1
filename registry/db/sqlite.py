"""SQLite: WAL mode with an fsync per commit; writers take their lock at BEGIN.

A transaction that has read can always write: it never finds that another one wrote in between.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

BUSY_TIMEOUT_MS = 5000
MAX_READERS = 2
"""Connections, and threads, of the engine for single reads."""
CACHE_KIB = 512
"""Cache of each connection; the operating system caches the file for all of them."""


def open_sqlite(url: URL) -> AsyncEngine:
    """An engine for a SQLite file."""
    # No cache of prepared statements: an INSERT of many rows takes 100 kB, for each number of rows and each
    # connection. Preparing a statement again costs less than the way to the connection's thread.
    engine = create_async_engine(
        url.set(drivername="sqlite+aiosqlite"),
        pool_size=4,
        max_overflow=4,
        connect_args={"cached_statements": 0, "factory": _Connection},
    )
    event.listen(engine.sync_engine, "connect", _set_up_connection)
    event.listen(engine.sync_engine, "begin", _begin)
    return engine


def open_sqlite_reader(url: URL) -> Engine:
    """A second engine for the same file, for reads in our threads: aiosqlite changes threads six times a statement."""
    engine = create_engine(url.set(drivername="sqlite"), pool_size=MAX_READERS)
    event.listen(engine, "connect", _set_up_connection)
    return engine


def is_busy(error: DBAPIError) -> bool:
    """Whether another process holds a lock that SQLite does not wait for by itself."""
    return getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY


def is_full(error: DBAPIError) -> bool:
    """Whether the disk is full."""
    return getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


class _Connection(sqlite3.Connection):
    """Ends its transaction when it is closed. By itself SQLite keeps it, and its lock, as long as a statement has rows.

    A cancelled task leaves such a statement, in a cycle of objects that may live for minutes.
    """

    def close(self) -> None:
        """Roll back, and close."""
        with suppress(sqlite3.Error):  # closing ends the transaction of a file that cannot be read any more
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
