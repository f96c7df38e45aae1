"""Pins over HTTP: what the engine is told when adapters are pinned, change, and go."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from api_adapters import sound, upload
from api_server import Api, Client
from weft.engine.status import ResidentAdapter
from weft.server.pins import sync_pins
from weft.server.status.metrics import Metrics

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


async def test_the_engine_is_told_how_to_load_what_is_pinned_and_only_of_changes(api: Api, acme: Client) -> None:
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


async def test_a_fresh_engine_is_told_the_pins_and_the_metrics_their_names(api: Api, acme: Client) -> None:
    digest = (await upload(acme, "pirate")).json()["digest"]
    await acme.patch("/v1/adapters/pirate", json={"pinned": True})
    api.engine.pinned.clear()
    services = replace(api.services, synced_pins={}, metrics=Metrics())
    await sync_pins(services)
    assert api.engine.pinned == {digest}
    api.engine.residents = [ResidentAdapter(digest=digest, tier="device", pages=1, running=0, pinned=True)]
    text = services.metrics.render(await api.engine.status(), 0.0).decode()
    assert 'weft_adapter_resident{adapter="acme/pirate",tier="device"} 1.0' in text


@pytest.mark.parametrize("pinned", [None, 1, "true", {}])
async def test_a_pin_is_true_or_false(api: Api, acme: Client, pinned: object) -> None:
    await upload(acme, "pirate")
    answer = await acme.patch("/v1/adapters/pirate", json={"pinned": pinned})
    assert (answer.status_code, answer.json().get("pinned")) == ((200, False) if pinned is None else (400, None))
    assert api.engine.told_pins == []


async def test_a_pin_follows_the_default_version_also_when_it_changes_at_once(api: Api, acme: Client) -> None:
    digests = [(await upload(acme, "pirate", sound(alpha=4))).json()["digest"]]
    await acme.patch("/v1/adapters/pirate", json={"pinned": True})
    assert api.engine.pinned == set(digests)
    for alpha in (8, 16):
        digests.append((await upload(acme, "pirate", sound(alpha))).json()["digest"])
        assert api.engine.pinned == {digests[-1]}
    for _ in range(3):
        await asyncio.gather(
            *(acme.patch("/v1/adapters/pirate", json={"aliases": {"default": version}}) for version in (1, 2, 3))
        )
        shown = (await acme.get("/v1/adapters/pirate")).json()
        assert api.engine.pinned == {digests[shown["aliases"]["default"] - 1]}
    await acme.delete(f"/v1/adapters/pirate?version={shown['aliases']['default']}")
    assert api.engine.pinned == {(await acme.get("/v1/adapters/pirate")).json()["digest"]}
    await acme.patch("/v1/adapters/pirate", json={"pinned": False})
    assert api.engine.pinned == set()
