"""The database: SQLite or PostgreSQL, short read and write transactions, errors as Manylora's errors.

Both databases have one writer at a time, and readers see one snapshot. Nothing here knows what the tables mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, Executable, make_url, text
from sqlalchemy.dialects import postgresql as postgresql_dialect
from sqlalchemy.dialects import sqlite as sqlite_dialect
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    InterfaceError,
    InternalError,
    OperationalError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session

from manylora.errors import CapacityError, ConfigError
from manylora.registry.db import postgres, sqlite
from manylora.registry.db.migrations import upgrade

RETRY_MS = 50
TURN_S = 30.0
"""Longest wait for other writers of this process: a long queue is no outage, but a queue behind a dead database is."""
CLOSE_S = 1.0
"""Seconds that reads may take when the database is closed; then they are cancelled."""
_WRITER = {"manylora_writer": True}
_CLOCKS = {
    "sqlite": "SELECT CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER)",
    "postgresql": "SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT)",
}


_is_reading = ContextVar("is_reading", default=False)
"""True while the task has a reader's place: reads within a read need none, or readers could wait for each other."""


Place = Callable[[], AbstractAsyncContextManager[None]]
"""Makes a place among those that use the database."""


class Database:
    """Transactions over one database.

    Thread: the event loop that opened it. Writers take turns in this process, and queue for the database's own lock
    between processes.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        reader: Engine | None,
        revisions: tuple[str | None, str | None],
        files: sqlite.DatabaseFiles | None,
    ) -> None:
        self.revision_before, self.revision = revisions
        """The schema's revision before the upgrade (None: the database was empty), and after it."""
        self._engine = engine
        self._files = files
        """The files of SQLite, which may be lost; None with PostgreSQL."""
        self._reader = reader
        """Engine of SQLite for single statements in a thread, which is faster; None with PostgreSQL."""
        lock = asyncio.Lock()
        self._writer_place: Place = lambda: lock
        self._reader_place: Place = nullcontext
        self._threads = ThreadPoolExecutor(sqlite.MAX_READERS, "registry-reader")
        self._reads: dict[asyncio.Future[None], asyncio.Task[object] | None] = {}
        """The reads under way: a future for the end of each, and its task."""
        self._read_sessions = async_sessionmaker(engine, expire_on_commit=False)
        self._write_sessions = async_sessionmaker(
            engine.execution_options(**_WRITER), expire_on_commit=False
        )

    @classmethod
    async def open(cls, url: str | None, data_dir: Path) -> Database:
        """Connect, and bring the schema to this version's.

        Args:
            url: `sqlite:///PATH` or `postgresql://...`; None takes `registry.sqlite` in `data_dir`.
            data_dir: Folder for the default database.

        Raises:
            ConfigError: The URL is neither, the database cannot be used, or a newer Manylora wrote it.
        """
        parsed = database_url(url, data_dir)
        is_sqlite = parsed.get_backend_name() == "sqlite"
        files = sqlite.DatabaseFiles(Path(parsed.database or "")) if is_sqlite else None
        engine = sqlite.open_sqlite(parsed) if is_sqlite else postgres.open_postgres(parsed)
        try:
            revisions = await _upgrade(engine)
            if files is not None:
                files.keep()
        except DBAPIError as error:
            await engine.dispose()
            await asyncio.sleep(
                RETRY_MS / 1000
            )  # aiosqlite's thread still tells this loop that it ends
            message = (
                f"registry.database_url names a database that cannot be used: {_reason(error)}"
            )
            raise ConfigError(message, param="registry.database_url") from error
        except BaseException:
            await engine.dispose()
            raise
        reader = sqlite.open_sqlite_reader(parsed) if is_sqlite else None
        return cls(engine, reader, revisions, files)

    def share(self, writer: Place, reader: Place) -> None:
        """Let tasks that wait for the database take turns, instead of in order of arrival.

        Args:
            writer: The place of the only writer.
            reader: A place of one that reads; there are fewer of them than connections.
        """
        self._writer_place = writer
        self._reader_place = reader

    async def close(self) -> None:
        """Wait up to `CLOSE_S` seconds for the reads under way, and close all connections."""
        reads = {
            end: task
            for end, task in self._reads.items()
            if task not in (None, asyncio.current_task())
        }
        if reads:
            _, slow = await asyncio.wait(reads, timeout=CLOSE_S)
            tasks = {task for end in slow if (task := reads[end]) is not None}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False)
        if self._files is not None:
            self._files.close()
        if self._reader is not None:
            self._reader.dispose()
        await self._engine.dispose()

    async def look_for_files(self) -> None:
        """See whether SQLite's files are still at their paths, for `check_files`."""
        if self._files is not None:
            await asyncio.to_thread(self._files.look)

    def check_files(self) -> None:
        """Return if the files were there at the last look.

        Raises:
            CapacityError: One was deleted or replaced; code db.lost.
        """
        if self._files is not None:
            self._files.check()

    async def check(self) -> object:
        """Ask the database for one row; returns if it answers.

        Raises:
            CapacityError: It does not; code db.unavailable.
        """
        return await self.rows(text("SELECT 1"))

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """A transaction that only reads, on one snapshot.

        Raises:
            CapacityError: The database cannot answer; code db.unavailable or db.lost.
        """
        self.check_files()
        end = asyncio.get_running_loop().create_future()
        self._reads[end] = asyncio.current_task()
        try:
            with _own_errors():
                async with self._place_to_read(), self._read_sessions() as session, session.begin():
                    yield session
        finally:
            del self._reads[end]
            end.set_result(None)

    @asynccontextmanager
    async def _place_to_read(self) -> AsyncIterator[None]:
        """The task's place among those that read, of which it needs one only."""
        if _is_reading.get():
            yield
            return
        async with turn(self._reader_place()):
            _is_reading.set(True)
            try:
                yield
            finally:
                _is_reading.set(False)

    async def rows(
        self, statement: Executable, values: Mapping[str, object] | None = None
    ) -> Sequence[Any]:
        """The rows of one statement, with these values for its parameters.

        Raises:
            CapacityError: The database cannot answer; code db.unavailable.
        """
        async with self.read() as session:  # it takes a connection only when it is used
            if self._reader is None:
                return (await session.execute(statement, values)).all()
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, self._rows_now, statement, values
            )

    def _rows_now(
        self, statement: Executable, values: Mapping[str, object] | None
    ) -> Sequence[Any]:
        with Session(self._reader) as session:
            return session.execute(statement, values).all()

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """A transaction that may write; commits at the end, rolls back on an error.

        Raises:
            CapacityError: The database cannot answer, or what was written is in no file that stays; code
                db.unavailable, db.lost or storage.full.
        """
        self.check_files()
        with _own_errors():
            async with (
                turn(self._writer_place()),
                self._write_sessions() as session,
                session.begin(),
            ):
                await session.connection()
                yield session
        await self.look_for_files()
        self.check_files()


