"""Blobs in S3: what a bucket and its copies add to the contract that test_blobs.py holds every store to."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import obstore
import pytest

from blob_io import CONTENT, DIGEST, read, store
from manylora.adapters.blobs import bucket as buckets
from manylora.adapters.blobs.bucket import PART_BYTES, Bucket
from manylora.adapters.blobs.local import LocalBlobs
from manylora.adapters.blobs.s3 import S3Blobs
from manylora.adapters.blobs.store import BlobStore, open_blobs
from manylora.config import RegistryConfig
from manylora.errors import AdapterUnavailableError, CapacityError, ConfigError
from s3_server import ACCESS_KEY, SECRET_KEY, S3Server

KEY = f"team/a/sha256/{DIGEST[:2]}/{DIGEST[2:4]}/{DIGEST}"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def environment(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def bucket(s3: S3Server) -> str:
    return s3.new_bucket()


@pytest.fixture
def blobs(bucket: str, tmp_path: Path) -> S3Blobs:
    return s3_blobs_in(bucket, tmp_path / "cache")


def s3_blobs_in(bucket: str, cache: Path, *, cache_bytes: int = 1 << 30) -> S3Blobs:
    opened = Bucket(bucket, "team/a", allow_http=True)
    return S3Blobs(opened, cache=cache, cache_bytes=cache_bytes)


def read_error(blobs: BlobStore, sha256: str = DIGEST) -> str:
    with pytest.raises(CapacityError) as caught:
        read(blobs, sha256)
    assert SECRET_KEY not in caught.value.message
    return caught.value.code


def copies(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_a_blob_of_many_parts_comes_back_on_another_machine(
    blobs: S3Blobs, bucket: str, s3: S3Server, tmp_path: Path
) -> None:
    content = os.urandom(2 * PART_BYTES + 12345)
    digest = store(blobs, content)
    assert s3.unfinished_uploads(bucket) == 0
    elsewhere = s3_blobs_in(bucket, tmp_path / "elsewhere")
    assert read(elsewhere, digest) == content
    assert copies(tmp_path / "elsewhere") == {digest}
    assert read(elsewhere, digest) == content


def test_nothing_is_stored_before_prepare_and_nothing_is_named_before_commit(
    blobs: S3Blobs, bucket: str, s3: S3Server, tmp_path: Path
) -> None:
    with blobs.create() as writer:
        writer.write(CONTENT)
        assert s3.keys(bucket) == []
        writer.prepare()
        assert s3.get(bucket, KEY) == CONTENT
        assert DIGEST not in copies(tmp_path / "cache")
        assert writer.commit() == DIGEST
    assert copies(tmp_path / "cache") == {DIGEST}


def test_what_was_deleted_between_prepare_and_commit_is_stored_again(
    blobs: S3Blobs, bucket: str, s3: S3Server
) -> None:
    with blobs.create() as writer:
        writer.write(CONTENT)
        writer.prepare()
        blobs.delete(DIGEST)
        writer.commit()
    assert s3.get(bucket, KEY) == CONTENT


def test_bytes_written_after_prepare_are_stored_too(
    blobs: S3Blobs, bucket: str, s3: S3Server
) -> None:
    with blobs.create() as writer:
        writer.write(CONTENT[:100])
        writer.prepare()
        writer.write(CONTENT[100:])
        assert writer.commit() == DIGEST
    assert s3.get(bucket, KEY) == CONTENT


def test_an_object_with_a_flipped_bit_is_never_served_nor_kept(
    blobs: S3Blobs, bucket: str, s3: S3Server, tmp_path: Path
) -> None:
    store(blobs)
    s3.flip_a_bit(bucket, KEY)
    elsewhere = s3_blobs_in(bucket, tmp_path / "elsewhere")
    for _ in range(2):
        with pytest.raises(AdapterUnavailableError) as caught, elsewhere.open(DIGEST):
            pytest.fail("it was opened")
        assert caught.value.code == "adapter_blob_corrupt"
        assert copies(tmp_path / "elsewhere") == set()
    store(elsewhere)  # uploading it again repairs it for all
    assert read(s3_blobs_in(bucket, tmp_path / "third")) == CONTENT


def test_a_corrupt_copy_is_told_once_and_mended_by_the_next_read(
    blobs: S3Blobs, tmp_path: Path
) -> None:
    store(blobs)
    (copy,) = (path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    spoilt = bytearray(CONTENT)
    spoilt[len(spoilt) // 3] ^= 4
    copy.write_bytes(spoilt)
    assert read_error(blobs) == "adapter_blob_corrupt"
    assert copies(tmp_path / "cache") == set()
    assert read(blobs) == CONTENT


def test_a_peek_reads_the_beginning_and_makes_no_copy(
    blobs: S3Blobs, bucket: str, tmp_path: Path
) -> None:
    store(blobs)
    elsewhere = s3_blobs_in(bucket, tmp_path / "elsewhere")
    assert elsewhere.peek(DIGEST, 10) == blobs.peek(DIGEST, 10) == (CONTENT[:10], len(CONTENT))
    assert elsewhere.peek(DIGEST, 1 << 20) == (CONTENT, len(CONTENT))
    assert copies(tmp_path / "elsewhere") == set()
    with pytest.raises(AdapterUnavailableError) as caught:
        elsewhere.peek("0" * 64, 10)
    assert caught.value.code == "adapter_blob_missing"


def test_the_copies_used_longest_ago_go_first(bucket: str, tmp_path: Path) -> None:
    blobs = s3_blobs_in(bucket, tmp_path / "cache", cache_bytes=3 * MIB)
    digests = []
    for number in range(3):
        digests.append(store(blobs, bytes([number]) * MIB))
        os.utime(LocalBlobs(tmp_path / "cache").path(digests[-1]), (number, number))
    assert copies(tmp_path / "cache") == set(digests)
    read(blobs, digests[0])
    fourth = store(blobs, b"3" * MIB)
    assert copies(tmp_path / "cache") == {digests[0], digests[2], fourth}
    assert (
        read(blobs, digests[1]) == bytes([1]) * MIB
    )  # fetched again, which takes the room of another
    assert copies(tmp_path / "cache") == {digests[0], digests[1], fourth}


def test_a_copy_that_is_being_read_can_be_read_to_its_end(bucket: str, tmp_path: Path) -> None:
    blobs = s3_blobs_in(bucket, tmp_path / "cache", cache_bytes=0)
    store(blobs)
    with blobs.open(DIGEST) as blob:
        other = store(blobs, b"another")
        assert copies(tmp_path / "cache") == {other}
        content = bytearray(blob.size)
        blob.readinto(memoryview(content))
        blob.verify()
    assert content == CONTENT


def test_many_readers_of_one_blob_fetch_it_once(
    blobs: S3Blobs, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = store(blobs, content := os.urandom(PART_BYTES + 1))
    elsewhere = s3_blobs_in(bucket, tmp_path / "elsewhere")
    asked: list[Any] = []
    real_get = obstore.get

    def get(*args: Any, **options: Any) -> Any:
        asked.append(options["options"]["range"])
        return real_get(*args, **options)

    monkeypatch.setattr(obstore, "get", get)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda _: read(elsewhere, digest), range(8))) == [content] * 8
    assert asked == [(0, PART_BYTES), (PART_BYTES, 2 * PART_BYTES)]


def test_readers_in_a_cache_that_holds_nothing_all_get_their_bytes(
    blobs: S3Blobs, bucket: str, tmp_path: Path
) -> None:
    contents = {
        store(blobs, content): content
        for content in (bytes([number]) * 100_000 for number in range(4))
    }
    tight = s3_blobs_in(bucket, tmp_path / "tight", cache_bytes=0)
    wrong: list[str] = []

    def work(_: int) -> None:
        for digest, content in contents.items():
            try:
                if read(tight, digest) != content:
                    wrong.append(digest)
            except CapacityError as error:
                if error.code != "storage.unavailable":
                    wrong.append(error.code)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert wrong == []
    assert len(copies(tmp_path / "tight")) <= 4


def test_objects_that_another_server_may_be_publishing_are_not_told_for_the_sweep(
    blobs: S3Blobs, bucket: str, s3: S3Server, tmp_path: Path
) -> None:
    store(blobs)
    s3.put(bucket, "team/a/sha256/readme.txt", b"not ours")
    assert list(blobs.digests()) == []
    assert list(s3_blobs_in(bucket, tmp_path / "elsewhere").digests()) == []
    s3.make_older(bucket, 3590)
    assert list(blobs.digests()) == []
    s3.make_older(bucket, 20)
    assert set(blobs.digests()) == {DIGEST}
    assert list(s3_blobs_in(bucket, tmp_path / "elsewhere").digests()) == [DIGEST]


def test_copies_without_an_object_are_told_for_the_sweep(
    blobs: S3Blobs, bucket: str, s3: S3Server
) -> None:
    store(blobs)
    s3.http.delete(f"/{bucket}/{KEY}")
    assert list(blobs.digests()) == [DIGEST]


def test_a_probe_leaves_nothing(blobs: S3Blobs, bucket: str, s3: S3Server) -> None:
    blobs.probe()
    assert s3.keys(bucket) == []


def test_a_missing_bucket_is_said_plainly(tmp_path: Path) -> None:
    blobs = s3_blobs_in("no-such-bucket", tmp_path / "cache")
    with pytest.raises(
        ConfigError, match=r"s3://no-such-bucket/team/a cannot be used \(NoSuchBucket\)"
    ):
        blobs.probe()
    assert read_error(blobs) == "storage.unavailable"
    with pytest.raises(CapacityError) as caught:
        store(blobs)
    assert caught.value.code == "storage.unavailable"
    assert copies(tmp_path / "cache") == set()


def test_wrong_keys_are_said_plainly_and_never_shown(
    blobs: S3Blobs, s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG), s3.refusing_keys():
        with pytest.raises(ConfigError, match="InvalidAccessKeyId") as caught:
            blobs.probe()
        assert read_error(blobs) == "storage.unavailable"
        with pytest.raises(CapacityError):
            store(blobs)
        with pytest.raises(CapacityError):
            list(blobs.digests())
        with pytest.raises(CapacityError):
            blobs.delete(DIGEST)
    shown = " ".join(
        record.getMessage() for record in caplog.records if record.name.startswith("manylora")
    )
    assert "InvalidAccessKeyId" in shown
    shown += str(caught.value) + repr(blobs)
    assert SECRET_KEY not in shown
    assert ACCESS_KEY not in shown
    store(blobs)  # and works again at once


def test_a_server_that_is_gone_is_told_and_not_asked_by_everybody(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    store(LocalBlobs(tmp_path / "cache"), b"a copy")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = closed.getsockname()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{address[1]}")
        monkeypatch.setattr(buckets, "REQUEST_S", 0.5)
        monkeypatch.setattr(buckets, "time", SimpleNamespace(monotonic=lambda: now_s))
        blobs = s3_blobs_in(bucket, tmp_path / "cache")
        with pytest.raises(CapacityError) as caught:
            blobs.probe()
        assert (caught.value.code, caught.value.retry_after_s) == (
            "storage.unavailable",
            buckets.DOWN_S,
        )
        closed.listen(1)
        closed.setblocking(False)
        now_s += buckets.DOWN_S - 0.1
        for _ in range(100):
            assert read_error(blobs) == "storage.unavailable"
        assert read(blobs, hashlib.sha256(b"a copy").hexdigest()) == b"a copy"
        with pytest.raises(BlockingIOError):
            closed.accept()
        now_s += 1
        assert read_error(blobs) == "storage.unavailable"
        closed.accept()[0].close()


def test_nobody_waits_for_a_server_that_never_answers(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "DOWN_S", 0.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(buckets, "REQUEST_S", 0.5)
        monkeypatch.setattr(buckets, "CONNECT_S", 0.5)
        blobs = s3_blobs_in(bucket, tmp_path / "cache")
        for ask in (
            lambda: read(blobs),
            lambda: store(blobs),
            lambda: store(blobs, bytes(PART_BYTES + 1)),
            lambda: blobs.delete(DIGEST),
            lambda: list(blobs.digests()),
            lambda: blobs.peek(DIGEST, 10),
            blobs.probe,
        ):
            with pytest.raises(CapacityError) as caught:
                ask()
            assert caught.value.code == "storage.unavailable"
    assert copies(tmp_path / "cache") == set()


def test_the_settings_open_a_folder_or_a_bucket(bucket: str, s3: S3Server, tmp_path: Path) -> None:
    plain = open_blobs(RegistryConfig(), tmp_path / "data")
    store(plain)
    assert copies(tmp_path / "data" / "blobs") == {DIGEST}
    store(open_blobs(RegistryConfig(blob_url=f"file://{tmp_path}/with%20space"), tmp_path / "data"))
    assert copies(tmp_path / "with space") == {DIGEST}
    remote = open_blobs(RegistryConfig(blob_url=f"s3://{bucket}/team/a/"), tmp_path / "data")
    remote.probe()
    store(remote)
    assert s3.keys(bucket) == [KEY]
    assert copies(tmp_path / "data" / "blob-cache") == {DIGEST}


def test_an_endpoint_without_tls_is_used_only_where_it_was_named(
    bucket: str, tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https" + s3.url.removeprefix("http"))
    with pytest.raises(CapacityError):
        open_blobs(RegistryConfig(blob_url=f"s3://{bucket}"), tmp_path).probe()


@pytest.mark.parametrize("name", ["AWS_SERVER_SIDE_ENCRYPTION", "AWS_CHECKSUM_ALGORITHM"])
def test_a_variable_that_obstore_does_not_take_is_a_wrong_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "rot13")
    with pytest.raises(ConfigError, match=r"AWS_\.\.\."):
        open_blobs(RegistryConfig(blob_url="s3://bucket"), tmp_path)


def test_without_obstore_the_setting_says_what_to_install(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nsys.modules['obstore'] = None\n"
        "from manylora.adapters.blobs.store import open_blobs\nfrom manylora.config import RegistryConfig\n"
        "from manylora.errors import ConfigError\n"
        "open_blobs(RegistryConfig(), Path(sys.argv[1]))\n"
        "try:\n    open_blobs(RegistryConfig(blob_url='s3://bucket'), Path(sys.argv[1]))\n"
        "except ConfigError as error:\n    print(error.message)\n"
    )
    command = [sys.executable, "-P", "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "pip install 'manylora[s3]'" in done.stdout
