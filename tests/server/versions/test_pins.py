"""Pins over HTTP: what the engine is told when adapters are pinned, change, and go."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace

import pytest

from api_adapters import sound, upload
from api_server import Api, Client
from manylora.engine.status import ResidentAdapter
from manylora.server.telemetry.metrics import Metrics

pytestmark = pytest.mark.anyio


async def test_a_pin_lasts_as_long_as_any_adapter_of_the_same_bytes_wants_it(
    api: Api, acme: Client, rival: Client
) -> None:
    digest = (await upload(acme, "pirate")).json()["digest"]
    assert (await upload(rival, "corsair")).json()["digest"] == digest
    for client, name in ((acme, "pirate"), (rival, "corsair")):
        await client.patch(f"/v1/adapters/{name}", json={"pinned": True})
    await rival.patch("/v1/adapters/corsair", json={"pinned": False})
    assert api.engine.pinned == {digest}
    await rival.patch("/v1/adapters/corsair", json={"pinned": True})
    await rival.delete("/v1/adapters/corsair")
    assert api.engine.pinned == {digest}
    await upload(rival, "corsair")
    await acme.delete("/v1/adapters/pirate")
    assert api.engine.pinned == set()
    await rival.patch("/v1/adapters/corsair", json={"pinned": True})
    await rival.delete("/v1/adapters/corsair")
    await upload(rival, "corsair")
    await rival.patch("/v1/adapters/corsair", json={"pinned": True})
    assert api.engine.pinned == {digest}


async def test_the_engine_is_told_how_to_load_what_is_pinned_and_only_of_changes(
    api: Api, acme: Client
) -> None:
    await upload(acme, "pirate")
    for pinned in (True, True, False):
        shown = (await acme.patch("/v1/adapters/pirate", json={"pinned": pinned})).json()
        assert shown["pinned"] is pinned
        assert (await acme.get("/v1/adapters/pirate")).json()["pinned"] is pinned
    owner = await api.services.registry.tenants.get_tenant("acme")
    adapter = await api.services.registry.adapters.get_adapter(owner.id, "pirate")
    ref = adapter.ref(adapter.current)
    assert api.engine.told_pins == [(ref, True), (ref, False)]
    assert api.engine.requests == []


async def test_a_fresh_engine_is_told_the_pins_and_the_metrics_their_names(
    api: Api, acme: Client
) -> None:
    digest = (await upload(acme, "pirate")).json()["digest"]
    await acme.patch("/v1/adapters/pirate", json={"pinned": True})
    api.engine.pinned.clear()
    metrics = Metrics()
    await replace(api.services.versions.pins, on_pin=metrics.learn_adapter).sync()
    assert api.engine.pinned == {digest}
    api.engine.residents = [
        ResidentAdapter(digest=digest, tier="device", pages=1, running=0, pinned=True)
    ]
    text = metrics.render(await api.engine.status(), 0.0).decode()
    assert 'manylora_adapter_resident{adapter="acme/pirate",tier="device"} 1.0' in text


@pytest.mark.parametrize("pinned", [None, 1, "true", {}])
async def test_a_pin_is_true_or_false(api: Api, acme: Client, pinned: object) -> None:
    await upload(acme, "pirate")
    answer = await acme.patch("/v1/adapters/pirate", json={"pinned": pinned})
    assert (answer.status_code, answer.json().get("pinned")) == (
        (200, False) if pinned is None else (400, None)
    )
    assert api.engine.told_pins == []


async def test_a_pin_follows_the_default_version_also_when_it_changes_at_once(
    api: Api, acme: Client
) -> None:
    digests = [(await upload(acme, "pirate", sound(alpha=4))).json()["digest"]]
    await acme.patch("/v1/adapters/pirate", json={"pinned": True})
    assert api.engine.pinned == set(digests)
    for alpha in (8, 16):
        digests.append((await upload(acme, "pirate", sound(alpha))).json()["digest"])
        assert api.engine.pinned == {digests[-1]}
    for _ in range(3):
        await asyncio.gather(
            *(
                acme.patch("/v1/adapters/pirate", json={"aliases": {"default": version}})
                for version in (1, 2, 3)
            )
        )
        shown = (await acme.get("/v1/adapters/pirate")).json()
        assert api.engine.pinned == {digests[shown["aliases"]["default"] - 1]}
    await acme.delete(f"/v1/adapters/pirate?version={shown['aliases']['default']}")
    assert api.engine.pinned == {(await acme.get("/v1/adapters/pirate")).json()["digest"]}
    await acme.patch("/v1/adapters/pirate", json={"pinned": False})
    assert api.engine.pinned == set()


async def test_a_pin_is_a_number_of_copies(api: Api, acme: Client) -> None:
    shown = (await upload(acme, "pirate")).json()
    assert (shown["pinned"], shown["pinned_copies"]) == (False, 0)
    for body, expected in (
        ({"pinned": True}, (True, 1)),
        ({"pinned": True, "pinned_copies": 3}, (True, 3)),
        ({"description": "arr"}, (True, 3)),
        ({"pinned": True}, (True, 1)),
        ({"pinned": True, "pinned_copies": 1000}, (True, 1000)),
        ({"pinned": False}, (False, 0)),
    ):
        for answer in (
            await acme.patch("/v1/adapters/pirate", json=body),
            await acme.get("/v1/adapters/pirate"),
        ):
            assert (answer.json()["pinned"], answer.json()["pinned_copies"]) == expected, body


@pytest.mark.parametrize(
    "body",
    [
        {"pinned_copies": 2},
        {"pinned": False, "pinned_copies": 2},
        *({"pinned": True, "pinned_copies": copies} for copies in (0, -1, 1001, 1.5, "2", True)),
    ],
)
async def test_copies_are_of_a_pin_and_a_number_above_0(
    api: Api, acme: Client, body: dict[str, object]
) -> None:
    await upload(acme, "pirate")
    answer = await acme.patch("/v1/adapters/pirate", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "pinned_copies")
    assert (await acme.get("/v1/adapters/pirate")).json()["pinned_copies"] == 0


async def test_the_limit_of_pinned_pages_counts_every_copy(api: Api, acme: Client) -> None:
    pages = (await upload(acme, "a")).json()["pages"]
    assert (await upload(acme, "b", sound(alpha=4))).json()["pages"] == pages
    limits = {"limits": {"pinned_pages": 3 * pages}}
    assert (await api.admin.patch("/v1/tenants/acme", json=limits)).status_code == 200

    async def pin(name: str, copies: int) -> int:
        answer = await acme.patch(
            f"/v1/adapters/{name}", json={"pinned": True, "pinned_copies": copies}
        )
        if answer.status_code != 200:
            assert answer.json()["error"]["code"] == "quota.pinned_pages"
        return answer.status_code

    assert [await pin("a", 4), await pin("a", 3), await pin("b", 1)] == [403, 200, 403]
    assert [await pin("a", 2), await pin("b", 2), await pin("b", 1), await pin("a", 3)] == [
        200,
        403,
        200,
        403,
    ]
    split = {"aliases": {"default": {"1": 1, "2": 1}}}
    assert (await upload(acme, "a", sound(alpha=8), activate="false")).status_code == 201
    assert (await acme.patch("/v1/adapters/a", json=split)).json()["error"][
        "code"
    ] == "quota.pinned_pages"


async def test_pins_move_when_servers_join_and_leave(api: Api, acme: Client) -> None:
    digests = [
        (await upload(acme, f"a{alpha}", sound(alpha))).json()["digest"] for alpha in range(1, 13)
    ]
    for alpha in range(1, 13):
        body = {"pinned": True, "pinned_copies": 2 if alpha % 2 else 1}
        assert (await acme.patch(f"/v1/adapters/a{alpha}", json=body)).status_code == 200
    servers = ["srv_a", "srv_b"]

    def first(digest: str, copies: int) -> list[str]:
        ranked = sorted(
            servers,
            key=lambda name: hashlib.sha256(f"{name} {digest}".encode()).digest(),
            reverse=True,
        )
        return ranked[:copies]

    def due(name: str) -> set[str]:
        return {
            digest
            for number, digest in enumerate(digests)
            if name in first(digest, 1 if number % 2 else 2)
        }

    pins = api.services.versions.pins
    pins.keeps_pin = lambda digest, copies: "srv_a" in first(digest, copies)
    await pins.sync()
    assert api.engine.pinned == due("srv_a") < set(digests)
    assert due("srv_a") | due("srv_b") == set(digests)
    alone_with_one = due("srv_a")
    servers.append("srv_c")
    await pins.sync()
    assert api.engine.pinned == due("srv_a") < alone_with_one
    told = len(api.engine.told_pins)
    await pins.sync()
    assert len(api.engine.told_pins) == told
    del servers[1:]
    await pins.sync()
    assert api.engine.pinned == set(digests)
    servers[:] = ["srv_b"]
    await pins.sync()
    assert api.engine.pinned == set()


async def test_two_adapters_of_one_digest_are_kept_where_either_asks(
    api: Api, acme: Client, rival: Client
) -> None:
    digest = (await upload(acme, "pirate")).json()["digest"]
    await upload(rival, "corsair")
    pins = replace(api.services.versions.pins, keeps_pin=lambda _, copies: copies > 1)
    await acme.patch("/v1/adapters/pirate", json={"pinned": True})
    await rival.patch("/v1/adapters/corsair", json={"pinned": True, "pinned_copies": 2})
    api.engine.pinned.clear()
    await pins.sync()
    assert api.engine.pinned == {digest}
    await rival.patch("/v1/adapters/corsair", json={"pinned": True})
    await pins.sync()
    assert api.engine.pinned == set()
