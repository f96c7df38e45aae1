from __future__ import annotations

import asyncio
import random
import shutil
import socket
import sqlite3
from pathlib import Path

import psutil
import pytest
from sqlalchemy import Connection, bindparam, create_engine, inspect, select, text

from manylora.errors import CapacityError, ConfigError
from manylora.registry.db import database as database_module
from manylora.registry.db import migrations, postgres, postgres_connection, sqlite
from manylora.registry.db.database import Database
from manylora.registry.db.database import database_url as parse_url
from manylora.registry.db.migrations import upgrade
from manylora.registry.db.models import AuditRow
from manylora.registry.usage.write import insert_events
from postgres_server import KINDS, OwnPostgres, fresh_database
from registry_samples import NEWEST, NOON, usage_event

pytestmark = pytest.mark.anyio
IN_SQLITE = pytest.mark.parametrize("database_url", [None])


def _schema(connection: Connection) -> dict[str, object]:
    """All that a database knows of its tables, whatever the order in which their columns were made."""
    found = inspect(connection)
    by_bytes = text(
        "SELECT table_name, column_name FROM information_schema.columns WHERE collation_name = 'C'"
    )
    by_key = text("SELECT name FROM sqlite_master WHERE sql LIKE '%WITHOUT ROWID%'")
    is_postgres = connection.dialect.name == "postgresql"
    return {
        "more": sorted(
            tuple(row) for row in connection.execute(by_bytes if is_postgres else by_key)
        ),
        **{
            table: {
                "columns": {
                    column["name"]: (str(column["type"]), column["nullable"], column["default"])
                    for column in found.get_columns(table)
                },
                "key": found.get_pk_constraint(table),
                **{
                    kind: sorted(read(table), key=lambda each: str(each["name"]))
                    for kind, read in (
                        ("foreign", found.get_foreign_keys),
                        ("unique", found.get_unique_constraints),
                        ("indexes", found.get_indexes),
                    )
                },
            }
            for table in found.get_table_names()
        },
    }


@pytest.mark.parametrize("backend", KINDS)
def test_a_new_database_is_like_one_of_the_first_revision_after_its_upgrade(backend: str) -> None:
    """Fails after a change of the models without a revision that makes the same change."""
    old = (Path(__file__).parent / f"schema_0001.{backend}.sql").read_text()
    schemas = []
    for statements in ("", *old.split(";\n")), [""]:
        url = (
            "sqlite://"
            if backend == "sqlite"
            else fresh_database().replace("://", "+psycopg://", 1)
        )
        engine = create_engine(url)
        with engine.begin() as connection:
            for statement in filter(str.strip, statements):
                connection.exec_driver_sql(statement)
        with engine.begin() as connection:
            before, after = upgrade(connection)
            assert (before, after) == (None if statements == [""] else "0001", NEWEST)
            schemas.append(_schema(connection))
            assert len(schemas[-1]) > 15
        engine.dispose()
    assert schemas[0] == schemas[1]


REVISION = """
import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("tenants", sa.Column("note", sa.String(64), nullable=True))
    op.create_index("ix_tenants_note", "tenants", ["note"])
"""


@pytest.mark.parametrize("ending", ["", "    raise ValueError('no further')\n"])
async def test_a_later_revision_is_applied_to_a_database_as_a_whole_or_not_at_all(
    database: Database,
    tmp_path: Path,
    database_url: str | None,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
) -> None:
    folder = tmp_path / "migrations"
    shutil.copytree(Path(migrations.__file__).parent, folder)
    (folder / "versions" / "0002_note.py").write_text(REVISION + ending)
    monkeypatch.setattr(migrations, "__file__", str(folder / "__init__.py"))
    if ending:
        with pytest.raises(ValueError, match="no further"):
            await Database.open(database_url, tmp_path)
        monkeypatch.undo()
    upgraded = await Database.open(database_url, tmp_path)
    newest = NEWEST if ending else "0002"
    assert (upgraded.revision_before, upgraded.revision) == (NEWEST, newest)
    async with upgraded.read() as session:
        connection = await session.connection()
        columns = await connection.run_sync(lambda on: inspect(on).get_columns("tenants"))
    assert ("note" in {column["name"] for column in columns}) == (not ending)
    await upgraded.close()


async def test_two_openers_at_once_both_find_the_schema(
    tmp_path: Path, database_url: str | None
) -> None:
    databases = await asyncio.gather(*(Database.open(database_url, tmp_path) for _ in range(2)))
    for database in databases:
        await database.check()
        await database.close()
    again = await Database.open(database_url, tmp_path)
    async with again.read() as session:
        assert await session.scalar(text("SELECT version_num FROM alembic_version")) == NEWEST
    await again.close()


