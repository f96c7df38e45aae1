"""Changes that clients send again: made once, answered the same."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from api_adapters import sound, upload
from api_server import ADMIN_KEY, Api, Client
from bad_upload import Upload
from manylora.registry.idempotency import AnsweredBeforeError, KeptAnswer, Retry, body_digest
from manylora.registry.registry import Registry
from manylora.server.serve import sweeper_of
from manylora.server.uploads.validation import AdapterValidator
from piecewise_client import WEIGHTS, announce, code, complete, send_all
from postgres_server import KINDS, database_of
from registry_samples import Draft, facts

pytestmark = pytest.mark.anyio


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest) -> str | None:
    return database_of(request.param)


def key(name: str) -> dict[str, str]:
    return {"idempotency-key": name}


async def send(
    client: Client, name: str, retry: str, files: Upload | None = None, **fields: str
) -> Any:
    made = files or sound()
    return await client.post(
        "/v1/adapters",
        data={"name": name, **fields},
        files={"config": ("c", made.config), "weights": ("w", made.weights)},
        headers=key(retry),
    )


async def test_a_repeated_upload_is_answered_as_it_was(
    api: Api, acme: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = AsyncMock(wraps=api.services.uploads.validator.validate)
    monkeypatch.setattr(api.services.uploads.validator, "validate", checks)
    first = await send(acme, "pirate", "k 1!")
    again = await send(acme, "pirate", "k 1!")
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.content == again.content
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert checks.await_count == 1
    await upload(acme, "pirate", sound(alpha=8))
    assert (await send(acme, "pirate", "k 1!")).content == first.content
    assert (await send(acme, "pirate", "k 2!")).status_code == 200
    await acme.delete("/v1/adapters/pirate")
    assert (await send(acme, "pirate", "k 1!")).content == first.content
    assert (await acme.get("/v1/adapters")).json()["data"] == []
    assert api.files() == []


async def test_a_key_stands_for_one_request_of_one_tenant(
    api: Api, acme: Client, rival: Client
) -> None:
    assert (await send(acme, "a", "k")).status_code == 201
    others: list[dict[str, Any]] = [{"name": "b"}, {"description": ""}, {"activate": "false"}]
    for fields in (*others, {"files": sound(alpha=8)}, {"files": sound(rank=16)}):
        answer = await send(acme, **{"name": "a", "retry": "k", **fields})
        assert code(answer) == (422, "idempotency.key_reused"), fields
    made = await announce(acme, sound(), "a", headers=key("k"))
    assert code(made) == (422, "idempotency.key_reused")
    assert (await send(rival, "b", "k")).status_code == 201
    assert len(api.files()) == 1


async def test_a_refusal_is_not_kept(acme: Client) -> None:
    bad = Upload(sound().config, b"PK\x03\x04 no weights")
    assert code(await send(acme, "a", "k", bad)) == (422, "weights.not_safetensors")
    assert code(await send(acme, "a", "k", bad)) == (422, "weights.not_safetensors")
    assert (await send(acme, "a", "k")).status_code == 201


async def test_while_the_first_is_in_progress_the_second_waits(
    acme: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go = asyncio.Event(), asyncio.Event()
    run = AdapterValidator.validate

    async def slow(*arguments: Any) -> Any:
        started.set()
        await go.wait()
        return await run(*arguments)

    monkeypatch.setattr(AdapterValidator, "validate", slow)
    first = asyncio.create_task(send(acme, "a", "k"))
    await started.wait()
    for second in (await send(acme, "a", "k"), await announce(acme, sound(), headers=key("k"))):
        assert code(second) == (409, "idempotency.in_progress")
        assert int(second.headers["retry-after"]) >= 1
    go.set()
    made = await first
    assert made.status_code == 201
    assert (await send(acme, "a", "k")).content == made.content


@pytest.mark.parametrize("bad", ["", " ", "x" * 256, "a\x7fb", "ä"])
async def test_a_key_is_short_and_printable(acme: Client, bad: str) -> None:
    headers = [(b"idempotency-key", bad.encode("latin-1"))]
    assert code(await announce(acme, sound(), headers=headers)) == (400, "idempotency.key_invalid")
    twice = await acme.post(
        "/v1/uploads", json={}, headers=[("idempotency-key", "a"), ("idempotency-key", "b")]
    )
    assert code(twice) == (400, "idempotency.key_invalid")
    assert (await announce(acme, sound(), headers=key("~" * 255))).status_code == 201


async def test_uploads_in_pieces_are_announced_and_completed_once(acme: Client) -> None:
    files = sound()
    first, again = [await announce(acme, files, "p", headers=key("k")) for _ in range(2)]
    assert (first.status_code, first.content) == (again.status_code, again.content)
    assert len((await acme.get("/v1/uploads")).json()["data"]) == 1
    upload_id = await send_all(acme, files, "q")
    done, twice = (
        await complete(acme, upload_id, **key("c")),
        await complete(acme, upload_id, **key("c")),
    )
    assert (
        (done.status_code, done.content)
        == (twice.status_code, twice.content)
        == (201, done.content)
    )
    assert twice.headers["idempotent-replayed"] == "true"
    other = (await announce(acme, files, "r")).json()["id"]
    assert code(await complete(acme, other, **key("c"))) == (422, "idempotency.key_reused")


async def test_answers_are_kept_for_a_day(api: Api, acme: Client) -> None:
    assert (await send(acme, "a", "k")).status_code == 201
    api.ahead = timedelta(hours=23, minutes=59)
    assert (await send(acme, "a", "k")).headers["idempotent-replayed"] == "true"
    assert (await sweeper_of(api.services).sweep())["answers"] == 0
    api.ahead = timedelta(hours=24, minutes=1)
    fresh = await send(acme, "a", "k")
    assert (fresh.status_code, "idempotent-replayed" in fresh.headers) == (200, False)
    api.ahead *= 2
    assert (await sweeper_of(api.services).sweep())["answers"] == 1
    assert (await sweeper_of(api.services).sweep())["answers"] == 0


async def test_of_two_servers_one_makes_the_change(
    api: Api, tmp_path: Path, database_url: str | None
) -> None:
    """Two registries over one database: the loser gets the winner's answer, and nothing of its own stays."""
    await api.key("acme")
    tenant = await api.services.registry.tenants.get_tenant("acme")
    url = (
        database_url
        or f"sqlite:///{api.services.config.server.data_dir.absolute() / 'registry.sqlite'}"
    )
    other = await Registry.open(url, tmp_path / "other", ADMIN_KEY, pepper="p" * 16)
    retry = Retry(key="k", body_digest=body_digest("same"))

    async def publish(registry: Registry, number: int) -> int:
        answer = KeptAnswer(status=201, body={"number": number})
        try:
            async with registry.adapters.publishing(
                tenant.id, Draft(name="pirate"), facts("x")
            ) as made:
                await made.keep(answer, retry=retry)
        except AnsweredBeforeError as error:
            return int(error.answer.body["number"])
        return number

    try:
        racing = enumerate([api.services.registry, other] * 10)
        numbers = await asyncio.gather(*(publish(registry, number) for number, registry in racing))
        assert len(set(numbers)) == 1
        assert await other.uploads.answered(tenant.id, retry) == KeptAnswer(
            status=201, body={"number": numbers[0]}
        )
        assert len(await other.adapters.list_versions(tenant.id, "pirate")) == 1
        published = [
            entry for entry in await other.list_audit() if entry.action == "adapter.publish"
        ]
        assert len(published) == 1
        announced = {WEIGHTS: {"size": 1, "sha256": ""}}
        with pytest.raises(AnsweredBeforeError):
            await other.uploads.create(
                tenant.id,
                Draft(name="p"),
                announced,
                retry,
                lambda _: KeptAnswer(status=201, body={}),
            )
        assert (await other.uploads.list(tenant.id, None, 10)).items == ()
    finally:
        await other.close()


def test_the_digest_tells_parts_apart() -> None:
    cases: list[tuple[str | bytes | bool | None, ...]] = [
        *(
            ("ab", "c"),
            ("a", "bc"),
            ("abc",),
            ("1:a", "b"),
            (b"\xff",),
            (),
            ("",),
            ("", ""),
            (None,),
        ),
        *(("abc", second) for second in ("", None, True, False, "True;")),
    ]
    assert len({body_digest(*parts) for parts in cases}) == len(cases)
