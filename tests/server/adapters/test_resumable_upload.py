"""Uploads in pieces: announced, sent with breaks, completed, and what goes wrong on the way."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from api_adapters import sound, upload
from api_server import Api, Client, connect, eventually
from api_server import api as open_api
from manylora.adapters.blobs.local import LocalBlobs
from manylora.errors import CapacityError
from manylora.registry.records import VersionFacts
from manylora.server.adapters.schemas import AdapterView, UploadList, UploadView
from manylora.server.http.body import Pace
from manylora.server.process.threads import cancel_all
from manylora.server.serve import sweeper_of
from manylora.server.versions import garbage as removal
from piecewise_client import CONFIG, WEIGHTS, announce, code, complete, facts, put, send_all
from postgres_server import KINDS, database_of
from raw_http import head_of

pytestmark = pytest.mark.anyio
GOOD = sound()


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest) -> str | None:
    return database_of(request.param)


def staged(api: Api) -> list[Path]:
    return sorted(
        path
        for path in (api.services.config.server.data_dir / "uploads").rglob("*")
        if path.is_file()
    )


async def test_files_in_pieces_become_the_same_adapter_as_in_one_form(
    api: Api, acme: Client, rival: Client
) -> None:
    made = await announce(acme, GOOD, description="arr")
    assert made.status_code == 201, made.text
    view = UploadView.model_validate_json(made.content)
    assert (view.name, view.tenant, view.state, view.missing) == (
        "pirate",
        "acme",
        "uploading",
        [CONFIG, WEIGHTS],
    )
    assert code(await complete(acme, view.id)) == (409, "upload.incomplete")
    assert (await put(acme, view.id, CONFIG, GOOD.config)).json()["missing"] == [WEIGHTS]
    half = len(GOOD.weights) // 2
    first = await put(acme, view.id, WEIGHTS, GOOD.weights[:half], 0, len(GOOD.weights))
    assert first.json()["files"][WEIGHTS]["received"] == half
    incomplete = await complete(acme, view.id)
    assert code(incomplete) == (409, "upload.incomplete")
    assert f"{WEIGHTS} from byte {half}" in incomplete.json()["error"]["message"]
    again = await put(acme, view.id, WEIGHTS, GOOD.weights[:half], 0, len(GOOD.weights))
    assert code(again) == (409, "upload.offset_mismatch")
    assert f"byte {half}" in again.json()["error"]["message"]
    rest = await put(acme, view.id, WEIGHTS, GOOD.weights[half:], half, len(GOOD.weights))
    assert rest.json()["missing"] == []
    done = await complete(acme, view.id)
    assert done.status_code == 201, done.text
    body = AdapterView.model_validate_json(done.content)
    assert (body.name, body.version, body.description, body.aliases) == (
        "pirate",
        1,
        "arr",
        {"default": 1},
    )
    twice = await complete(acme, view.id)
    assert (twice.status_code, twice.content) == (200, done.content)
    shown = UploadView.model_validate((await acme.get(f"/v1/uploads/{view.id}")).json())
    assert (shown.state, shown.missing, shown.result) == ("ready", [], done.json())
    assert (len(api.files()), staged(api)) == (1, [])
    in_one_form = (await upload(rival, "pirate")).json()
    own = {"id": 0, "tenant": 0, "created_at": 0, "description": 0}
    assert {**in_one_form, **own} == {**done.json(), **own}
    used = await acme.post("/v1/completions", json={"model": "pirate", "prompt": "x"})
    assert used.headers["x-manylora-adapter"] == "acme/pirate@1"


async def begin_to_send(
    api: Api, url: str, key: str, upload_id: str, num_bytes: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send so many bytes of the weights, and leave the request open."""
    reader, writer = await connect(url)
    head = head_of(
        "PUT",
        f"/v1/uploads/{upload_id}/files/{WEIGHTS}",
        key,
        Content_Length=str(len(GOOD.weights)),
    )
    writer.write(head + GOOD.weights[:num_bytes])
    await writer.drain()
    await eventually(api.services.uploads.streams.total)
    return reader, writer


async def test_a_broken_connection_keeps_what_arrived(api: Api, acme: Client, url: str) -> None:
    upload_id = (await announce(acme, GOOD)).json()["id"]
    half = len(GOOD.weights) // 2
    _, writer = await begin_to_send(api, url, await api.key("acme"), upload_id, half)
    writer.close()
    await eventually(lambda: not api.services.uploads.streams)
    received = (await acme.get(f"/v1/uploads/{upload_id}")).json()["files"][WEIGHTS]["received"]
    assert received == half
    await put(acme, upload_id, WEIGHTS, GOOD.weights[half:], half, len(GOOD.weights))
    await put(acme, upload_id, CONFIG, GOOD.config)
    assert (await complete(acme, upload_id)).status_code == 201