@IN_SQLITE
async def test_a_cancelled_writer_lets_go_of_the_lock(database: Database) -> None:
    """It is cut off in a statement that has rows to give, which SQLite goes on with until somebody has them."""
    slow = """
        WITH RECURSIVE count (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM count WHERE n < 200000)
        INSERT INTO usage_months SELECT n, '', '', 0, 0 FROM count RETURNING month
    """

    async def write() -> None:
        async with database.write() as session:
            await session.execute(text(slow))

    for _ in range(3):
        writing = asyncio.create_task(write())
        await asyncio.sleep(0.02)
        assert not writing.done()
        writing.cancel()
        await asyncio.wait({writing})
        async with database.write() as session:
            assert await session.scalar(text("SELECT count(*) FROM usage_months")) == 0


async def test_a_server_that_starts_waits_for_the_upgrade_of_another_one(
    database: Database, tmp_path: Path, database_url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "LOCK_MS", 100)
    async with database.write():  # as during an upgrade
        opening = asyncio.create_task(Database.open(database_url, tmp_path))
        done, _ = await asyncio.wait({opening}, timeout=0.3)
        assert not done
    opened = await opening
    await opened.check()
    await opened.close()


@pytest.mark.parametrize("revision", ["9999", "0099"])
async def test_a_database_with_an_unknown_schema_is_refused_and_left_as_it_is(
    database: Database, tmp_path: Path, database_url: str | None, revision: str
) -> None:
    async with database.write() as session:
        await session.execute(text(f"UPDATE alembic_version SET version_num = '{revision}'"))
        await session.execute(text("DROP TABLE files"))
    for _ in range(2):
        with pytest.raises(
            ConfigError,
            match=f"has schema {revision}.* newer Manylora or a pre-release .*empty database",
        ):
            await Database.open(database_url, tmp_path)
    async with database.read() as session:
        assert await session.scalar(text("SELECT version_num FROM alembic_version")) == revision


@IN_SQLITE
async def test_every_connection_is_durable_and_checks_references(database: Database) -> None:
    async def pragmas() -> list[object]:
        names = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        async with database.read() as session:
            return [await session.scalar(text(f"PRAGMA {name}")) for name in names]

    assert await asyncio.gather(*(pragmas() for _ in range(3))) == [["wal", 2, 1, 5000]] * 3


@pytest.mark.slow
async def test_batches_of_many_sizes_leave_no_memory_behind(database: Database) -> None:
    process, sizes, start = psutil.Process(), random.Random(1), 0
    for batch in range(200):
        if batch == 20:
            before = process.memory_info().rss
        stop = start + sizes.randint(1, 120)
        async with database.write() as session:
            await insert_events(
                session, [usage_event(f"use_{number}") for number in range(start, stop)]
            )
        start = stop
    assert process.memory_info().rss - before < 5_000_000


async def test_a_database_locked_by_another_process_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_MS", 10)
    database = await Database.open(None, tmp_path)
    other = sqlite3.connect(tmp_path / "registry.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(CapacityError) as caught:
        async with database.write() as session:
            await session.execute(text("SELECT 1"))
    assert caught.value.code == "db.unavailable"
    other.execute("ROLLBACK")
    other.close()
    async with database.write() as session:
        await session.execute(text("SELECT 1"))
    await database.close()


@IN_SQLITE
async def test_a_full_disk_is_told_as_such(database: Database) -> None:
    async def fill() -> None:
        async with database.write() as session:
            pages = await session.scalar(text("PRAGMA page_count"))
            await session.execute(text(f"PRAGMA max_page_count = {pages}"))
            await session.execute(text("CREATE TABLE big AS SELECT zeroblob(1000000)"))

    with pytest.raises(CapacityError) as caught:
        await fill()
    assert caught.value.code == "storage.full"


def test_both_spellings_of_postgresql_are_taken(tmp_path: Path) -> None:
    assert parse_url(None, tmp_path).database == f"{tmp_path}/registry.sqlite"
    for scheme in ("postgres", "postgresql", "postgresql+psycopg"):
        parsed = parse_url(f"{scheme}://u:p@h:5433/db", tmp_path)
        assert (parsed.get_backend_name(), parsed.host, parsed.port, parsed.database) == (
            "postgresql",
            "h",
            5433,
            "db",
        )


@pytest.mark.parametrize(
    "url",
    [
        "",
        "nonsense",
        "sqlite://",
        "sqlite:///:memory:",
        "mysql://u:hunter2@h/db",
        "postgresql://u:hunter2@h",
    ],
)
def test_other_urls_are_refused_without_telling_a_password(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url, tmp_path)
    assert "hunter2" not in caught.value.message


async def test_a_postgresql_that_does_not_answer_is_told_without_its_password(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        await Database.open("postgresql://manylora:hunter2@127.0.0.1:1/manylora", tmp_path)
    assert "hunter2" not in caught.value.message


async def test_a_listener_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "CONNECT_S", 2)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(ConfigError, match="cannot be used"),
    ):
        async with asyncio.timeout(60):
            await Database.open(
                f"postgresql://manylora@127.0.0.1:{silent.getsockname()[1]}/manylora", tmp_path
            )


