"""Adapters whose blobs are in S3: uploads, deletes, the sweep after a crash, and a store that does not answer."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from api_adapters import sound, upload
from api_server import Api, Client, eventually
from api_server import api as open_api
from blob_io import store
from manylora.adapters.blobs.bucket import Bucket
from manylora.adapters.blobs.s3 import S3Blobs
from manylora.cli import make_app
from manylora.config import Config, ModelConfig, RegistryConfig, ServerConfig
from manylora.errors import ConfigError
from manylora.server.serve import open_blob_store, sweeper_of
from manylora.server.uploads.validation import AdapterValidator
from s3_server import SECRET_KEY, S3Server

pytestmark = pytest.mark.anyio


@pytest.fixture
async def api(tmp_path: Path, bucket: str) -> AsyncIterator[Api]:
    async with open_api(tmp_path, blob_url=f"s3://{bucket}/manylora") as opened:
        yield opened
        await opened.services.versions.garbage.close()


async def test_a_refused_upload_leaves_nothing(
    api: Api, acme: Client, bucket: str, s3: S3Server
) -> None:
    bad = dataclasses.replace(sound(), config=sound().config.replace(b'"LORA"', b'"IA3"'))
    assert (await upload(acme, "pirate", bad)).status_code == 422
    assert s3.keys(bucket) == []
    assert api.files() == []


async def test_pages_are_counted_from_the_header_without_a_copy(
    api: Api, acme: Client, s3: S3Server
) -> None:
    pages = (await upload(acme, "pirate")).json()["pages"]
    for path in api.files():
        path.unlink()
    restarted = AdapterValidator(api.services.ready, api.services.blobs)
    owner = await api.services.registry.tenants.get_tenant("acme")
    current = (await api.services.registry.adapters.get_adapter(owner.id, "pirate")).current
    assert await restarted.pages(current) == pages
    assert api.files() == []
    with s3.refusing_keys():
        assert await AdapterValidator(api.services.ready, api.services.blobs).pages(current) is None


async def test_an_upload_while_the_store_is_away_is_503_and_leaves_no_version(
    acme: Client, bucket: str, s3: S3Server
) -> None:
    with s3.refusing_keys():
        answer = await upload(acme, "pirate")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage.unavailable")
    assert answer.headers["retry-after"] == "5"
    assert SECRET_KEY not in answer.text
    assert (await acme.get("/v1/adapters/pirate")).status_code == 404
    assert (await upload(acme, "pirate")).status_code == 201
    assert len(s3.keys(bucket)) == 1


async def test_bytes_on_their_way_to_the_store_keep_no_other_upload_waiting(
    acme: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, released = threading.Event(), threading.Event()
    real_put = Bucket.put

    def put(target: Bucket, key: str, content: Path) -> None:
        if content.stat().st_size > len(sound().weights):
            arrived.set()
            assert released.wait(30)
        real_put(target, key, content)

    monkeypatch.setattr(Bucket, "put", put)
    slow = asyncio.create_task(upload(acme, "slow", sound(rank=16)))
    await eventually(arrived.is_set)
    assert (await upload(acme, "quick")).status_code == 201
    assert (await acme.delete("/v1/adapters/quick")).status_code == 204
    released.set()
    assert (await slow).status_code == 201


async def test_what_is_deleted_while_the_store_is_away_goes_when_it_is_back(
    api: Api, acme: Client, bucket: str, s3: S3Server
) -> None:
    await upload(acme, "pirate")
    with s3.refusing_keys():
        assert (await acme.delete("/v1/adapters/pirate")).status_code == 204
        assert len(api.files()) == 1
    await eventually(lambda: [*s3.keys(bucket), *api.files()] == [])


async def test_the_sweep_takes_what_a_crash_left_once_it_is_old(
    api: Api, acme: Client, bucket: str, s3: S3Server
) -> None:
    await upload(acme, "pirate")
    published = s3.keys(bucket)
    store(api.services.blobs)  # and the server dies before there is a version
    sweeper = sweeper_of(api.services)
    for _ in range(2):
        await sweeper.sweep()
    assert len(s3.keys(bucket)) == 2
    s3.make_older(bucket, 3700)
    for _ in range(2):
        await sweeper.sweep()
    assert s3.keys(bucket) == published
    assert len(api.files()) == 1


def config_of(blob_url: str, folder: Path) -> Config:
    server, registry = ServerConfig(data_dir=folder), RegistryConfig(blob_url=blob_url)
    return Config(model=ModelConfig(path="m"), server=server, registry=registry)


async def test_a_server_does_not_start_on_a_store_that_refuses_it(
    bucket: str, s3: S3Server, tmp_path: Path
) -> None:
    open_blob_store(config_of(f"s3://{bucket}", tmp_path)).probe()
    with pytest.raises(ConfigError, match="NoSuchBucket"):
        open_blob_store(config_of("s3://no-such-bucket", tmp_path))
    with s3.refusing_keys(), pytest.raises(ConfigError, match="InvalidAccessKeyId"):
        open_blob_store(config_of(f"s3://{bucket}", tmp_path))


async def test_a_server_starts_while_the_store_is_away(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert isinstance(open_blob_store(config_of(f"s3://{bucket}", tmp_path)), S3Blobs)


def test_the_doctor_tries_the_store(bucket: str, s3: S3Server) -> None:
    arguments = ["doctor", "--blob-url"]
    sound_store = CliRunner().invoke(make_app(), [*arguments, f"s3://{bucket}/manylora"])
    assert (sound_store.exit_code, "ok    blob store" in sound_store.output) == (0, True)
    assert s3.keys(bucket) == []
    for url in ("s3://no-such-bucket", "gs://bucket"):
        broken = CliRunner().invoke(make_app(), [*arguments, url])
        assert (broken.exit_code, "FAIL  blob store" in broken.output) == (1, True)
