"""Uploads: what is taken, what is refused and how, and that nothing of a refused one stays."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import httpx
import pytest

from api_adapters import sound, sound_mlx, upload
from api_server import BASE, Api, Client, connect, eventually, new_client
from bad_upload import Upload
from fake_engine import demo_ready
from lora_files import config_bytes
from manylora.adapters.lora.layout import plan_layout
from manylora.engine.status import ResidentAdapter
from manylora.server.adapters.schemas import AdapterList, AdapterView, ReportView, VersionList
from manylora.server.generation.models import ModelList
from piecewise_client import announce, code, complete, send_all
from raw_http import form_part, upload_head

pytestmark = pytest.mark.anyio


async def ask(client: Client, **fields: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"prompt": "x", **fields})


async def test_an_upload_is_there_for_the_next_request(acme: Client) -> None:
    answer = await upload(acme, "pirate", description="arr")
    assert answer.status_code == 201, answer.text
    body = AdapterView.model_validate_json(answer.content)
    base, geometry = demo_ready().base, demo_ready().geometry
    ranks = {(layer, module): 8 for layer in range(base.num_layers) for module in (0, 2)}
    assert (body.name, body.tenant, body.version, body.rank) == ("pirate", "acme", 1, 8)
    assert body.applied_modules.applied == len(ranks)
    assert body.target_modules == ["q_proj", "v_proj"]
    assert body.pages == plan_layout(ranks, base, geometry).num_pages
    assert (body.residency, body.state, body.aliases) == ("stored", "ready", {"default": 1})
    used = await ask(acme, model="pirate")
    told = {
        "x-manylora-adapter": "acme/pirate@1",
        "x-manylora-adapter-digest": body.digest,
        "x-manylora-adapter-state": "stored",
    }
    assert told.items() <= used.headers.items()
    assert body.digest[7:15] in used.json()["choices"][0]["text"]
    listed = AdapterList.model_validate((await acme.get("/v1/adapters")).json())
    assert listed.data[0].usage is not None
    shown = AdapterView.model_validate((await acme.get("/v1/adapters/pirate")).json())
    assert shown.model_copy(update={"usage": None}) == body


async def test_patterns_of_peft_and_ranks_that_no_module_has_are_taken(acme: Client) -> None:
    patterns = {
        "rank_pattern": {r"^model\.layers\..*": 8},
        "alpha_pattern": {"(q|k)_proj": 4, "v_proj": 16},
    }
    for name, config in (
        ("regex", config_bytes(r=200, **patterns)),
        ("no-rank", config_bytes(r=None)),
        ("mlx", sound_mlx(lora_parameters={"rank": 5000, "scale": 2.5, "dropout": 0.0}).config),
    ):
        weights = (sound_mlx() if name == "mlx" else sound()).weights
        answer = await upload(acme, name, Upload(config, weights))
        assert (answer.status_code, answer.json()["rank"]) == (201, 6 if name == "mlx" else 8), (
            answer.text
        )
        assert (await ask(acme, model=name)).status_code == 200
    answer = await upload(
        acme, "not-linear", Upload(config_bytes(rank_pattern={r"(q)\1": 8}), sound().weights)
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (
        422,
        "config.pattern_unsupported",
    )
    assert "reference back" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("0.21.2", "0.21.2"),
        ("0.99.0.dev0@abc", "0.99.0.dev0@abc"),
        ("<b>", None),
        ("1" * 65, None),
        (None, None),
    ],
)
async def test_a_version_says_which_peft_saved_it(
    acme: Client, written: str | None, shown: str | None
) -> None:
    answer = await upload(
        acme, "pirate", Upload(config_bytes(peft_version=written), sound().weights)
    )
    assert answer.status_code == 201, answer.text
    assert answer.json()["peft_version"] == shown
    (version,) = VersionList.model_validate(
        (await acme.get("/v1/adapters/pirate/versions")).json()
    ).data
    assert version.peft_version == shown


async def test_what_the_check_noticed_is_shown_with_the_version(acme: Client) -> None:
    other_base = Upload(config_bytes(base_model_name_or_path="meta/Big"), sound().weights)
    assert (await upload(acme, "pirate", other_base)).status_code == 201
    mlx = await upload(acme, "pirate", sound_mlx(model=f"somewhere/{BASE}"))
    assert mlx.status_code == 201, mlx.text
    again = await upload(acme, "pirate", sound_mlx(model=f"somewhere/{BASE}"))
    assert (again.status_code, again.json()) == (200, mlx.json())
    body = AdapterView.model_validate((await acme.get("/v1/adapters/pirate")).json())
    assert (body.rank, body.report) == (
        6,
        ReportView(dtype=["F32"], layout="mlx", renamed=0, warnings=[]),
    )
    assert body.pages is not None
    second, first = VersionList.model_validate(
        (await acme.get("/v1/adapters/pirate/versions")).json()
    ).data
    assert second.report == body.report
    (warning,) = first.report.warnings
    assert "'meta/Big'" in warning
    assert f"'{BASE}'" in warning


async def test_a_version_is_chosen_by_number_alias_and_digest(acme: Client) -> None:
    first = (await upload(acme, "pirate")).json()
    second = (await upload(acme, "pirate", sound(alpha=8), activate="false")).json()
    patched = await acme.patch("/v1/adapters/pirate", json={"aliases": {"prod": 2}})
    assert patched.json()["aliases"] == {"default": 1, "prod": 2}
    digests = {f"pirate@{first['digest']}": 1, f"pirate@{second['digest']}": 2}
    expected = {"pirate": 1, "acme/pirate": 1, "pirate@2": 2, "pirate@prod": 2, **digests}
    for name, version in expected.items():
        answer = await ask(acme, model=name)
        assert (answer.headers["x-manylora-adapter"], answer.json()["model"]) == (
            f"acme/pirate@{version}",
            name,
        )
    await acme.patch("/v1/adapters/pirate", json={"aliases": {"default": 2, "prod": None}})
    assert (await ask(acme, model="pirate")).headers["x-manylora-adapter"] == "acme/pirate@2"
    assert (await ask(acme, model="pirate@prod")).status_code == 404


async def test_no_upload_ends_a_canary_split(api: Api, acme: Client) -> None:
    for alpha in (16, 8):
        await upload(acme, "pirate", sound(alpha))
    begun = await send_all(acme, sound(4))
    split = {"default": {"1": 95, "2": 5}}
    await acme.patch("/v1/adapters/pirate", json={"aliases": split})
    for attempt in (
        *(
            upload(acme, "pirate"),
            upload(acme, "pirate", sound(4)),
            announce(acme, sound(4)),
            complete(acme, begun),
        ),
    ):
        assert code(await attempt) == (409, "upload.ends_split")
    assert (await acme.get("/v1/adapters/pirate")).json()["aliases"] == split
    beside = await upload(acme, "pirate", sound(4), activate="false")
    assert (beside.status_code, beside.json()["version"], beside.json()["aliases"]) == (
        201,
        3,
        split,
    )
    await acme.patch("/v1/adapters/pirate", json={"aliases": {"default": 3}})
    assert (await complete(acme, begun)).json()["aliases"] == {"default": 3}
    assert len(api.files()) == 1


async def test_adapter_id_goes_with_the_base_or_agrees(acme: Client) -> None:
    await upload(acme, "pirate")
    await upload(acme, "shout", sound(alpha=8))
    for fields, status in (
        ({"model": BASE, "adapter_id": "pirate"}, 200),
        ({"adapter_id": "pirate"}, 200),
        ({"model": "pirate", "adapter_id": "acme/pirate@1"}, 200),
        ({"model": "pirate", "adapter_id": "shout"}, 400),
        ({"model": "pirate", "adapter_id": BASE}, 400),
        ({}, 400),
    ):
        answer = await ask(acme, **fields)
        assert answer.status_code == status, fields
        if status == 200:
            assert (answer.headers["x-manylora-adapter"], answer.json()["model"]) == (
                "acme/pirate@1",
                "pirate",
            )
    near = await ask(acme, model="pirat")
    assert code(near) == (404, "model_not_found")
    assert "`pirate`" in near.json()["error"]["message"]


async def test_models_lists_the_base_and_the_tenants_adapters(acme: Client, rival: Client) -> None:
    made = (await upload(acme, "pirate")).json()
    models = ModelList.model_validate((await acme.get("/v1/models")).json()).data
    shown = [(model.id, model.parent, model.root) for model in models]
    assert shown == [(BASE, None, BASE), ("pirate", BASE, made["digest"])]
    assert (await acme.get("/v1/models/acme/pirate")).json()["id"] == "acme/pirate"
    assert [model["id"] for model in (await rival.get("/v1/models")).json()["data"]] == [BASE]


async def test_a_delete_frees_everything(api: Api, acme: Client) -> None:
    first = (await upload(acme, "pirate")).json()
    second = (await upload(acme, "pirate", sound(rank=16))).json()
    assert len(api.files()) == 2
    assert (await acme.delete("/v1/adapters/pirate?version=1")).status_code == 204
    assert api.engine.dropped == [first["digest"]]
    assert len(api.files()) == 1
    assert (await acme.delete("/v1/adapters/pirate")).status_code == 204
    assert api.engine.dropped == [first["digest"], second["digest"]]
    assert api.files() == []
    assert (await acme.get("/v1/adapters/pirate")).status_code == 404
    assert (await acme.delete("/v1/adapters/pirate")).status_code == 404
    assert (await upload(acme, "pirate")).status_code == 201


async def test_a_blob_that_another_tenant_uses_stays(api: Api, acme: Client, rival: Client) -> None:
    await upload(acme, "pirate")
    await upload(rival, "corsair")
    await acme.delete("/v1/adapters/pirate")
    assert len(api.files()) == 1
    assert api.engine.dropped == []


async def test_the_admin_uploads_for_a_tenant(api: Api, rival: Client) -> None:
    await api.key("acme")
    assert (await upload(api.admin, "a", tenant="acme")).json()["tenant"] == "acme"
    assert code(await upload(api.admin, "a")) == (400, "invalid_value")
    assert code(await upload(api.admin, "a", tenant="nobody")) == (404, "not_found")
    assert code(await upload(rival, "a", tenant="acme")) == (404, "not_found")


async def test_residency_is_what_the_engine_says(api: Api, acme: Client) -> None:
    digest = (await upload(acme, "pirate")).json()["digest"]
    tiers: dict[Literal["device", "host", "loading"], str] = {
        "device": "device",
        "host": "host",
        "loading": "host",
    }
    for tier, shown in tiers.items():
        api.engine.residents = [
            ResidentAdapter(digest=digest, tier=tier, pages=1, running=0, load_p95_s=0.25)
        ]
        assert (await acme.get("/v1/adapters/pirate")).json()["residency"] == shown
    assert (await acme.get("/v1/adapters/pirate")).json()["load_p95_s"] == 0.25
    assert [one["load_p95_s"] for one in (await acme.get("/v1/adapters")).json()["data"]] == [0.25]
    api.engine.ready = None
    assert (await acme.get("/v1/adapters/pirate")).json()["residency"] == "stored"


@pytest.mark.parametrize(
    "name", ["../x", "a/b", ".", "..", "é", "a" * 300, "UPPER", "", "a..b", "-a", BASE, "a\x00b"]
)
async def test_a_bad_name_is_refused(api: Api, acme: Client, name: str) -> None:
    answer = await upload(acme, name)
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] in ("adapter.name_invalid", "adapter.name_reserved")
    assert api.files() == []


async def send(client: Client, *parts: bytes) -> httpx.Response:
    kind = {"content-type": "multipart/form-data; boundary=b"}
    return await client.post("/v1/adapters", content=b"".join(parts), headers=kind)


async def test_wrong_forms_are_refused_and_leave_nothing(api: Api, acme: Client) -> None:
    good = {"name": b"a", "config": sound().config, "weights": sound().weights}
    name, config, weights = (form_part(part, content) for part, content in good.items())
    for parts, expected in (
        ((name, config, weights, form_part("extra", b"x")), "upload.unexpected_part"),
        ((name, config, weights, weights), "upload.unexpected_part"),
        ((name, name, config, weights), "upload.unexpected_part"),
        ((form_part("", b"x"), name, config, weights), "upload.unexpected_part"),
        ((b"--b\r\nX-Other: 1\r\n\r\nx\r\n", name, config, weights), "upload.unexpected_part"),
        ((name, config), "upload.missing_part"),
        ((name, weights), "upload.missing_part"),
        ((config, weights), "upload.missing_part"),
        ((form_part("name", b"x" * 2000), config, weights), "invalid_value"),
        ((name, config, weights, form_part("activate", b"maybe")), "invalid_value"),
        ((form_part("name", b"\xff"), config, weights), "invalid_value"),
        ((b"--b\r\n" + b"X: y\r\n" * 20 + b"\r\n",), "upload.malformed"),
        ((b"--b\r\nX: " + b"y" * 10_000 + b"\r\n\r\n",), "upload.malformed"),
        ((b"garbage",), "upload.malformed"),
    ):
        assert code(await send(acme, *parts, b"--b--\r\n")) == (400, expected), parts[0][:80]
        assert api.files() == []
    assert code(await send(acme, name, config, weights)) == (400, "upload.malformed")
    assert code(await acme.post("/v1/adapters", json={"name": "a"})) == (400, "upload.malformed")
    assert api.files() == []


async def test_a_client_that_drops_leaves_nothing(api: Api, url: str) -> None:
    _, writer = await connect(url)
    head = upload_head(await api.key("acme"), 9_000_000)
    writer.write(head + form_part("name", b"a") + form_part("weights", b"x" * 3_000_000))
    await writer.drain()
    await eventually(api.files)
    writer.close()
    await eventually(lambda: not api.files())


async def test_many_identical_uploads_at_once_make_one_version(
    api: Api, acme: Client, url: str
) -> None:
    files = sound()
    async with new_client(await api.key("acme"), url) as client:
        client.timeout = 120
        answers = await asyncio.gather(*(upload(client, "pirate", files) for _ in range(40)))
    assert sorted(answer.status_code for answer in answers) == [200] * 39 + [201]
    assert len({answer.content for answer in answers}) == 1
    assert len(api.files()) == 1
    versions = await acme.get("/v1/adapters/pirate/versions")
    assert [version["version"] for version in versions.json()["data"]] == [1]


async def test_the_weights_of_a_running_request_outlive_the_delete(api: Api, acme: Client) -> None:
    await upload(acme, "pirate")
    api.engine.token_s = 0.05
    running = asyncio.create_task(ask(acme, model="pirate", max_tokens=200, ignore_eos=True))
    await eventually(lambda: api.engine.running)
    assert (await acme.delete("/v1/adapters/pirate")).status_code == 204
    assert len(api.files()) == 1
    assert (await ask(acme, model="pirate")).status_code == 404
    api.engine.token_s = 0
    assert (await running).status_code == 200
    await eventually(lambda: api.files() == [])