async def test_a_reader_cannot_write_and_a_lock_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "LOCK_MS", 50)
    url = fresh_database()
    database, other = await Database.open(url, tmp_path), await Database.open(url, tmp_path)
    with pytest.raises(CapacityError):
        async with database.read() as session:
            await session.execute(text("CREATE TABLE no (n INTEGER)"))
    async with database.write():
        with pytest.raises(CapacityError) as caught:
            async with other.write():
                pytest.fail("two writers at once")
    assert caught.value.code == "db.unavailable"
    for opened in (database, other):
        await opened.close()


@pytest.mark.slow
async def test_a_server_that_hangs_is_given_up_and_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_connection, "LIVENESS_S", 0.2)
    monkeypatch.setattr(postgres_connection, "ANSWER_S", 0.5)
    monkeypatch.setattr(postgres, "CONNECT_S", 2)
    with OwnPostgres() as server:
        database = await Database.open(server.url, tmp_path)
        await asyncio.gather(database.check(), database.check())  # two connections

        async def ask_until_it_hangs() -> None:
            async with database.read() as session:
                while True:
                    await session.execute(text("SELECT 1"))
                    server.freeze()

        for ask in (
            ask_until_it_hangs,
            database.check,
            database.check,
        ):  # in a transaction, idle, and to be made
            with pytest.raises(CapacityError) as caught:
                async with asyncio.timeout(60):
                    await ask()
            assert caught.value.code == "db.unavailable"
        server.thaw()
        await database.check()
        await database.close()


async def test_a_reader_does_not_wait_for_a_writer_and_another_writer_not_without_end(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "TURN_S", 0.05)
    async with database.write() as session:
        await session.execute(text("CREATE TABLE half_done (n INTEGER)"))
        await asyncio.wait_for(database.check(), timeout=60)
        with pytest.raises(CapacityError) as caught:
            async with database.write():
                pytest.fail("two writers at once")
    assert caught.value.code == "db.unavailable"
    async with database.write():
        pass


async def test_connections_that_the_server_ended_are_replaced(tmp_path: Path) -> None:
    database = await Database.open(fresh_database(), tmp_path)
    await database.check()
    async with database.write() as session:
        others = text(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        )
        await session.execute(others)
    await database.check()
    await database.close()


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "registry.sqlite").write_bytes(
        b"not a database, but long enough to be looked at" * 10
    )
    with pytest.raises(ConfigError, match="cannot be used"):
        await Database.open(None, tmp_path)


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_a_deleted_file_is_neither_written_nor_made_again_and_may_come_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_replaced: bool
) -> None:
    path, away = tmp_path / "registry.sqlite", tmp_path / "away.sqlite"
    database = await Database.open(None, tmp_path)

    async def put(revision: str) -> None:
        async with database.write() as session:
            await session.execute(
                text("UPDATE alembic_version SET version_num = :it"), {"it": revision}
            )

    await put("before")
    path.rename(away)
    if is_replaced:
        path.write_bytes(b"")
    with pytest.raises(
        CapacityError
    ) as unseen:  # it went into the file, which has no name that would be opened again
        await put("unseen")
    assert unseen.value.code == "db.lost"
    for work in (put("lost"), database.check()):
        with pytest.raises(CapacityError) as refusal:
            await work
        assert refusal.value.code == "db.lost"
    assert path.exists() == is_replaced
    away.replace(path)
    await database.look_for_files()
    await database.check()
    await put("after")
    await database.close()
    assert (
        len([record for record in caplog.records if "was deleted or replaced" in record.message])
        == 1
    )


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
async def test_a_deleted_log_or_index_is_noticed_and_a_restart_has_what_was_confirmed(
    tmp_path: Path, suffix: str
) -> None:
    database = await Database.open(None, tmp_path)
    async with database.write() as session:
        session.add(AuditRow(at=NOON, actor="a", action="b", tenant="c", target="d", detail={}))
    await database.check()
    (tmp_path / f"registry.sqlite{suffix}").unlink()
    await database.look_for_files()
    with pytest.raises(CapacityError) as refusal:
        await database.check()
    assert refusal.value.code == "db.lost"
    await database.close()
    again = await Database.open(None, tmp_path)
    assert await again.rows(select(AuditRow.actor)) == [("a",)]
    await again.close()