async def test_wrong_pieces_are_refused(acme: Client) -> None:
    upload_id = (await announce(acme, GOOD)).json()["id"]
    path, size = f"/v1/uploads/{upload_id}/files/{WEIGHTS}", len(GOOD.weights)
    other_sizes = (f"bytes 0-{size}/{size}", f"bytes 0-1/{size + 1}")
    for given in ("bytes 0-1", "bytes 5-4/9", *other_sizes, "lines 0-1/2", "x" * 99):
        answer = await acme.put(path, content=b"xy", headers={"content-range": given})
        assert code(answer) == (400, "invalid_value"), given
    assert code(await put(acme, upload_id, WEIGHTS, GOOD.weights + b"x")) == (
        413,
        "upload.too_large",
    )
    assert code(await put(acme, upload_id, "other.bin", b"x")) == (404, "not_found")

    async def chunked() -> AsyncIterator[bytes]:
        yield GOOD.weights
        yield b"x"

    beyond = await acme.put(path, content=chunked())
    assert code(beyond) == (413, "upload.too_large")
    assert (await acme.get(f"/v1/uploads/{upload_id}")).json()["files"][WEIGHTS]["received"] <= size


async def test_an_announcement_is_checked_at_once(tmp_path: Path) -> None:
    async with open_api(tmp_path, max_upload_bytes=100_000) as api:
        client = await api.tenant("acme")
        manifest = {CONFIG: facts(GOOD.config), WEIGHTS: facts(GOOD.weights)}
        big = {**manifest[WEIGHTS], "size": 100_001}
        for body, expected in (
            ({"files": {**manifest, WEIGHTS: big}}, (413, "upload.too_large")),
            ({"files": {**manifest, CONFIG: {**big, "size": 70_000}}}, (413, "config.too_large")),
            ({"files": {WEIGHTS: manifest[WEIGHTS]}}, (400, "invalid_value")),
            ({"files": {**manifest, "more": big}}, (400, "invalid_value")),
            ({"files": {**manifest, WEIGHTS: {**big, "size": 0}}}, (400, "invalid_value")),
            ({"files": {**manifest, WEIGHTS: {**big, "sha256": "x"}}}, (400, "invalid_value")),
            ({"files": manifest, "name": "../x"}, (422, "adapter.name_invalid")),
            ({"files": manifest, "name": "demo"}, (422, "adapter.name_reserved")),
            ({"files": manifest, "description": "a\ud800"}, (400, "invalid_json")),
            ({"files": manifest, "tenant": "rival"}, (404, "not_found")),
        ):
            answer = await client.post("/v1/uploads", content=json.dumps({"name": "a", **body}))
            assert code(answer) == expected, body
        assert UploadList.model_validate((await client.get("/v1/uploads")).json()).data == []


async def test_bytes_that_were_not_announced_must_be_sent_again(api: Api, acme: Client) -> None:
    upload_id = (await announce(acme, GOOD)).json()["id"]
    other = sound(alpha=8)
    await put(acme, upload_id, CONFIG, GOOD.config)
    await put(acme, upload_id, WEIGHTS, bytes([*GOOD.weights[:-1], GOOD.weights[-1] ^ 1]))
    assert code(await complete(acme, upload_id)) == (422, "upload.digest_mismatch")
    view = (await acme.get(f"/v1/uploads/{upload_id}")).json()
    assert (view["state"], view["missing"]) == ("uploading", [WEIGHTS])
    assert api.files() == []
    await put(acme, upload_id, WEIGHTS, GOOD.weights)
    await put(acme, upload_id, CONFIG, other.config.ljust(len(GOOD.config))[: len(GOOD.config)])
    assert code(await complete(acme, upload_id)) == (422, "upload.digest_mismatch")
    await put(acme, upload_id, CONFIG, GOOD.config)
    assert (await complete(acme, upload_id)).status_code == 201


async def test_a_digest_alone_gives_nobody_the_weights(
    api: Api, acme: Client, rival: Client
) -> None:
    assert (await upload(acme, "pirate")).status_code == 201
    loud = sound(alpha=8)
    assert loud.weights == GOOD.weights
    for client in (acme, rival):
        announced = (await announce(client, loud, "loud")).json()
        assert announced["missing"] == [CONFIG, WEIGHTS]
        await put(client, announced["id"], CONFIG, loud.config)
        assert code(await complete(client, announced["id"])) == (409, "upload.incomplete")
    assert len(api.files()) == 1


