"""SQLite: WAL mode with an fsync per commit; writers take their lock at BEGIN.

So a transaction that has read never fails when it comes to write. Knows nothing of what the tables mean.
"""

from __future__ import annotations

import sqlite3

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

BUSY_TIMEOUT_MS = 5000
MAX_READERS = 2
"""Connections, and threads, of the engine that reads in one go."""
CACHE_KIB = 512
"""Pages of the database that each connection keeps; the system keeps them for all of them anyway."""


def open_sqlite(url: URL) -> AsyncEngine:
    """An engine for a SQLite file."""
    # Prepared statements are not kept: one with many rows takes 100 kB, each number of rows makes another, and
    # each connection has its own. Preparing again costs less than the way to the connection's thread.
    engine = create_async_engine(
        url.set(drivername="sqlite+aiosqlite"), pool_size=4, max_overflow=4, connect_args={"cached_statements": 0}
    )
    event.listen(engine.sync_engine, "connect", _set_up_connection)
    event.listen(engine.sync_engine, "begin", _begin)
    return engine


def open_sqlite_reader(url: URL) -> Engine:
    """A second engine for the same file, for reads in a thread: with aiosqlite a statement takes six ways to one."""
    engine = create_engine(url.set(drivername="sqlite"), pool_size=MAX_READERS)
    event.listen(engine, "connect", _set_up_connection)
    return engine


def is_busy(error: DBAPIError) -> bool:
    """Whether another process holds a lock that SQLite does not wait for by itself."""
    return getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY


def is_full(error: DBAPIError) -> bool:
    """Whether the disk is full."""
    return getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


def _set_up_connection(connection: DBAPIConnection, _record: object) -> None:
    # Without this the driver would begin transactions by itself, too late and never IMMEDIATE.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("weft_writer") else "BEGIN")
