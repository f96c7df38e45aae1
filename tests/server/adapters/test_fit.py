"""POST /v1/adapters:fit: whether a set of adapters fits on the device at once, by the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from api_adapters import sound, upload
from api_server import BASE, Api, Client
from fake_engine import demo_ready
from manylora.adapters.base_shape import MODULE_PATHS
from manylora.adapters.lora.layout import adapter_pages
from manylora.engine.status import EngineReady, ResidentAdapter
from manylora.server.adapters.fit import find_fit, planned_item, requests_in
from manylora.server.adapters.schemas import AdapterFitItem, AdapterFitView, PlannedAdapters
from manylora.server.uploads.validation import AdapterValidator

pytestmark = pytest.mark.anyio
FIT = "/v1/adapters:fit"
NUM_PAGES, SLOTS = 4096, 256


async def ask(api: Api, tenant: str = "acme", status: int = 200, **body: Any) -> Any:
    answer = await (await api.tenant(tenant)).post(FIT, json=body)
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]


async def test_stored_adapters_need_what_they_take_on_the_device(api: Api, acme: Client) -> None:
    made = [
        (await upload(acme, name, sound(rank=rank))).json()
        for name, rank in (("small", 4), ("large", 64))
    ]
    body = AdapterFitView.model_validate(await ask(api, adapters=["small", "large@1"]))
    needed = sum(one["pages"] for one in made)
    geometry = api.services.ready.geometry
    assert body.fits
    assert body.pages.model_dump() == {
        "total": NUM_PAGES,
        "needed": needed,
        "left": NUM_PAGES - needed,
    }
    assert body.slots.model_dump() == {"total": SLOTS, "needed": 2, "left": SLOTS - 2}
    assert body.kv_tokens_left == (NUM_PAGES - needed) // geometry.num_groups * geometry.page_tokens
    shown = [(item.adapter, item.version, item.digest, item.rank) for item in body.adapters]
    assert shown == [("small", 1, made[0]["digest"], 4), ("large", 1, made[1]["digest"], 64)]
    for item, one in zip(body.adapters, made, strict=True):
        used = one["parameters"] * geometry.dtype_bytes
        assert item.waste == pytest.approx(1 - used / (item.pages * geometry.page_bytes), abs=1e-4)
    assert f"2 adapters need {needed:,} of 4,096 pages" in body.message


async def test_equal_bytes_count_once(api: Api, acme: Client, rival: Client) -> None:
    pages = (await upload(acme, "pirate")).json()["pages"]
    await upload(acme, "twin")
    await upload(rival, "corsair")
    ids = {
        tenant.name: tenant.id
        for tenant in (await api.services.registry.tenants.list_tenants()).items
    }
    await api.services.registry.grants.grant_adapter(
        ids["rival"], "corsair", ids["acme"], actor="test"
    )
    body = await ask(api, adapters=["pirate", "pirate@1", "twin", "rival/corsair"])
    assert (body["pages"]["needed"], body["slots"]["needed"]) == (pages, 1)
    assert [item["adapter"] for item in body["adapters"]] == [
        "pirate",
        "pirate",
        "twin",
        "rival/corsair",
    ]


async def test_adapters_to_come_are_planned_by_the_layout(api: Api) -> None:
    base, geometry = api.services.ready.base, api.services.ready.geometry
    everywhere = {
        (layer, module): 16
        for layer in range(base.num_layers)
        for module in range(len(base.modules))
    }
    q_and_v = {(layer, module): 8 for layer in range(base.num_layers) for module in (0, 2)}
    few = {"rank": 8, "target_modules": ["v_proj", "q_proj"], "count": 3}
    body = await ask(
        api, ranks=[{"rank": 16, "target_modules": "all-linear", "count": 10}, {"rank": 16}, few]
    )
    large, small = adapter_pages(everywhere, base, geometry), adapter_pages(q_and_v, base, geometry)
    shown = [(item["pages"], item["count"], item["adapter"]) for item in body["adapters"]]
    assert shown == [(large, 10, None), (large, 1, None), (small, 3, None)]
    assert (body["pages"]["needed"], body["slots"]["needed"]) == (11 * large + 3 * small, 14)
    assert body["adapters"][2]["target_modules"] == ["q_proj", "v_proj"]


async def test_the_answer_comes_from_the_plan(api: Api, acme: Client) -> None:
    digest = (await upload(acme, "pirate")).json()["digest"]
    before = await ask(api, adapters=["pirate"], ranks=[{"rank": 8, "count": 5}])
    api.engine.residents = [
        ResidentAdapter(digest=digest, tier="device", pages=NUM_PAGES, running=1)
    ]
    assert await ask(api, adapters=["pirate"], ranks=[{"rank": 8, "count": 5}]) == before
    api.engine.ready = None
    assert await ask(api, adapters=["pirate"], ranks=[{"rank": 8, "count": 5}]) == before


async def test_unknown_and_foreign_adapters_are_the_same_404(api: Api, rival: Client) -> None:
    await upload(rival, "secret")
    errors = [
        await ask(api, status=404, adapters=[name])
        for name in ("nothing", "rival/secret", "secret")
    ]
    assert {(error["code"], error["param"]) for error in errors} == {
        ("model_not_found", "adapters")
    }
    assert (await ask(api, status=404, adapters=["pirate@2"]))["code"] == "model_not_found"


async def test_an_admin_asks_for_a_tenant_or_by_full_name(api: Api, acme: Client) -> None:
    await upload(acme, "pirate")
    for path, name, shown in (
        (FIT, "acme/pirate", "acme/pirate"),
        (f"{FIT}?tenant=acme", "pirate", "pirate"),
    ):
        body = (await api.admin.post(path, json={"adapters": [name]})).json()
        assert [item["adapter"] for item in body["adapters"]] == [shown]
    assert (await api.admin.post(FIT, json={"adapters": ["pirate"]})).status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "adapters"),
        ({"adapters": [], "ranks": []}, "adapters"),
        ({"adapters": "pirate"}, "adapters"),
        ({"adapters": [""]}, "adapters.0"),
        ({"adapters": [1]}, "adapters.0"),
        ({"adapters": [BASE]}, "adapters"),
        ({"adapters": ["x"] * 1001}, "adapters"),
        ({"ranks": [{}]}, "ranks.0.rank"),
        ({"ranks": [8]}, "ranks.0"),
        ({"ranks": [{"rank": 0}]}, "ranks.0.rank"),
        ({"ranks": [{"rank": "8"}]}, "ranks.0.rank"),
        ({"ranks": [{"rank": 65}]}, "ranks"),
        ({"ranks": [{"rank": 8, "count": 0}]}, "ranks.0.count"),
        ({"ranks": [{"rank": 8, "alpha": 1}]}, "ranks.0.alpha"),
        ({"ranks": [{"rank": 8, "target_modules": "q_proj"}]}, "ranks.0.target_modules"),
        ({"ranks": [{"rank": 8, "target_modules": []}]}, "ranks.0.target_modules"),
        ({"ranks": [{"rank": 8, "target_modules": ["lm_head"]}]}, "ranks.0.target_modules.0"),
        ({"ranks": [{"rank": 8}] * 33}, "ranks"),
        ({"ranks": [{"rank": 8}], "model": "x"}, "model"),
    ],
)
async def test_a_wrong_body_is_a_400_that_names_the_field(
    acme: Client, body: dict[str, Any], param: str
) -> None:
    answer = await acme.post(FIT, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert "PlannedAdapters" not in answer.text


async def test_weights_that_cannot_be_read_are_503(api: Api, acme: Client) -> None:
    await upload(acme, "pirate")
    restarted = AdapterValidator(api.services.ready, api.services.blobs)
    uploads = replace(api.services.uploads, validator=restarted)
    api.app.state.services = replace(api.services, uploads=uploads)
    for file in api.files():
        file.unlink()
    assert (await ask(api, status=503, adapters=["pirate"]))["code"] == "adapter_load_failed"


def room(pages: int, slots: int = 8) -> EngineReady:
    ready = demo_ready(max_model_len=100, num_pages=pages)
    return replace(ready, memory=replace(ready.memory, slots=slots))


def item(pages: int, count: int = 1, digest: str | None = None) -> AdapterFitItem:
    return AdapterFitItem(
        rank=8, target_modules=[], pages=pages, waste=0.0, count=count, digest=digest
    )


def test_a_set_fits_as_long_as_one_block_of_kv_cache_does() -> None:
    just = find_fit([item(3, count=3)], room(10))
    assert (just.fits, just.pages.left, requests_in(1, room(10))) == (True, 1, 0)
    full = find_fit([item(10)], room(10))
    assert (full.fits, full.pages.left, "they take turns" in full.message) == (False, 0, True)
    assert find_fit([item(10)], room(11)).fits
    assert "All fit at once: 3 adapters need 9 of" in just.message
    assert "All fit at once: 1 adapter needs 3 of" in find_fit([item(3)], room(10)).message
    assert find_fit([item(1, count=8)], room(100)).fits
    crowded = find_fit([item(1, count=9)], room(100))
    assert (crowded.fits, crowded.slots.needed, crowded.slots.left) == (False, 9, 0)


def test_what_is_left_is_told_in_requests_too() -> None:
    geometry = room(30).geometry
    found = find_fit([item(4, digest="a"), item(4, digest="a"), item(2), item(2)], room(30))
    assert (found.pages.needed, found.slots.needed) == (8, 3)
    assert found.kv_tokens_left == 22 * geometry.page_tokens
    assert f"or {22 // geometry.pages(100)} requests of 100 tokens" in found.message


@pytest.mark.parametrize("rank", [1, 8, 12, 64])
def test_waste_is_what_the_weights_do_not_fill(rank: int) -> None:
    base = demo_ready().base
    planned = planned_item(PlannedAdapters(rank=rank), room(10))
    weights = (
        sum(rank * (module.in_features + module.out_features) for module in base.modules)
        * base.num_layers
    )
    assert planned.target_modules == [path.rsplit(".", 1)[-1] for path in MODULE_PATHS]
    assert planned.waste == round(
        1 - weights * 4 / (planned.pages * room(10).geometry.page_bytes), 4
    )
    assert 0 <= planned.waste < 1