async def _upgrade(engine: AsyncEngine) -> tuple[str | None, str | None]:
    """Bring the schema up to date, waiting for another process that does the same."""
    tries_left = sqlite.BUSY_TIMEOUT_MS // RETRY_MS
    while True:
        try:
            async with engine.execution_options(**_WRITER).begin() as connection:
                return await connection.run_sync(upgrade)
        except DBAPIError as error:
            # SQLite does not wait by itself for the lock that the change to WAL mode takes. Upgrades may take long.
            if not (sqlite.is_busy(error) or postgres.is_busy(error)) or tries_left == 0:
                raise
        tries_left -= 1
        await asyncio.sleep(RETRY_MS / 1000)


def database_url(url: str | None, data_dir: Path) -> URL:
    """The URL, taken apart.

    Raises:
        ConfigError: It names neither a SQLite file nor a PostgreSQL database.
    """
    if url is None:
        return URL.create("sqlite", database=str(data_dir.absolute() / "registry.sqlite"))
    try:
        parsed = make_url(url.replace("postgres://", "postgresql://", 1))
    except ArgumentError:
        parsed = None
    backend = parsed.get_backend_name() if parsed is not None else None
    if parsed is not None and backend == "sqlite" and parsed.database not in (None, "", ":memory:"):
        return parsed
    if parsed is not None and backend == "postgresql" and parsed.database:
        return parsed
    # The text itself may hold a password.
    raise ConfigError(
        "registry.database_url must be sqlite:///PATH with a file's path, or postgresql://USER:PASSWORD@HOST/DATABASE",
        param="registry.database_url",
    )


def insert_into(
    session: AsyncSession,
    table: Any,  # noqa: ANN401 - a table or its class
) -> postgresql_dialect.Insert | sqlite_dialect.Insert:
    """INSERT of the database's own dialect, which has ON CONFLICT."""
    if session.get_bind().dialect.name == "postgresql":
        return postgresql_dialect.insert(table)
    return sqlite_dialect.insert(table)


async def database_us(session: AsyncSession) -> int:
    """Microseconds since 1970 on the database's clock, which all servers share."""
    return int(await session.scalar(text(_CLOCKS[session.get_bind().dialect.name])) or 0)


def _reason(error: DBAPIError) -> str:
    """The driver's first line; drivers do not repeat passwords."""
    return (str(error.orig).strip() or type(error.orig).__name__).splitlines()[0]


@asynccontextmanager
async def turn(place: AbstractAsyncContextManager[None]) -> AsyncIterator[None]:
    """Hold a place, or a lock, that others hold during a transaction; wait at most `TURN_S` seconds for it.

    Raises:
        CapacityError: It was not free in time; code db.unavailable.
    """
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(TURN_S):
                await stack.enter_async_context(place)
        except TimeoutError as error:
            raise unavailable() from error
        yield


@contextmanager
def _own_errors() -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        if sqlite.is_full(error) or postgres.is_full(error):
            message = "The disk that holds the database is full; free some space."
            raise CapacityError(message, code="storage.full") from error
        if not isinstance(error, OperationalError | InterfaceError | InternalError):
            raise
        raise unavailable() from error
    except PoolTimeoutError as error:
        raise unavailable() from error


def unavailable() -> CapacityError:
    """The error while the database cannot answer."""
    return CapacityError("The database cannot answer now; try again.", code="db.unavailable")
