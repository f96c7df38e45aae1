"""The blob store: durable, found by digest only, checked on every read."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blob_io import CONTENT, DIGEST, read, store
from manylora.adapters.blobs import s3 as s3_blobs
from manylora.adapters.blobs.bucket import Bucket
from manylora.adapters.blobs.local import PIECE_BYTES, LocalBlobs
from manylora.adapters.blobs.s3 import S3Blobs
from manylora.adapters.blobs.store import BlobStore
from manylora.errors import AdapterUnavailableError, CapacityError
from s3_server import S3Server


@pytest.fixture
def blobs(tmp_path: Path) -> LocalBlobs:
    return LocalBlobs(tmp_path / "blobs")


@dataclass
class Kept:
    """A store, and how to get at what it keeps from behind."""

    blobs: BlobStore
    local: LocalBlobs
    s3: S3Server | None
    bucket: str = "manylora"

    def names(self) -> list[str]:
        """Of everything that outlasts this machine."""
        return files(self.local) if self.s3 is None else self.s3.keys(self.bucket)

    def spoil(self, content: bytes) -> None:
        """Put other bytes in the place of the blob."""
        if self.s3 is None:
            self.local.path(DIGEST).write_bytes(content)
        else:
            self.s3.put(self.bucket, f"sha256/{DIGEST[:2]}/{DIGEST[2:4]}/{DIGEST}", content)
            self.local.delete(DIGEST)


@pytest.fixture(params=["a folder", "S3"])
def kept(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    """Every kind of store: what follows with it holds for all."""
    local = LocalBlobs(tmp_path / "blobs")
    if request.param == "a folder":
        return Kept(local, local, None)
    s3: S3Server = request.getfixturevalue("s3")
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    bucket = s3.new_bucket()
    monkeypatch.setattr(s3_blobs, "UNCLAIMED_S", 0)
    blobs = S3Blobs(Bucket(bucket, "", allow_http=True), cache=local.root, cache_bytes=1 << 30)
    return Kept(blobs, local, s3, bucket)


def files(blobs: LocalBlobs) -> list[str]:
    return sorted(
        str(path.relative_to(blobs.root)) for path in blobs.root.rglob("*") if not path.is_dir()
    )


def read_error(blobs: BlobStore) -> str:
    with pytest.raises(AdapterUnavailableError) as caught:
        read(blobs, DIGEST)
    return caught.value.code


def test_a_blob_lies_under_its_digest_and_reads_back(kept: Kept) -> None:
    assert store(kept.blobs) == DIGEST
    assert kept.names() == [f"sha256/{DIGEST[:2]}/{DIGEST[2:4]}/{DIGEST}"]
    assert read(kept.blobs) == CONTENT
    assert list(set(kept.blobs.digests())) == [DIGEST]


def test_a_long_blob_is_read_in_pieces_with_a_pause_after_each(kept: Kept) -> None:
    content = os.urandom(2 * PIECE_BYTES + 1)
    digest = store(kept.blobs, content)
    pauses: list[None] = []
    read_back = bytearray(len(content))
    with kept.blobs.open(digest, lambda: pauses.append(None)) as blob:
        assert blob.readinto(memoryview(read_back)) == blob.size == len(content)
        assert len(pauses) == 3
        blob.verify()
    assert read_back == content


def test_a_blob_can_be_verified_without_all_of_it_having_been_asked_for(kept: Kept) -> None:
    store(kept.blobs)
    with kept.blobs.open(DIGEST) as blob:
        blob.readinto(memoryview(bytearray(10)))
        blob.verify()


def test_reading_beyond_the_end_is_told_as_a_corrupt_blob(kept: Kept) -> None:
    store(kept.blobs)
    with kept.blobs.open(DIGEST) as blob, pytest.raises(AdapterUnavailableError) as caught:
        blob.readinto(memoryview(bytearray(len(CONTENT) + 1)))
    assert caught.value.code == "adapter_blob_corrupt"


def test_nobody_else_may_look_in(blobs: LocalBlobs) -> None:
    store(blobs)
    for path in [blobs.root, *blobs.root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_the_writer_shows_size_digest_and_bytes_before_the_commit(kept: Kept) -> None:
    writer = kept.blobs.create()
    writer.write(CONTENT[:60])
    writer.write(CONTENT[60:100])
    assert (writer.size, writer.sha256()) == (100, hashlib.sha256(CONTENT[:100]).hexdigest())
    assert writer.path.read_bytes() == CONTENT[:100]
    assert kept.names() in ([], [f"tmp/{writer.path.name}"])
    writer.discard()
    writer.discard()
    assert kept.names() == files(kept.local) == []


def test_an_empty_blob_is_a_blob(kept: Kept) -> None:
    assert read(kept.blobs, store(kept.blobs, b"")) == b""


def test_committing_again_mends_a_corrupt_blob(kept: Kept) -> None:
    store(kept.blobs)
    kept.spoil(b"rot")
    store(kept.blobs)
    if kept.s3:
        kept.local.delete(DIGEST)
    assert read(kept.blobs, DIGEST) == CONTENT


def flipped(position: int) -> bytes:
    spoilt = bytearray(CONTENT)
    spoilt[position] ^= 1
    return bytes(spoilt)


@pytest.mark.parametrize(
    "spoilt",
    [
        *map(flipped, (0, 1, len(CONTENT) // 2, len(CONTENT) - 1)),
        b"",
        CONTENT[:-1],
        CONTENT + b"\0",
    ],
    ids=["first byte", "second byte", "middle", "last byte", "empty", "truncated", "grown"],
)
def test_a_spoilt_blob_is_found_on_every_read(kept: Kept, spoilt: bytes) -> None:
    store(kept.blobs)
    assert read(kept.blobs, DIGEST) == CONTENT
    kept.spoil(spoilt)
    assert read_error(kept.blobs) == "adapter_blob_corrupt"
    assert read_error(kept.blobs) == "adapter_blob_corrupt"


def test_a_missing_blob_is_told_from_a_corrupt_one(kept: Kept) -> None:
    assert read_error(kept.blobs) == "adapter_blob_missing"
    store(kept.blobs, b"another")
    assert read_error(kept.blobs) == "adapter_blob_missing"


def test_a_link_in_the_place_of_a_blob_is_not_followed(blobs: LocalBlobs, tmp_path: Path) -> None:
    store(blobs)
    (tmp_path / "elsewhere").write_bytes(CONTENT)
    blobs.path(DIGEST).unlink()
    blobs.path(DIGEST).symlink_to(tmp_path / "elsewhere")
    assert read_error(blobs) == "adapter_blob_corrupt"
    store(blobs)
    assert not blobs.path(DIGEST).is_symlink()
    assert (tmp_path / "elsewhere").read_bytes() == CONTENT


def test_a_link_in_the_place_of_a_folder_is_not_followed(blobs: LocalBlobs, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (blobs.root / "sha256" / DIGEST[:2]).symlink_to(tmp_path / "elsewhere")
    with blobs.create() as writer:
        writer.write(CONTENT)
        with pytest.raises(OSError, match=r"Not a directory|symbolic"):
            writer.commit()
    assert read_error(blobs) == "adapter_blob_corrupt"
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert not list((blobs.root / "tmp").iterdir())


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_only_plain_files_are_read(blobs: LocalBlobs, kind: str) -> None:
    blobs.path(DIGEST).parent.mkdir(parents=True)
    if kind == "folder":
        blobs.path(DIGEST).mkdir()
    else:
        os.mkfifo(blobs.path(DIGEST))
    assert read_error(blobs) == "adapter_blob_corrupt"


def test_delete_is_for_good_and_once(kept: Kept) -> None:
    store(kept.blobs)
    for _ in range(2):
        kept.blobs.delete(DIGEST)
    assert read_error(kept.blobs) == "adapter_blob_missing"


def test_a_read_in_progress_survives_a_delete(kept: Kept) -> None:
    store(kept.blobs)
    content = bytearray(len(CONTENT))
    with kept.blobs.open(DIGEST) as blob:
        kept.blobs.delete(DIGEST)
        blob.readinto(memoryview(content))
        blob.verify()
    assert content == CONTENT


def test_a_real_full_disk_is_a_capacity_error_and_leaves_nothing(blobs: LocalBlobs) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(CONTENT) // 2, hard))
    try:
        with pytest.raises(CapacityError) as caught, blobs.create() as writer:
            writer.write(CONTENT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert caught.value.code == "storage.full"
    assert files(blobs) == []


@pytest.mark.parametrize("step", ["write", "fsync", "rename", "mkdir", "open"])
def test_a_disk_that_fills_up_at_any_step_is_a_capacity_error(
    blobs: LocalBlobs, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def full(*args: object, **options: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_when_creating(
        path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        return full() if flags & os.O_CREAT else real_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, step, full_when_creating if step == "open" else full)
    with pytest.raises(CapacityError) as caught:
        store(blobs)
    assert caught.value.code == "storage.full"
    monkeypatch.undo()
    assert files(blobs) == []
    assert store(blobs) == DIGEST


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS, errno.EACCES, errno.EMFILE])
def test_other_disk_errors_are_not_called_a_full_disk(
    blobs: LocalBlobs, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def broken(fd: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(CapacityError, match=os.strerror(error)) as caught:
        store(blobs)
    assert caught.value.code == "storage.unavailable"


@pytest.mark.parametrize("lost", ["tmp", "."])
def test_a_store_whose_folder_was_deleted_says_so_and_comes_back(
    blobs: LocalBlobs, tmp_path: Path, lost: str
) -> None:
    folder, away = blobs.root / lost, tmp_path / "away"
    writer = blobs.create()
    writer.write(CONTENT)
    folder.rename(away)
    for work in (blobs.create, writer.commit, lambda: blobs.check_room(1)):
        with pytest.raises(CapacityError) as caught:
            work()
        assert caught.value.code == "storage.unavailable"
    away.rename(folder)
    blobs.check_room(1)
    assert writer.commit() == DIGEST


def test_more_than_the_disk_has_room_for_is_refused_beforehand(blobs: LocalBlobs) -> None:
    with pytest.raises(CapacityError) as caught:
        blobs.check_room(1 << 60)
    assert caught.value.code == "storage.full"
    blobs.check_room(1 << 10)
    assert files(blobs) == []


def test_the_file_is_durable_before_it_is_named_and_the_folder_after(
    blobs: LocalBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        real_fsync(fd)

    def rename(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        steps.append("rename")
        real_rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    store(blobs)
    assert steps == ["file", "folder", "folder", "rename", "folder"]


def test_leftovers_of_a_killed_process_are_swept_once_they_are_old(blobs: LocalBlobs) -> None:
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom manylora.adapters.blobs.local import LocalBlobs\n"
        "writer = LocalBlobs(Path(sys.argv[1])).create()\nwriter.write(b'x' * 1000)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", script, str(blobs.root)], check=False)
    (leftover,) = files(blobs)
    store(blobs)
    assert blobs.sweep(3600) == 0
    os.utime(blobs.root / leftover, (0, time.time() - 3601))
    assert blobs.sweep(3600) == 1
    assert read(blobs, DIGEST) == CONTENT
    assert blobs.sweep(0) == 0


def test_sweeping_does_not_follow_links(blobs: LocalBlobs, tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"x")
    (blobs.root / "tmp" / "link").symlink_to(tmp_path / "precious")
    (blobs.root / "tmp" / "folder").mkdir()
    blobs.sweep(-1)
    assert (tmp_path / "precious").exists()


def test_identical_commits_at_once_in_threads_leave_one_sound_blob(kept: Kept) -> None:
    barrier = threading.Barrier(8)

    def upload(_: int) -> str:
        with kept.blobs.create() as writer:
            writer.write(CONTENT)
            barrier.wait()
            return writer.commit()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(upload, range(8))) == [DIGEST] * 8
    assert len(kept.names()) == 1
    assert read(kept.blobs, DIGEST) == CONTENT


def commit_many(root: Path) -> None:
    blobs = LocalBlobs(root)
    for number in range(20):
        store(blobs, CONTENT + bytes([number]))


def test_identical_commits_at_once_in_processes_leave_sound_blobs(blobs: LocalBlobs) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=commit_many, args=(blobs.root,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    digests = list(blobs.digests())
    assert len(digests) == 20 == len(files(blobs))
    for digest in digests:
        read(blobs, digest)


NEARLY_DIGESTS = st.one_of(
    st.text(), st.text("09af/.\n\0"), st.text("09afABFg", min_size=64, max_size=64)
)


def is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


@settings(max_examples=100, deadline=None)
@given(digest=NEARLY_DIGESTS.filter(lambda text: not is_digest(text)))
@example(DIGEST + "\n")
@example(DIGEST.upper())
@example("../" * 21 + "a")
@example("/" + DIGEST[1:])
def test_whatever_is_no_digest_is_refused_before_any_path_is_made(
    tmp_path_factory: pytest.TempPathFactory, digest: str
) -> None:
    blobs = LocalBlobs(tmp_path_factory.getbasetemp() / "fuzzed")
    before = files(blobs)
    for method in (blobs.path, lambda name: read(blobs, name), blobs.delete, blobs.make_folders):
        with pytest.raises(ValueError, match="64 lower-case hex digits"):
            method(digest)
    assert files(blobs) == before
