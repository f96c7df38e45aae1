"""Changes that clients send again: made once, answered the same."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_adapters import sound, upload
from api_server import ADMIN_KEY, Api
from bad_upload import Upload
from piecewise_client import announce, code, complete, send_all
from postgres_server import KINDS, database_of
from weft.registry.records import FileFacts, UploadDraft
from weft.registry.registry import Registry
from weft.registry.uploads import Answer, AnsweredBeforeError, Retry, body_digest
from weft.server.adapters.validation import AdapterValidator
from weft.server.garbage import Sweeper

pytestmark = pytest.mark.anyio


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest) -> str | None:
    return database_of(request.param)


def key(name: str) -> dict[str, str]:
    return {"idempotency-key": name}


async def send(client: httpx.AsyncClient, name: str, retry: str, files: Upload | None = None, **fields: str) -> Any:
    made = files or sound()
    return await client.post(
        "/v1/adapters",
        data={"name": name, **fields},
        files={"config": ("c", made.config), "weights": ("w", made.weights)},
        headers=key(retry),
    )


def count_checks(api: Api, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    run = api.services.validator.validate

    async def validate(*arguments: Any) -> Any:
        seen.append(arguments[2])
        return await run(*arguments)

    monkeypatch.setattr(api.services.validator, "validate", validate)
    return seen


async def test_a_repeated_upload_is_answered_as_it_was(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    client, checks = await api.tenant("acme"), count_checks(api, monkeypatch)
    first = await send(client, "pirate", "k 1!")
    again = await send(client, "pirate", "k 1!")
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.content == again.content
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert len(checks) == 1
    await upload(client, "pirate", sound(alpha=8))
    assert (await send(client, "pirate", "k 1!")).content == first.content
    assert (await send(client, "pirate", "k 2!")).status_code == 200
    await client.delete("/v1/adapters/pirate")
    assert (await send(client, "pirate", "k 1!")).content == first.content
    assert (await client.get("/v1/adapters")).json()["data"] == []
    assert api.files() == []


async def test_a_key_stands_for_one_request_of_one_tenant(api: Api) -> None:
    client, rival = await api.tenant("acme"), await api.tenant("rival")
    assert (await send(client, "a", "k")).status_code == 201
    for fields in (
        {"name": "b"},
        {"name": "a", "description": ""},
        {"name": "a", "activate": "false"},
        {"name": "a", "files": sound(alpha=8)},
        {"name": "a", "files": sound(rank=16)},
    ):
        answer = await send(client, retry="k", **fields)
        assert code(answer) == (422, "idempotency.key_reused"), fields
    made = await announce(client, sound(), "a", headers=key("k"))
    assert code(made) == (422, "idempotency.key_reused")
    assert (await send(rival, "b", "k")).status_code == 201
    assert len(api.files()) == 1


async def test_a_refusal_is_not_kept(api: Api) -> None:
    client = await api.tenant("acme")
    bad = Upload(sound().config, b"PK\x03\x04 no weights")
    assert code(await send(client, "a", "k", bad)) == (422, "weights.not_safetensors")
    assert code(await send(client, "a", "k", bad)) == (422, "weights.not_safetensors")
    assert (await send(client, "a", "k")).status_code == 201


async def test_while_the_first_is_in_progress_the_second_waits(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    client, started, go = await api.tenant("acme"), asyncio.Event(), asyncio.Event()
    run = AdapterValidator.validate

    async def slow(*arguments: Any) -> Any:
        started.set()
        await go.wait()
        return await run(*arguments)

    monkeypatch.setattr(AdapterValidator, "validate", slow)
    first = asyncio.create_task(send(client, "a", "k"))
    await started.wait()
    for second in (await send(client, "a", "k"), await announce(client, sound(), headers=key("k"))):
        assert code(second) == (409, "idempotency.in_progress")
        assert int(second.headers["retry-after"]) >= 1
    go.set()
    made = await first
    assert made.status_code == 201
    assert (await send(client, "a", "k")).content == made.content


@pytest.mark.parametrize("bad", ["", " ", "x" * 256, "a\x7fb", "ä"])
async def test_a_key_is_short_and_printable(api: Api, bad: str) -> None:
    client = await api.tenant("acme")
    headers = [(b"idempotency-key", bad.encode("latin-1"))]
    assert code(await announce(client, sound(), headers=headers)) == (400, "idempotency.key_invalid")
    twice = await client.post("/v1/uploads", json={}, headers=[("idempotency-key", "a"), ("idempotency-key", "b")])
    assert code(twice) == (400, "idempotency.key_invalid")
    assert (await announce(client, sound(), headers=key("~" * 255))).status_code == 201


async def test_uploads_in_pieces_are_announced_and_completed_once(api: Api) -> None:
    client, files = await api.tenant("acme"), sound()
    first, again = [await announce(client, files, "p", headers=key("k")) for _ in range(2)]
    assert (first.status_code, first.content) == (again.status_code, again.content)
    assert len((await client.get("/v1/uploads")).json()["data"]) == 1
    upload_id = await send_all(client, files, "q")
    done, twice = await complete(client, upload_id, **key("c")), await complete(client, upload_id, **key("c"))
    assert (done.status_code, done.content) == (twice.status_code, twice.content) == (201, done.content)
    assert twice.headers["idempotent-replayed"] == "true"
    other = (await announce(client, files, "r")).json()["id"]
    assert code(await complete(client, other, **key("c"))) == (422, "idempotency.key_reused")


async def test_answers_are_kept_for_a_day(api: Api) -> None:
    client = await api.tenant("acme")
    assert (await send(client, "a", "k")).status_code == 201
    api.ahead = timedelta(hours=23, minutes=59)
    assert (await send(client, "a", "k")).headers["idempotent-replayed"] == "true"
    assert (await Sweeper(api.services).sweep())["answers"] == 0
    api.ahead = timedelta(hours=24, minutes=1)
    fresh = await send(client, "a", "k")
    assert (fresh.status_code, "idempotent-replayed" in fresh.headers) == (200, False)
    api.ahead *= 2
    assert (await Sweeper(api.services).sweep())["answers"] == 1
    assert (await Sweeper(api.services).sweep())["answers"] == 0


async def test_of_two_servers_one_makes_the_change(api: Api, tmp_path: Path, database_url: str | None) -> None:
    """Two registries over one database: the loser gets the winner's answer, and nothing of its own stays."""
    await api.key("acme")
    tenant = await api.services.registry.tenants.get_tenant("acme")
    url = database_url or f"sqlite:///{api.services.config.server.data_dir.absolute() / 'registry.sqlite'}"
    other = await Registry.open(url, tmp_path / "other", ADMIN_KEY)
    made = sound()
    with api.services.blobs.create() as weights:
        weights.write(made.weights)
        facts_ = await api.services.validator.validate(made.config, weights.path, weights.sha256(), weights.size)
    retry = Retry(key="k", body_digest=body_digest("same"))

    async def publish(registry: Registry, number: int) -> int:
        answer = Answer(status=201, body={"number": number})
        try:
            async with registry.adapters.publishing(tenant.id, "pirate", facts_) as made:
                await made.keep_answer(retry, answer)
        except AnsweredBeforeError as error:
            return int(error.answer.body["number"])
        return number

    try:
        numbers = await asyncio.gather(
            *(publish(registry, number) for number, registry in enumerate([api.services.registry, other] * 10))
        )
        assert len(set(numbers)) == 1
        assert await other.uploads.answered(tenant.id, retry) == Answer(status=201, body={"number": numbers[0]})
        assert len(await other.adapters.list_versions(tenant.id, "pirate")) == 1
        published = [entry for entry in await other.list_audit() if entry.action == "adapter.publish"]
        assert len(published) == 1
        draft = UploadDraft(
            name="p", description=None, activate=True, files={"adapter_model.safetensors": FileFacts(size=1, sha256="")}
        )
        with pytest.raises(AnsweredBeforeError):
            await other.uploads.create(tenant.id, draft, None, retry, lambda _: Answer(status=201, body={}))
        assert (await other.uploads.list(tenant.id, None, 10)).items == ()
    finally:
        await other.close()


def test_the_digest_tells_parts_apart() -> None:
    cases: list[tuple[str | bytes | bool | None, ...]] = [
        ("ab", "c"),
        ("a", "bc"),
        ("abc",),
        ("abc", ""),
        ("abc", None),
        ("abc", True),
        ("abc", False),
        ("abc", "True;"),
        ("1:a", "b"),
        (b"\xff",),
        (),
        ("",),
        ("", ""),
        (None,),
    ]
    assert len({body_digest(*parts) for parts in cases}) == len(cases)