async def test_another_tenants_upload_looks_like_none(
    api: Api, acme: Client, rival: Client
) -> None:
    upload_id = await send_all(acme, GOOD)
    with api.services.uploads.writing(upload_id, CONFIG, WEIGHTS):
        for method, path in (
            ("GET", "/v1/uploads/{}"),
            ("DELETE", "/v1/uploads/{}"),
            ("PUT", "/v1/uploads/{}/files/" + WEIGHTS),
            ("POST", "/v1/uploads/{}/complete"),
        ):
            foreign = await rival.request(method, path.format(upload_id), content=b"")
            missing = await rival.request(method, path.format("upl_" + "0" * 26), content=b"")
            assert (foreign.status_code, missing.status_code) == (404, 404)
            assert foreign.text.replace(upload_id, "upl_" + "0" * 26) == missing.text
    assert (await rival.get("/v1/uploads")).json()["data"] == []
    assert [one["id"] for one in (await acme.get("/v1/uploads")).json()["data"]] == [upload_id]
    admin = api.admin
    assert code(await admin.get(f"/v1/uploads/{upload_id}")) == (400, "invalid_value")
    assert (await admin.get(f"/v1/uploads/{upload_id}?tenant=acme")).status_code == 200
    assert (await announce(admin, GOOD, "b", tenant="acme")).json()["tenant"] == "acme"


async def test_nobody_writes_beside_another(api: Api, acme: Client) -> None:
    upload_id, tenant_id = (
        await send_all(acme, GOOD),
        (await api.services.registry.tenants.get_tenant("acme")).id,
    )
    with api.services.uploads.writing(upload_id, WEIGHTS):
        for answer in (
            await put(acme, upload_id, WEIGHTS, GOOD.weights),
            await complete(acme, upload_id),
            await acme.delete(f"/v1/uploads/{upload_id}"),
        ):
            assert code(answer) == (409, "upload.busy")
            assert int(answer.headers["retry-after"]) >= 1
    with (
        api.services.uploads.stream(tenant_id),
        api.services.uploads.stream(tenant_id),
    ):
        refused = await put(acme, upload_id, WEIGHTS, GOOD.weights)
        assert code(refused) == (429, "upload.too_many")
        assert int(refused.headers["retry-after"]) >= 1
    assert (await put(acme, upload_id, WEIGHTS, GOOD.weights)).status_code == 200
    answers = await asyncio.gather(*(complete(acme, upload_id) for _ in range(5)))
    assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409, 409]
    assert (await complete(acme, upload_id)).status_code == 200


async def test_a_deleted_or_expired_upload_is_gone_with_its_files_once_nobody_writes(
    api: Api, acme: Client
) -> None:
    deleted, old, ready = [await send_all(acme, GOOD, name) for name in ("a", "b", "c")]
    assert (await complete(acme, ready)).status_code == 201
    assert (await acme.delete(f"/v1/uploads/{deleted}")).status_code == 204
    assert (await acme.get(f"/v1/uploads/{deleted}")).status_code == 404
    assert {path.parent.name for path in staged(api)} == {old}
    sweeper = sweeper_of(api.services)
    stray = api.services.config.server.data_dir / "uploads" / ("upl_" + "a" * 26)
    stray.mkdir()
    (stray / WEIGHTS).write_bytes(b"x")
    first = {
        "uploads": 0,
        "answers": 0,
        "batches": 0,
        "files": 0,
        "staged": 1,
        "temporary": 0,
        "blobs": 0,
    }
    assert await sweeper.sweep() == {**first, "weights": 0}
    api.ahead = timedelta(hours=25)
    assert (await acme.get(f"/v1/uploads/{old}")).status_code == 404
    with api.services.uploads.writing(old, WEIGHTS):
        swept = await sweeper.sweep()
        assert (swept["uploads"], swept["staged"], len(staged(api))) == (2, 0, 2)
    assert (await sweeper.sweep())["staged"] == 1
    assert staged(api) == []
    assert (await acme.get("/v1/adapters/c")).status_code == 200
    assert len(api.files()) == 1


async def test_a_full_disk_keeps_what_was_received(
    acme: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_id, size = (await announce(acme, GOOD)).json()["id"], len(GOOD.weights)
    await put(acme, upload_id, WEIGHTS, GOOD.weights[:1000], 0, size)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("manylora.adapters.blobs.local.os.write", full)
        answer = await put(acme, upload_id, WEIGHTS, GOOD.weights[1000:], 1000, size)
        assert code(answer) == (507, "storage.full")
    assert (await acme.get(f"/v1/uploads/{upload_id}")).json()["files"][WEIGHTS]["received"] == 1000
    assert (await put(acme, upload_id, WEIGHTS, GOOD.weights[1000:], 1000, size)).status_code == 200


async def test_a_shutdown_cuts_a_file_and_keeps_what_came(api: Api, acme: Client, url: str) -> None:
    upload_id = (await announce(acme, GOOD)).json()["id"]
    reader, writer = await begin_to_send(api, url, await api.key("acme"), upload_id, 1000)
    await asyncio.sleep(0.1)
    assert await api.services.drain.drain(0.1) == 1
    assert b" 503 " in await reader.readline()
    writer.close()
    assert api.services.uploads.staged.sizes(upload_id)[WEIGHTS] == 1000


async def test_the_sweeper_runs_by_itself_and_ends_cleanly(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "SWEEP_S", 0.01)
    blobs, lonely = LocalBlobs(api.services.config.blob_dir), "ab" * 32
    sweeping = await sweeper_of(api.services).start()
    blobs.make_folders(lonely)
    blobs.path(lonely).write_bytes(b"x")
    await eventually(lambda: not api.files())
    run, calls = api.services.registry.uploads.forget_old, 0

    async def fails() -> tuple[int, int]:
        nonlocal calls
        calls += 1
        raise CapacityError("The database cannot answer now; try again.", code="db.unavailable")

    monkeypatch.setattr(api.services.registry.uploads, "forget_old", fails)
    await eventually(lambda: calls > 1)
    monkeypatch.setattr(api.services.registry.uploads, "forget_old", run)
    blobs.path(lonely).write_bytes(b"x")
    await eventually(lambda: not api.files())
    await cancel_all([sweeping])
    blobs.path(lonely).write_bytes(b"x")
    await asyncio.sleep(0.1)
    assert len(api.files()) == 1


async def test_a_file_that_stalls_is_given_up_and_kept(tmp_path: Path) -> None:
    async with open_api(tmp_path, pace=Pace(stall_s=0.2)) as api:
        client = await api.tenant("acme")
        upload_id = (await announce(client, GOOD)).json()["id"]

        async def stalling() -> AsyncIterator[bytes]:
            yield GOOD.weights[:1000]
            await asyncio.sleep(5)
            yield b"x"

        answer = await client.put(f"/v1/uploads/{upload_id}/files/{WEIGHTS}", content=stalling())
        assert code(answer) == (408, "upload.timeout")
        assert (await client.get(f"/v1/uploads/{upload_id}")).json()["files"][WEIGHTS][
            "received"
        ] == 1000


async def test_a_tenant_has_so_many_uploads_open(
    acme: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manylora.registry.uploads.MAX_OPEN", 2)
    first = await send_all(acme, GOOD, "a")
    second = (await announce(acme, GOOD, "b")).json()["id"]
    assert code(await announce(acme, GOOD, "c")) == (409, "upload.too_many_open")
    listed = await acme.get("/v1/uploads?limit=1")
    assert ([one["id"] for one in listed.json()["data"]], listed.json()["next"]) == ([first], first)
    rest = await acme.get(f"/v1/uploads?limit=1&after={first}")
    assert ([one["id"] for one in rest.json()["data"]], rest.json()["next"]) == ([second], None)
    assert (await complete(acme, first)).status_code == 201
    assert (await announce(acme, GOOD, "c")).status_code == 201


async def test_an_upload_that_another_server_rejects_meanwhile_is_no_adapter(
    api: Api, acme: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload_id = await send_all(acme, GOOD)
    owner, validate = (
        await api.services.registry.tenants.get_tenant("acme"),
        api.services.uploads.validator.validate,
    )

    async def validate_while_another_rejects(*arguments: Any) -> VersionFacts:
        await api.services.registry.uploads.reject(
            owner.id, upload_id, {"code": "adapter_invalid", "message": "no"}
        )
        return await validate(*arguments)

    monkeypatch.setattr(api.services.uploads.validator, "validate", validate_while_another_rejects)
    assert code(await complete(acme, upload_id)) == (409, "upload.ended")
    assert (await acme.get("/v1/adapters")).json()["data"] == []
    assert api.files() == []
