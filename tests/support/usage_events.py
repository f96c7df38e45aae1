"""The ledger's events as the database has them, one by one: the API gives sums only."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass

from weft_server import WeftServer


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


def usage_events(server: WeftServer) -> list[Billed]:
    """All that was acknowledged until now, oldest first."""
    assert server.admin.get("/v1/usage").status_code == 200  # moves the journal into the database
    columns = ", ".join(Billed.__slots__)
    with closing(sqlite3.connect(f"file:{server.data_dir / 'registry.sqlite'}?mode=ro", uri=True)) as database:
        return [Billed(*row) for row in database.execute(f"SELECT {columns} FROM usage_events ORDER BY at")]
