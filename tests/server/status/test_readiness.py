"""Parts that can no longer do their work: nothing is computed for it, /ready says why, and it comes back by itself."""

from __future__ import annotations

import asyncio
import errno
import shutil
from collections.abc import Callable

import pytest

from api_adapters import upload
from api_server import BASE, Api, eventually
from broken_disk import broken_disk
from manylora.adapters.blobs import local
from manylora.errors import CapacityError
from manylora.registry.usage import journal, ledger

pytestmark = pytest.mark.anyio
BODY = {"model": BASE, "prompt": "x"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "PROBE_S", 0.01)
    monkeypatch.setattr(ledger, "LOOK_S", 0.01)


async def is_ready(api: Api) -> bool:
    return (await api.admin.get("/ready")).status_code == 200


async def until_ready(api: Api) -> None:
    async with asyncio.timeout(60):
        while not await is_ready(api):  # noqa: ASYNC110 - as load balancers do
            await asyncio.sleep(0.01)


async def reasons(api: Api) -> list[str]:
    """What the metrics say of it."""
    lines = (await api.admin.get("/metrics")).text.splitlines()
    return [
        line.split('"')[1]
        for line in lines
        if line.startswith("manylora_not_ready{") and line.endswith(" 1.0")
    ]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errno.ENOSPC, 507, "storage.full"),
        (errno.EDQUOT, 507, "storage.full"),
        (errno.EROFS, 503, "storage.unavailable"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_after_a_failed_write_nothing_is_computed_until_writes_succeed(
    api: Api, monkeypatch: pytest.MonkeyPatch, error: int, status: int, code: str, stream: bool
) -> None:
    client = await api.tenant("acme")
    with broken_disk(monkeypatch, error):
        assert code in (await client.post("/v1/completions", json={**BODY, "stream": stream})).text
        computed = len(api.engine.requests)
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
            refused = await client.post(path, json={})
            assert refused.status_code == status, refused.text
        ready = await api.admin.get("/ready")
        assert (ready.status_code, ready.json()["error"]["code"]) == (status, code)
        assert await reasons(api) == [code]
        assert (await client.post("/tokenize", json=BODY)).status_code == 200  # nothing to record
        assert (await client.get("/v1/models")).status_code == 200
        assert len(api.engine.requests) == computed
    await until_ready(api)
    assert await reasons(api) == []
    await api.ask("acme")
    assert (await api.usage_totals())["requests"] == 1


async def test_a_deleted_database_is_no_good_end_and_takes_no_usage_with_it(api: Api) -> None:
    path = api.services.config.server.data_dir / "registry.sqlite"
    client = await api.tenant("acme")
    await api.ask("acme")
    path.rename(path.with_suffix(".away"))
    await eventually(lambda: _refuses(api))
    for refused in (
        await client.post("/v1/completions", json=BODY),
        await api.admin.post("/v1/tenants", json={"name": "late"}),
        await api.admin.get("/v1/usage"),
        await api.admin.get("/ready"),
    ):
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "db.lost")
    assert await reasons(api) == ["db.lost"]
    assert len(api.engine.requests) == 1
    path.with_suffix(".away").rename(path)
    await until_ready(api)
    await api.ask("acme")
    assert (await api.usage_totals())["requests"] == 2


async def test_a_deleted_journal_costs_no_usage(api: Api) -> None:
    await api.ask("acme")
    shutil.rmtree(api.services.config.server.data_dir / "usage")
    await api.ask("acme")
    assert await is_ready(api)
    assert (await api.usage_totals())["requests"] == 2


@pytest.mark.parametrize("harm", ["full", "deleted"])
async def test_an_upload_that_cannot_be_stored_is_refused_unread_and_generation_goes_on(
    api: Api, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    client, read = await api.tenant("acme"), list[object]()
    monkeypatch.setattr("manylora.server.adapters.publish.read_form", lambda *_: read.append(None))
    folder = api.services.config.blob_dir
    code = {"full": "storage.full", "deleted": "storage.unavailable"}[harm]
    with monkeypatch.context() as patched:
        if harm == "full":
            patched.setattr(local, "write_all", _raise(CapacityError("Full.", code="storage.full")))
        else:
            folder.rename(folder.with_name("away"))
        refused = await upload(client, "pirate")
        assert (refused.json()["error"]["code"], read) == (code, [])
        assert refused.headers["connection"] == "close"  # its body was not read
        await api.ask("acme")
        assert await is_ready(api)
    if harm == "deleted":
        folder.with_name("away").rename(folder)
    monkeypatch.undo()
    assert (await upload(client, "pirate")).status_code == 201


def _refuses(api: Api) -> bool:
    try:
        api.services.registry.usage.check()
    except CapacityError:
        return True
    return False


def _raise(error: Exception) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail
