"""What a tenant may store: held before bytes are read, and again where they begin to count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from api_adapters import sound, upload
from api_server import Api
from piecewise_client import announce, code, complete, put, send_all
from postgres_server import KINDS, database_of

pytestmark = pytest.mark.anyio


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest) -> str | None:
    return database_of(request.param)


SIZE = len(sound().weights)


async def limit(api: Api, **limits: float) -> None:
    await api.key("acme")
    await api.services.registry.tenants.update_tenant("acme", limits)


async def left(api: Api) -> int | None:
    tenant = await api.services.registry.tenants.get_tenant("acme")
    return await api.services.registry.uploads.storage_left(tenant.id)


async def test_storage_counts_versions_and_open_uploads(api: Api) -> None:
    await limit(api, stored_bytes=2 * SIZE)
    client = await api.tenant("acme")
    assert (await upload(client, "a")).status_code == 201
    assert (await upload(client, "a")).status_code == 200
    assert await left(api) == SIZE
    second = await send_all(client, sound(alpha=8), "b")
    assert await left(api) == 0
    assert code(await upload(client, "c", sound(alpha=4))) == (403, "quota.storage")
    assert code(await announce(client, sound(alpha=4), "c")) == (403, "quota.storage")
    assert len((await client.get("/v1/uploads")).json()["data"]) == 1
    assert (await complete(client, second)).status_code == 201
    assert await left(api) == 0
    await client.delete("/v1/adapters/b")
    assert await left(api) == SIZE
    third = (await announce(client, sound(alpha=4), "c")).json()["id"]
    assert await left(api) == 0
    await client.delete(f"/v1/uploads/{third}")
    assert await left(api) == SIZE


async def test_a_rejected_or_expired_upload_reserves_nothing(api: Api) -> None:
    await limit(api, stored_bytes=SIZE)
    client, files = await api.tenant("acme"), sound()
    made = (await announce(client, files)).json()["id"]
    await put(client, made, "adapter_config.json", b"x" * len(files.config))
    assert await left(api) == 0
    api.ahead = timedelta(hours=25)
    assert await left(api) == SIZE
    api.ahead = timedelta()
    await client.delete(f"/v1/uploads/{made}")
    bad = type(files)(b"{}", files.weights)
    assert (await complete(client, await send_all(client, bad))).status_code == 422
    assert await left(api) == SIZE


async def test_a_body_too_large_for_the_tenant_is_not_read(api: Api) -> None:
    await limit(api, stored_bytes=SIZE)
    client = await api.tenant("acme")
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b"x" * 65536

    kind = {
        "content-type": "multipart/form-data; boundary=b",
        "content-length": str(SIZE + (2 << 20)),
    }
    answer = await client.post("/v1/adapters", content=endless(), headers=kind)
    assert code(answer) == (403, "quota.storage")
    assert read == 0
    assert answer.headers["connection"] == "close"
    # Without a length, no more is taken than there is room.
    head = b'--b\r\nContent-Disposition: form-data; name="weights"\r\n\r\n'

    async def unannounced() -> AsyncIterator[bytes]:
        yield head
        async for piece in endless():
            yield piece

    answer = await client.post(
        "/v1/adapters", content=unannounced(), headers={"content-type": kind["content-type"]}
    )
    assert code(answer) == (403, "quota.storage")
    assert read <= SIZE // 65536 + (
        200 if api.gateway else 2
    )  # what is on its way between gateway and replica
    assert api.files() == []


async def test_uploads_at_once_cannot_pass_a_limit_together(api: Api) -> None:
    await limit(api, stored_bytes=3 * SIZE)
    client = await api.tenant("acme")
    # The admin's form tells its tenant late, so these are all read, and decided by the transaction.
    answers = await asyncio.gather(
        *(
            upload(api.admin, f"a{number}", sound(alpha=number + 1), tenant="acme")
            for number in range(6)
        )
    )
    assert sorted(answer.status_code for answer in answers) == [201, 201, 201, 403, 403, 403]
    assert len((await client.get("/v1/adapters")).json()["data"]) == 3
    assert await left(api) == 0
    assert len(api.files()) == 1
    await limit(api, adapters=4)
    answers = await asyncio.gather(
        *(upload(client, f"b{number}", sound(alpha=number + 1)) for number in range(4))
    )
    assert sorted(code(answer)[1] if answer.is_error else "" for answer in answers) == [
        "",
        *["quota.adapters"] * 3,
    ]


async def test_bytes_on_their_way_are_reserved(api: Api) -> None:
    await limit(api, stored_bytes=3 * SIZE)
    client = await api.tenant("acme")
    tenant = await api.services.registry.tenants.get_tenant("acme")
    with api.services.uploads.reserving(tenant.id, 3 * SIZE):
        assert code(await upload(client, "a")) == (403, "quota.storage")
    assert (await upload(client, "a")).status_code == 201
    assert api.services.uploads.reserved[tenant.id] == 0


async def test_the_number_of_adapters_is_limited_but_not_their_versions(api: Api) -> None:
    await limit(api, adapters=1)
    client = await api.tenant("acme")
    assert (await upload(client, "a")).status_code == 201
    assert code(await upload(client, "b")) == (403, "quota.adapters")
    assert code(await announce(client, sound(), "b")) == (403, "quota.adapters")
    assert (await upload(client, "a", sound(alpha=8))).json()["version"] == 2
    assert (await announce(client, sound(alpha=4), "a")).status_code == 201
    await limit(api, adapters=0)
    assert (await upload(client, "a", sound(alpha=4))).json()["version"] == 3
    rival = await api.tenant("rival")
    assert (await upload(rival, "b")).status_code == 201


async def test_an_adapters_pages_are_limited(api: Api) -> None:
    await limit(api, adapter_pages=1)
    client = await api.tenant("acme")
    assert code(await upload(client, "a", sound(rank=64))) == (403, "quota.adapter_memory")
    assert api.files() == []
    made = await send_all(client, sound(rank=64))
    assert code(await complete(client, made)) == (403, "quota.adapter_memory")
    await limit(api, adapter_pages=4096)
    assert (await complete(client, made)).status_code == 201


async def test_a_key_that_was_used_opens_no_way_around_the_limit(api: Api) -> None:
    client = await api.tenant("acme")
    client.headers["idempotency-key"] = "k"
    files = sound()
    assert (await upload(client, "a", files)).status_code == 201
    await limit(api, stored_bytes=1)
    replayed = await upload(client, "a", files)
    assert (replayed.status_code, replayed.headers["idempotent-replayed"]) == (201, "true")
    larger = type(files)(files.config, files.weights + bytes(2 << 20))
    assert code(await upload(client, "b", larger)) == (403, "quota.storage")