async def test_a_log_that_comes_back_is_used_again(tmp_path: Path) -> None:
    database = await Database.open(None, tmp_path)
    log = tmp_path / "registry.sqlite-wal"
    away = tmp_path / "away"
    log.rename(away)
    await database.look_for_files()
    with pytest.raises(CapacityError):
        database.check_files()
    away.rename(log)
    await database.look_for_files()
    await database.check()
    await database.close()


async def test_files_are_not_lost_when_all_connections_were_closed(tmp_path: Path) -> None:
    database = await Database.open(None, tmp_path)
    assert database._reader is not None
    for _ in range(2):
        await database._engine.dispose()
        database._reader.dispose()
        await database.look_for_files()
        await database.check()
    await database.close()
    assert not (tmp_path / "registry.sqlite-wal").exists()


async def test_no_connection_makes_an_empty_database(tmp_path: Path) -> None:
    database = await Database.open(None, tmp_path)
    await database._engine.dispose()
    (tmp_path / "registry.sqlite").unlink()
    with pytest.raises(CapacityError) as refusal:
        await database.check()
    assert refusal.value.code == "db.unavailable"  # until somebody looks
    assert not (tmp_path / "registry.sqlite").exists()
    await database.close()


async def test_opening_waits_for_another_process_that_opens(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "registry.sqlite", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    opening = asyncio.create_task(Database.open(None, tmp_path))
    await asyncio.sleep(0.2)
    other.execute("ROLLBACK")
    other.close()
    await (await opening).close()


async def test_opening_gives_up_on_a_database_that_stays_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_MS", 60)
    other = sqlite3.connect(tmp_path / "registry.sqlite", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(ConfigError, match="locked"):
        await Database.open(None, tmp_path)
    other.close()


async def test_what_is_being_read_ends_before_the_connections_do(database: Database) -> None:
    begun = asyncio.Event()

    async def read(seconds: float) -> int:
        async with database.read() as session:
            begun.set()
            await asyncio.sleep(seconds)
            return int(await session.scalar(text("SELECT 1")) or 0)

    quick = asyncio.create_task(read(0.05))
    slow = asyncio.create_task(read(60))
    await begun.wait()
    await database.close()
    assert await quick == 1
    assert slow.cancelled()


async def test_rows_are_those_that_were_committed_and_come_before_the_connections_close(
    database: Database,
) -> None:
    async with database.write() as session:
        session.add(
            AuditRow(at=NOON, actor="a", action="b", tenant="c", target="d", detail={"e": 1})
        )
    of_actor = select(AuditRow, AuditRow.target).where(AuditRow.actor == bindparam("who"))
    assert await database.rows(of_actor, {"who": "nobody"}) == []
    ((entry, target),) = await database.rows(of_actor, {"who": "a"})
    assert (entry.action, entry.detail, target) == ("b", {"e": 1}, "d")
    reading = [asyncio.create_task(database.rows(select(AuditRow.id))) for _ in range(20)]
    await asyncio.sleep(0)
    await database.close()
    assert [len(await task) for task in reading] == [1] * 20


async def test_a_url_that_names_the_driver_is_read_in_both_ways(tmp_path: Path) -> None:
    database = await Database.open(f"sqlite+aiosqlite:///{tmp_path}/own.sqlite", tmp_path)
    assert await database.rows(select(AuditRow)) == []
    async with database.read() as session:
        assert (await session.execute(select(AuditRow))).all() == []
    await database.close()


async def test_a_read_within_a_read_does_not_end_the_outer_one(database: Database) -> None:
    is_inner_done = asyncio.Event()

    async def read() -> int:
        async with database.read() as session:
            async with database.read() as inner:
                await inner.execute(text("SELECT 1"))
            is_inner_done.set()
            await asyncio.sleep(0.05)
            return int(await session.scalar(text("SELECT 1")) or 0)

    reading = asyncio.create_task(read())
    await is_inner_done.wait()
    await database.close()
    assert reading.done()
    assert await reading == 1


async def test_closing_waits_for_reads_and_not_for_what_their_tasks_do_next(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "CLOSE_S", 60)
    is_reading, is_closed = asyncio.Event(), asyncio.Event()

    async def read_and_go_on() -> str:
        async with database.read() as session:
            is_reading.set()
            await session.execute(text("SELECT 1"))
        await is_closed.wait()
        return "went on"

    task = asyncio.create_task(read_and_go_on())
    await is_reading.wait()
    async with asyncio.timeout(30):
        await database.close()
    is_closed.set()
    assert await task == "went on"
