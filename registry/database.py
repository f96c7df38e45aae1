"""The database: one async engine, short read and write transactions, errors in Weft's own words.

SQLite runs in WAL mode with an fsync per commit; writers take their lock at BEGIN, so a transaction that has read
never fails when it comes to write. Knows nothing of what the tables mean.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from sqlalchemy import Connection, event, make_url, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from weft.errors import CapacityError, ConfigError
from weft.registry.migrations import upgrade

BUSY_TIMEOUT_MS = 5000
RETRY_MS = 50
CACHE_KIB = 512
"""Pages of the database that each connection keeps; the system keeps them for all of them anyway."""

_WRITER = {"weft_writer": True}


class Database:
    """Transactions over one database.

    Thread: the event loop that opened it. Writers queue for one lock in this process, and for the database's own
    lock between processes.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._writer = asyncio.Lock()
        self._read_sessions = async_sessionmaker(engine, expire_on_commit=False)
        self._write_sessions = async_sessionmaker(engine.execution_options(**_WRITER), expire_on_commit=False)

    @classmethod
    async def open(cls, url: str | None, data_dir: Path) -> Database:
        """Connect, and bring the schema to this version's.

        Args:
            url: SQLAlchemy URL; None takes `registry.sqlite` in `data_dir`.
            data_dir: Folder for the default database.

        Raises:
            ConfigError: The URL is not one of a SQLite file, the file cannot be used, or a newer Weft wrote it.
        """
        # Prepared statements are not kept: one with many rows takes 100 kB, each number of rows makes another, and
        # each connection has its own. Preparing again costs less than the way to the connection's thread.
        engine = create_async_engine(
            async_url(url, data_dir), pool_size=4, max_overflow=4, connect_args={"cached_statements": 0}
        )
        event.listen(engine.sync_engine, "connect", _set_up_connection)
        event.listen(engine.sync_engine, "begin", _begin)
        try:
            await _upgrade(engine)
        except DBAPIError as error:
            await engine.dispose()
            raise ConfigError(
                f"registry.database_url names a database that cannot be used: {error.orig}",
                param="registry.database_url",
            ) from error
        except BaseException:
            await engine.dispose()
            raise
        return cls(engine)

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()

    async def check(self) -> None:
        """Return if the database answers.

        Raises:
            CapacityError: It does not; code database_unavailable.
        """
        async with self.read() as session:
            await session.execute(text("SELECT 1"))

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """A transaction that only reads, on one snapshot.

        Raises:
            CapacityError: The database cannot answer; code database_unavailable.
        """
        with _own_errors():
            async with self._read_sessions() as session, session.begin():
                yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """A transaction that may write; commits at the end, rolls back on an error.

        Raises:
            CapacityError: The database cannot answer; code database_unavailable, or storage_full.
        """
        with _own_errors():
            async with self._writer, self._write_sessions() as session, session.begin():
                yield session


async def _upgrade(engine: AsyncEngine) -> None:
    """Bring the schema up to date, waiting for another process that does the same."""
    tries_left = BUSY_TIMEOUT_MS // RETRY_MS
    while True:
        try:
            async with engine.execution_options(**_WRITER).begin() as connection:
                await connection.run_sync(upgrade)
        except DBAPIError as error:
            # SQLite does not wait by itself for the lock that the change to WAL mode takes.
            if not _has_code(error, sqlite3.SQLITE_BUSY) or tries_left == 0:
                raise
        else:
            return
        tries_left -= 1
        await asyncio.sleep(RETRY_MS / 1000)


def async_url(url: str | None, data_dir: Path) -> str:
    """The URL with the driver that is used for it.

    Raises:
        ConfigError: It is not the URL of a SQLite file.
    """
    if url is None:
        return f"sqlite+aiosqlite:///{data_dir.absolute() / 'registry.sqlite'}"
    try:
        parsed = make_url(url)
    except ArgumentError:
        parsed = None
    if parsed is None or parsed.get_backend_name() != "sqlite" or parsed.database in (None, "", ":memory:"):
        # The text itself may hold a password.
        raise ConfigError(
            "registry.database_url must be sqlite:///PATH with a file's path", param="registry.database_url"
        )
    return parsed.set(drivername="sqlite+aiosqlite").render_as_string(hide_password=False)


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
    writes = connection.get_execution_options().get("weft_writer", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def _own_errors() -> Iterator[None]:
    try:
        yield
    except OperationalError as error:
        if _has_code(error, sqlite3.SQLITE_FULL):
            raise CapacityError(
                "The disk that holds the database is full; free some space.", code="storage_full"
            ) from error
        raise CapacityError("The database cannot answer now; try again.", code="database_unavailable") from error


def _has_code(error: DBAPIError, code: int) -> bool:
    return getattr(error.orig, "sqlite_errorcode", None) == code
