"""PostgreSQL: bounded waits, snapshots for readers, one writer at a time across all servers.

A writer takes an advisory lock as its first statement, so it sees everything that was committed before. SQLite's BEGIN
IMMEDIATE gives the same. No transaction has to be retried.
"""

from __future__ import annotations

from sqlalchemy import URL, Connection, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from manylora.errors import ConfigError

CONNECT_S = 5
LOCK_MS = 5000
STATEMENT_MS = 30_000

_LOCK = 0x77656674
"""Key of the advisory lock: `manylora`."""
_FULL = ("53100", "53200")
_BUSY = "55P03"


def open_postgres(url: URL) -> AsyncEngine:
    """An engine for a PostgreSQL database.

    Raises:
        ConfigError: The driver is not installed.
    """
    try:
        from manylora.registry.db.postgres_connection import BoundedConnection
    except ImportError as error:
        message = "PostgreSQL needs its driver: pip install 'manylora[postgres]'"
        raise ConfigError(message, param="registry.database_url") from error
    settings = {
        "lock_timeout": LOCK_MS,
        "statement_timeout": STATEMENT_MS,
        "idle_in_transaction_session_timeout": 2 * STATEMENT_MS,
        "timezone": "UTC",
        "client_encoding": "UTF8",
    }
    engine = create_async_engine(
        url.set(drivername="postgresql+psycopg"),
        pool_size=4,
        max_overflow=4,
        pool_timeout=CONNECT_S,
        pool_pre_ping=True,
        hide_parameters=True,
        connect_args={
            "async_creator_fn": BoundedConnection.connect,
            "connect_timeout": CONNECT_S,
            "options": " ".join(f"-c {name}={value}" for name, value in settings.items()),
            # Else the kernel waits a quarter of an hour for a server that vanished.
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 1000 * 4 * CONNECT_S,
            "application_name": "manylora",
        },
    )
    event.listen(engine.sync_engine, "begin", _begin)
    return engine


def is_full(error: DBAPIError) -> bool:
    """True if the database's disk is full."""
    return getattr(error.orig, "sqlstate", None) in _FULL


def is_busy(error: DBAPIError) -> bool:
    """True if another server held the writers' lock for `LOCK_MS`."""
    return getattr(error.orig, "sqlstate", None) == _BUSY


def _begin(connection: Connection) -> None:
    if connection.get_execution_options().get("manylora_writer", False):
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
    else:
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
