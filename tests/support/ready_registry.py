"""A SQLite registry whose tables are there already. Tests copy it: making one takes 20 ms of a CPU."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from sqlalchemy import URL

from manylora.registry.db.migrations import upgrade
from manylora.registry.db.sqlite import open_sqlite_reader


def put_registry(data_dir: Path) -> None:
    """An empty registry in this folder, unless there is one."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = data_dir / "registry.sqlite"
    if not file.exists():
        file.write_bytes(_empty_registry())


@cache
def _empty_registry() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "registry.sqlite"
        file.touch()
        engine = open_sqlite_reader(URL.create("sqlite", database=str(file)))
        with engine.begin() as connection:
            upgrade(connection)
        engine.dispose()
        return file.read_bytes()
