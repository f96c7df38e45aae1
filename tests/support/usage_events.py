"""The ledger's events as the database has them, one by one: the API gives sums only."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psycopg

from manylora_server import ManyloraServer


@dataclass(frozen=True, slots=True)
class Billed:
    """One usage event."""

    request_id: str
    adapter: str
    """Empty for the base."""
    status: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


def usage_events(server: ManyloraServer, database_url: str | None = None) -> list[Billed]:
    """All that was acknowledged until now, oldest first; without a URL, from the SQLite in the server's folder."""
    assert server.admin.get("/v1/usage").status_code == 200  # moves the journal into the database
    return stored_events(server.data_dir, database_url)


def stored_events(data_dir: Path, database_url: str | None = None) -> list[Billed]:
    """What the database has, oldest first."""
    question = f"SELECT {', '.join(Billed.__slots__)} FROM usage_events ORDER BY at"
    if database_url is not None:
        with psycopg.connect(database_url) as connection:
            return [Billed(*row) for row in connection.execute(question)]
    with closing(
        sqlite3.connect(f"file:{data_dir / 'registry.sqlite'}?mode=ro", uri=True)
    ) as database:
        return [Billed(*row) for row in database.execute(question)]
