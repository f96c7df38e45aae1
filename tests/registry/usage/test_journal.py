from __future__ import annotations

import asyncio
import errno
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manylora.errors import CapacityError, ConfigError
from manylora.registry.usage import journal as journals
from manylora.registry.usage.journal import Journal, JournalFiles, encode_line, read_lines

pytestmark = pytest.mark.anyio


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    opened = Journal(JournalFiles(tmp_path))
    yield opened
    await opened.close()


def _fail(code: int) -> Mock:
    return Mock(side_effect=OSError(code, os.strerror(code)))


async def _on_disk(journal: Journal) -> list[bytes]:
    return [payload for path in await journal.seal() for payload in read_lines(path, bytes)[0]]


def test_a_payload_may_not_hold_a_newline() -> None:
    with pytest.raises(ValueError, match="newlines"):
        encode_line(b"a\nb")


@given(st.lists(st.binary().filter(lambda payload: b"\n" not in payload), max_size=6), st.data())
def test_a_file_cut_anywhere_gives_the_whole_lines_before_the_cut(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes], data: st.DataObject
) -> None:
    lines = [encode_line(payload) for payload in payloads]
    content = b"".join(lines)
    cut = data.draw(st.integers(0, len(content)))
    path = tmp_path_factory.getbasetemp() / "cut.journal"
    path.write_bytes(content[:cut])
    whole = sum(len(b"".join(lines[: i + 1])) <= cut for i in range(len(lines)))
    assert read_lines(path, bytes) == (payloads[:whole], 0)


