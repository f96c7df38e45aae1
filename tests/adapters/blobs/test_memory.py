"""Blobs in memory: sealed, counted, shared with another process, and gone without a trace."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from blob_io import CONTENT, DIGEST
from manylora.adapters.blobs.memory import MemoryBlobs
from manylora.errors import AdapterUnavailableError, CapacityError


def keep(blobs: MemoryBlobs, content: bytes = CONTENT) -> str:
    with blobs.create() as writer:
        writer.write(content)
        writer.prepare()
        return writer.commit()


def content_of(blobs: MemoryBlobs, digest: str) -> bytes | None:
    try:
        with blobs.open(digest) as reader:
            buffer = bytearray(reader.size)
            reader.readinto(memoryview(buffer))
            reader.verify()
            return bytes(buffer)
    except AdapterUnavailableError as error:
        if error.code != "adapter_blob_missing":
            raise
        return None


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_blob_is_read_as_often_as_asked_until_it_is_deleted() -> None:
    blobs = MemoryBlobs(1 << 20)
    assert keep(blobs) == DIGEST
    assert [content_of(blobs, DIGEST) for _ in range(2)] == [CONTENT, CONTENT]
    assert (DIGEST in blobs, blobs.digests(), blobs.num_bytes) == (True, [DIGEST], len(CONTENT))
    blobs.delete(DIGEST)
    blobs.delete(DIGEST)
    assert (content_of(blobs, DIGEST), blobs.place(DIGEST), blobs.num_bytes) == (None, None, 0)


def test_a_reader_goes_on_while_its_blob_is_deleted() -> None:
    blobs = MemoryBlobs(1 << 20)
    keep(blobs)
    with blobs.open(DIGEST) as reader:
        blobs.delete(DIGEST)
        buffer = bytearray(reader.size)
        reader.readinto(memoryview(buffer))
    assert bytes(buffer) == CONTENT


def test_what_is_committed_cannot_be_changed() -> None:
    blobs = MemoryBlobs(1 << 20)
    keep(blobs)
    place = blobs.place(DIGEST)
    assert place is not None
    with pytest.raises(OSError, match="not permitted"):
        os.truncate(place.path, 1)
    with (
        open(place.path, "r+b", buffering=0) as file,
        pytest.raises(OSError, match="not permitted"),
    ):
        file.write(b"x")


def test_the_limit_counts_what_is_being_written_and_gives_back_what_is_discarded() -> None:
    blobs, before = MemoryBlobs(100), num_open()
    with blobs.create() as first:
        first.write(b"x" * 60)
        with blobs.create() as second, pytest.raises(CapacityError) as refused:
            second.write(b"y" * 60)
        assert refused.value.code == "storage.full"
        assert blobs.num_bytes == 60
    assert (blobs.num_bytes, num_open()) == (0, before)


def test_the_same_bytes_twice_are_held_once() -> None:
    blobs, before = MemoryBlobs(1 << 20), num_open()
    keep(blobs)
    keep(blobs)
    assert (blobs.num_bytes, num_open()) == (len(CONTENT), before + 1)


def test_another_process_opens_it_and_keeps_it() -> None:
    blobs, other = MemoryBlobs(1 << 20), MemoryBlobs(0)
    keep(blobs)
    place = blobs.place(DIGEST)
    assert place is not None
    program = f"import sys; sys.stdout.buffer.write(open({place.path!r}, 'rb').read())"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
        == CONTENT
    )
    other.adopt(DIGEST, place)
    blobs.delete(DIGEST)
    assert content_of(other, DIGEST) == CONTENT


def test_a_descriptor_that_means_another_blob_by_now_is_not_taken_for_the_first() -> None:
    blobs, other = MemoryBlobs(1 << 20), MemoryBlobs(0)
    keep(blobs)
    place = blobs.place(DIGEST)
    assert place is not None
    blobs.delete(DIGEST)
    with pytest.raises(FileNotFoundError):
        other.adopt(DIGEST, place)
    second = keep(blobs, b"other")
    reused = blobs.place(second)
    assert reused is not None
    assert reused.path == place.path
    with pytest.raises(FileNotFoundError):
        other.adopt(DIGEST, place)
    assert other.digests() == []


def test_threads_that_read_and_delete_do_not_meet_a_strange_file() -> None:
    blobs, wrong = MemoryBlobs(1 << 24), list[bytes]()
    stopped = threading.Event()

    def read() -> None:
        while not stopped.is_set():
            found = content_of(blobs, DIGEST)
            if found not in (None, CONTENT):
                wrong.append(found or b"")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(300):
        keep(blobs)
        keep(blobs, b"other %d" % number)
        blobs.delete(DIGEST)
    stopped.set()
    for reader in readers:
        reader.join()
    assert wrong == []
