"""A whole server whose adapter blobs are in S3: what it answers comes from the bucket alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from idleness import wait_until
from manylora_server import DEMO_ADAPTERS, ManyloraServer, expected_answers, manylora_server
from s3_server import ACCESS_KEY, SECRET_KEY, S3Server

QUESTION = expected_answers()["questions"][0]
NAMES = ("pirate", "french")


@pytest.fixture(scope="module")
def bucket(s3: S3Server) -> str:
    return s3.new_bucket()


@contextmanager
def serving(folder: Path, s3: S3Server, bucket: str) -> Iterator[ManyloraServer]:
    environment: dict[str, Any] = {**s3.environment()}
    with manylora_server(folder, "--blob-url", f"s3://{bucket}/manylora", **environment) as server:
        yield server
    assert_log_is_clean(server)


def assert_log_is_clean(server: ManyloraServer) -> None:
    log = server.log.read_text()
    assert SECRET_KEY not in log
    assert ACCESS_KEY not in log


@pytest.fixture(scope="module")
def first(
    tmp_path_factory: pytest.TempPathFactory, s3: S3Server, bucket: str
) -> Iterator[ManyloraServer]:
    """The first server on the bucket, with both adapters; the last test ends it."""
    with serving(tmp_path_factory.mktemp("s3"), s3, bucket) as server:
        server.publish("shop", *NAMES)
        yield server


def answer(server: ManyloraServer, name: str) -> str:
    return str(server.ask("shop", name, QUESTION["question"])["choices"][0]["message"]["content"])


def test_a_spoilt_copy_is_fetched_again_and_a_spoilt_object_fails_its_adapter_until_it_is_uploaded_again(
    first: ManyloraServer, s3: S3Server, bucket: str
) -> None:
    body = {
        "model": "pirate",
        "messages": [{"role": "user", "content": QUESTION["question"]}],
        "temperature": 0,
    }
    client = first.tenant("shop")
    keys = {s3.get(bucket, key): key for key in s3.keys(bucket)}
    copies = {path.name: path for path in (first.data_dir / "blob-cache").rglob("*")}
    pirate, french = (keys[weights(name)] for name in NAMES)
    copy = copies[french.rsplit("/", 1)[-1]]
    copy.write_bytes(weights("pirate"))
    assert answer(first, "french") == QUESTION["answers"]["french"]
    assert copy.read_bytes() == weights("french")

    copies[pirate.rsplit("/", 1)[-1]].unlink()
    s3.flip_a_bit(bucket, pirate)
    for _ in range(2):
        refused = client.post("/v1/chat/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            503,
            "adapter_blob_corrupt",
        )
    assert answer(first, "french") == QUESTION["answers"]["french"]
    assert first.upload(client, "pirate", DEMO_ADAPTERS / "pirate").status_code == 200
    assert answer(first, "pirate") == QUESTION["answers"]["pirate"]


def test_adapters_live_in_the_bucket_across_restarts_and_die_with_their_delete(
    first: ManyloraServer, s3: S3Server, bucket: str
) -> None:
    for name in NAMES:
        assert answer(first, name) == QUESTION["answers"][name]
    assert {s3.get(bucket, key) for key in s3.keys(bucket)} == {weights(name) for name in NAMES}
    assert not (first.data_dir / "blobs").exists()
    key = first.tenants["shop"]
    assert first.stop() == 0
    assert_log_is_clean(first)  # before another server writes into its place

    cache = first.data_dir / "blob-cache"
    shutil.rmtree(cache)
    s3.put(bucket, f"manylora/sha256/ab/ab/{'ab' * 32}", b"left behind by a crash")
    s3.make_older(bucket, 3700)
    with serving(first.data_dir.parent, s3, bucket) as server:
        server.tenants["shop"], server.clients["shop"] = key, server.client(key)
        assert len(s3.keys(bucket)) == len(
            NAMES
        )  # the sweep took the one that no version refers to
        assert not [path for path in cache.rglob("*") if path.is_file()]
        for name in NAMES:
            assert answer(server, name) == QUESTION["answers"][name]
        assert len([path for path in cache.rglob("*") if path.is_file()]) == len(NAMES)
        assert server.clients["shop"].delete("/v1/adapters/pirate").status_code == 204
        wait_until(lambda: len(s3.keys(bucket)) == 1)
        assert answer(server, "french") == QUESTION["answers"]["french"]


def weights(name: str) -> bytes:
    return (DEMO_ADAPTERS / name / "adapter_model.safetensors").read_bytes()