@given(st.data())
def test_a_flipped_bit_costs_its_own_line_only(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    payloads = [b'{"id":"%d"}' % i for i in range(5)]
    content = bytearray(b"".join(encode_line(payload) for payload in payloads))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path_factory.getbasetemp() / "flipped.journal"
    path.write_bytes(content)
    found, num_damaged = read_lines(path, bytes)
    assert set(found) <= set(payloads)
    assert len(found) >= 3
    assert num_damaged >= 1 or len(found) == 4


def test_only_one_process_has_the_folder(tmp_path: Path) -> None:
    files = JournalFiles(tmp_path / "usage")
    with pytest.raises(ConfigError, match="in use"):
        JournalFiles(tmp_path / "usage")
    files.close()
    JournalFiles(tmp_path / "usage").close()


def test_files_are_numbered_on_and_never_reopened(tmp_path: Path) -> None:
    for content in (b"a", b"b"):
        files = JournalFiles(tmp_path)
        files.write(encode_line(content), durable=True)
        files.close()
    assert [path.name for path in files.closed] == [
        "0000000000000001.journal",
        "0000000000000002.journal",
    ]
    files = JournalFiles(tmp_path)
    files.discard(files.closed[1], is_damaged=True)
    files.discard(files.closed[0], is_damaged=False)
    files.write(encode_line(b"c"), durable=True)
    files.close()
    assert files.closed[-1].name == "0000000000000003.journal"


def test_an_unused_journal_leaves_no_file(tmp_path: Path) -> None:
    JournalFiles(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_write_in_pieces_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, rest: write(fd, bytes(rest)[:3]))
    files = JournalFiles(tmp_path)
    files.write(encode_line(b"a long payload"), durable=True)
    files.close()
    assert read_lines(files.closed[0], bytes)[0] == [b"a long payload"]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_failed_write_leaves_what_was_there_and_nothing_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    files = JournalFiles(tmp_path)
    files.write(encode_line(b"before"), durable=True)
    really_write = os.write

    def write_half(fd: int, rest: memoryview) -> int:
        if len(rest) < 10:
            raise OSError(errno.ENOSPC, "full")
        return really_write(fd, rest[: len(rest) // 2])

    with monkeypatch.context() as patched:
        patched.setattr(os, call, write_half if call == "write" else _fail(errno.EIO))
        with pytest.raises(OSError, match=r"full|error"):
            files.write(encode_line(b"lost"), durable=True)
    files.write(encode_line(b"after"), durable=True)
    files.close()
    assert [read_lines(path, bytes)[0] for path in files.closed] == [[b"before"], [b"after"]]


def test_a_file_that_cannot_be_made_durable_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = JournalFiles(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", _fail(errno.EIO))
        with pytest.raises(OSError, match="error"):
            files.write(encode_line(b"lost"), durable=True)
    files.write(encode_line(b"kept"), durable=True)
    files.close()
    assert [read_lines(path, bytes)[0] for path in files.closed] == [[b"kept"]]


async def test_an_append_returns_when_it_is_on_disk(journal: Journal, tmp_path: Path) -> None:
    await journal.append(b"one", b"two")
    assert read_lines(tmp_path / "0000000000000001.journal", bytes)[0] == [b"one", b"two"]


async def test_those_who_wait_share_an_fsync_and_one_who_leaves_disturbs_nobody(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    await journal.append(b"makes the file")
    really_sync, synced = os.fsync, []

    def slow_sync(fd: int) -> None:
        synced.append(fd)
        time.sleep(0.02)
        really_sync(fd)

    monkeypatch.setattr(os, "fsync", slow_sync)
    waits = [asyncio.create_task(journal.append(b"%d" % i)) for i in range(500)]
    await asyncio.sleep(0)
    waits.pop(1).cancel()
    await asyncio.gather(*waits)
    assert len(synced) <= 3
    monkeypatch.undo()
    assert len(await _on_disk(journal)) == 501


async def test_what_nobody_waits_for_is_written_without_an_fsync(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    await journal.append(b"makes the file")
    monkeypatch.setattr(os, "fsync", _fail(errno.EIO))
    journal.append_soon(b"one")
    journal.append_soon(b"two")
    assert await _on_disk(journal) == [b"makes the file", b"one", b"two"]
    monkeypatch.undo()


async def test_order_is_kept_from_a_full_file_to_the_next(tmp_path: Path) -> None:
    journal = Journal(JournalFiles(tmp_path, max_file_bytes=20))
    payloads = [b"%d" % i for i in range(100)]
    for payload in payloads:
        if len(payload) == 1:
            await journal.append(payload)
        else:
            journal.append_soon(payload)
    assert await _on_disk(journal) == payloads
    assert len(journal.closed) == 6
    await journal.close()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errno.ENOSPC, "storage.full"),
        (errno.EDQUOT, "storage.full"),
        (errno.EIO, "storage.unavailable"),
    ],
)
async def test_who_waits_for_a_failed_write_is_told_why(
    journal: Journal, monkeypatch: pytest.MonkeyPatch, error: int, code: str
) -> None:
    await journal.append(b"before")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", _fail(error))
        waits = [asyncio.create_task(journal.append(b"lost %d" % i)) for i in range(3)]
        await asyncio.sleep(0)
        waits[2].cancel()
        failures = await asyncio.gather(*waits, return_exceptions=True)
    assert [getattr(failure, "code", None) for failure in failures] == [code, code, None]
    await journal.append(b"after")
    assert await _on_disk(journal) == [b"before", b"after"]


def lines_of(files: JournalFiles) -> list[bytes]:
    """All that is in the closed files; what was lost and written again may be there twice."""
    return sorted({payload for path in files.closed for payload in read_lines(path, bytes)[0]})


@pytest.mark.parametrize(
    "harm", ["file deleted", "file replaced", "folder deleted", "folder renamed", "lock deleted"]
)
@pytest.mark.parametrize("is_closing", [False, True])
def test_what_was_written_is_written_again_where_it_was_deleted(
    tmp_path: Path, harm: str, is_closing: bool
) -> None:
    files = JournalFiles(folder := tmp_path / "usage")
    files.write(encode_line(b"one"), durable=True)
    files.write(encode_line(b"two"), durable=True)
    (current,) = folder.glob("*.journal")
    if "file" in harm:
        current.unlink()
        if harm == "file replaced":
            current.write_bytes(encode_line(b"stranger"))
    elif harm == "lock deleted":
        (folder / "lock").unlink()
    else:
        folder.rename(tmp_path / "away")
        if harm == "folder deleted":
            shutil.rmtree(tmp_path / "away")
    if not is_closing:
        files.write(encode_line(b"three"), durable=True)
    files.close_current()
    assert lines_of(files) == [b"one", *([] if is_closing else [b"three"]), b"two"]
    with pytest.raises(ConfigError, match="in use"):
        JournalFiles(folder)
    files.close()


def test_a_data_folder_that_is_away_for_a_while_loses_nothing(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    files = JournalFiles(data_dir / "usage")
    files.write(encode_line(b"before"), durable=True)
    data_dir.rename(tmp_path / "elsewhere")
    works: list[Callable[[], None]] = [files.probe, files.close_current]
    for work in (lambda: files.write(encode_line(b"lost"), durable=True), *works):
        with pytest.raises(FileNotFoundError):
            work()
    (tmp_path / "elsewhere").rename(data_dir)
    files.probe()
    files.write(encode_line(b"after"), durable=True)
    files.close_current()
    assert lines_of(files) == [b"after", b"before"]
    files.close()


def test_a_folder_that_another_process_has_by_now_is_left_to_it(tmp_path: Path) -> None:
    files = JournalFiles(folder := tmp_path / "usage")
    files.write(encode_line(b"one"), durable=True)
    folder.rename(tmp_path / "away")
    other = JournalFiles(folder)
    with pytest.raises(BlockingIOError):
        files.write(encode_line(b"two"), durable=True)
    other.close()
    files.write(encode_line(b"two"), durable=True)
    files.close()
    assert lines_of(files) == [b"one", b"two"]


def test_a_file_that_cannot_be_written_again_yet_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = JournalFiles(tmp_path)
    files.write(encode_line(b"one"), durable=True)
    (tmp_path / "0000000000000001.journal").unlink()
    for call in ("open", "write", "fsync"):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, _fail(errno.ENOSPC))
            with pytest.raises(OSError, match="space"):
                files.write(encode_line(b"two"), durable=True)
    files.write(encode_line(b"two"), durable=True)
    files.close()
    assert lines_of(files) == [b"one", b"two"]


@pytest.mark.parametrize(
    ("call", "error", "code"),
    [
        ("write", errno.ENOSPC, "storage.full"),
        ("write", errno.EDQUOT, "storage.full"),
        ("write", errno.EFBIG, "storage.full"),
        ("fsync", errno.EIO, "storage.unavailable"),
        ("open", errno.EROFS, "storage.unavailable"),
        ("open", errno.EACCES, "storage.unavailable"),
        ("open", errno.EMFILE, "storage.unavailable"),
    ],
)
async def test_a_journal_that_cannot_be_written_says_so_until_it_can(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    error: int,
    code: str,
) -> None:
    monkeypatch.setattr(journals, "PROBE_S", 0.01)
    journal = await Journal.open(tmp_path)
    journal.check()
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing := _fail(error))
        for _ in range(2):
            with pytest.raises(CapacityError) as told:
                await journal.append(b"lost")
            assert told.value.code == code
        calls = failing.call_count
        async with asyncio.timeout(60):
            while failing.call_count < calls + 3:  # noqa: ASYNC110 - it is tried, and fails
                await asyncio.sleep(0.01)
        with pytest.raises(CapacityError) as refusal:
            journal.check()
        assert refusal.value.code == code
    async with asyncio.timeout(60):
        while journal._trouble is not None:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0.01)
    journal.check()
    await journal.append(b"kept")
    assert await _on_disk(journal) == [b"kept"]
    assert [record.levelname for record in caplog.records if "usage journal" in record.message] == [
        "ERROR"
    ]
    await journal.close()
    assert {name for name in os.listdir(tmp_path) if not name.endswith(".journal")} == {"lock"}


async def test_a_closed_journal_takes_nothing(tmp_path: Path) -> None:
    journal = await Journal.open(tmp_path)
    journal.append_soon(b"one")
    await journal.close()
    with pytest.raises(CapacityError):
        await journal.append(b"two")
    with pytest.raises(CapacityError):
        journal.append_soon(b"three")
    assert [read_lines(path, bytes)[0] for path in journal.closed] == [[b"one"]]
