"""Over HTTP: who else may call an adapter, which version a name means, key rotation, and the log of it all."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from api_adapters import sound, upload
from api_server import Api

pytestmark = pytest.mark.anyio


async def completion(api: Api, key: str, model: str, **extra: object) -> tuple[int, str]:
    headers = extra.pop("headers", {})
    async with api.client(key) as client:
        body = {"model": model, "prompt": "x", "max_tokens": 1, **extra}
        answer = await client.post("/v1/completions", json=body, headers=headers)  # type: ignore[arg-type]
    return answer.status_code, answer.headers.get("x-manylora-adapter", "")


async def test_an_owner_grants_by_id_and_takes_it_back(api: Api) -> None:
    acme, rival = await api.tenant("acme"), await api.key("rival")
    await upload(acme, "support")
    rival_id = (await api.services.registry.tenants.get_tenant("rival")).id
    made = await acme.post("/v1/adapters/support/grants", json={"tenant": rival_id})
    assert (made.status_code, made.json()["tenant"], made.json()["version"]) == (201, "rival", None)
    assert (
        await acme.post("/v1/adapters/support/grants", json={"tenant": rival_id})
    ).status_code == 200
    listed = (await acme.get("/v1/adapters/support/grants")).json()["data"]
    assert [(grant["tenant"], grant["tenant_id"], grant["adapter"]) for grant in listed] == [
        ("rival", rival_id, "support")
    ]
    assert await completion(api, rival, "acme/support") == (200, "acme/support@1")
    async with api.client(rival) as client:
        models = [model["id"] for model in (await client.get("/v1/models")).json()["data"]]
        assert "acme/support" in models
        for method, path in (
            ("GET", ""),
            ("PATCH", ""),
            ("DELETE", ""),
            ("GET", "/grants"),
            ("GET", "/versions"),
        ):
            path = f"/v1/adapters/support{path}"
            assert (
                await client.request(method, path, json={"description": "d"})
            ).status_code == 404
    assert (await acme.delete(f"/v1/adapters/support/grants/{rival_id}")).status_code == 204
    assert (await completion(api, rival, "acme/support"))[0] == 404
    assert (await acme.delete(f"/v1/adapters/support/grants/{rival_id}")).status_code == 404


async def test_an_owner_learns_nothing_about_names_of_tenants(api: Api) -> None:
    acme, _ = await api.tenant("acme"), await api.key("rival")
    await upload(acme, "support")
    answers = [
        await acme.post("/v1/adapters/support/grants", json={"tenant": name})
        for name in ("rival", "nobody")
    ]
    assert {answer.status_code for answer in answers} == {404}
    assert answers[0].json() == answers[1].json()


async def test_a_canary_is_sticky_by_user_then_by_session(api: Api) -> None:
    key = await api.key("acme")
    acme = await api.tenant("acme")
    await upload(acme, "support")
    await upload(acme, "support", sound(alpha=8))
    patched = await acme.patch(
        "/v1/adapters/support", json={"aliases": {"default": {"1": 50, "2": 50}, "prod": 1}}
    )
    assert patched.json()["aliases"] == {"default": {"1": 50, "2": 50}, "prod": 1}
    by_user = {
        user: await completion(api, key, "support", user=user) for user in map(str, range(12))
    }
    assert {answer for _, answer in by_user.values()} == {"acme/support@1", "acme/support@2"}
    for user, first in by_user.items():
        header = {"x-session-id": user}
        assert (
            await completion(api, key, "support", user=user, headers={"x-session-id": "other"})
            == first
        )
        assert await completion(api, key, "support", headers=header) == first
        assert await completion(api, key, "support", adapter_id="support", headers=header) == first
    assert {(await completion(api, key, "support"))[1] for _ in range(20)} == {
        "acme/support@1",
        "acme/support@2",
    }
    await acme.patch("/v1/adapters/support", json={"aliases": {"default": 1}})
    assert {(await completion(api, key, "support"))[1] for _ in range(10)} == {"acme/support@1"}


async def test_aliases_that_make_no_sense_are_refused_with_the_form_that_does(api: Api) -> None:
    acme = await api.tenant("acme")
    await upload(acme, "support")
    for meaning in (
        {"1": "x"},
        {"one": 1},
        {"01": 1},
        [1],
        "1",
        1.5,
        True,
        {},
        {"2": 1},
        {"1": 0},
        {"1": 1 << 70},
        {"1": -1},
        {"1": 10_001},
        {"1": True},
        dict.fromkeys(map(str, range(1, 10)), 1),
        0,
        -1,
        1 << 63,
    ):
        answer = await acme.patch("/v1/adapters/support", json={"aliases": {"prod": meaning}})
        assert answer.status_code == 400, meaning
        assert answer.json()["error"]["param"].startswith("aliases"), meaning
        assert 'got "-1"' not in answer.json()["error"]["message"], "that is a whole number"
    assert (await acme.get("/v1/adapters/support")).json()["aliases"] == {"default": 1}


async def test_a_key_is_rotated_with_and_without_a_grace(api: Api) -> None:
    async def status(secret: str) -> int:
        async with api.client(secret) as client:
            return (await client.get("/v1/usage")).status_code

    await api.key("acme")
    async with api.admin as admin:
        first = (
            await admin.post("/v1/tenants/acme/keys", json={"name": "site", "scopes": ["usage"]})
        ).json()
        rotate = f"/v1/keys/{first['id']}/rotate"
        second = await admin.post(rotate, json={"grace_s": 60})
        assert (second.status_code, second.json()["id"], second.json()["scopes"]) == (
            201,
            first["id"],
            ["usage"],
        )
        assert [await status(first["key"]), await status(second.json()["key"])] == [200, 200]
        third = (await admin.post(rotate, json={})).json()
        assert [await status(made["key"]) for made in (first, second.json(), third)] == [
            401,
            401,
            200,
        ]
        assert (await admin.post(rotate, json={"grace_s": -1})).status_code == 400


async def test_the_audit_log_is_read_in_pages_and_by_tenant(api: Api) -> None:
    acme = await api.tenant("acme")
    await upload(acme, "support")
    await api.key("rival")
    async with api.admin as admin:
        await admin.patch(
            "/v1/adapters/support?tenant=acme", json={"aliases": {"default": {"1": 3}}}
        )
        whole = (await admin.get("/v1/audit")).json()
        assert whole["next"] is None
        assert [entry["action"] for entry in whole["data"]] == [
            "adapter.update",
            "key.create",
            "tenant.create",
            "adapter.publish",
            "key.create",
            "tenant.create",
        ]
        assert whole["data"][0]["detail"] == {"aliases": {"default": {"1": 3}}}
        assert whole["data"][3]["actor"].startswith("key_")
        paged, before = [], ""
        while True:
            page = (await admin.get(f"/v1/audit?limit=2{before}")).json()
            paged += page["data"]
            if page["next"] is None:
                break
            before = f"&before={page['next']}"
        assert paged == whole["data"]
        assert whole["data"][1]["detail"] == {"scopes": ["infer", "adapters", "usage"]}
        mine = (await admin.get("/v1/audit?tenant=rival")).json()["data"]
        assert [entry["action"] for entry in mine] == ["key.create", "tenant.create"]


async def test_the_audit_log_tells_what_tenants_and_keys_were_given(api: Api) -> None:
    async with api.admin as admin:
        await admin.post("/v1/tenants", json={"name": "acme", "limits": {"adapters": 3}})
        given = {
            "scopes": ["infer"],
            "limits": {"requests_per_minute": 5},
            "expires_at": "2100-01-01T00:00:00Z",
        }
        await admin.post("/v1/tenants/acme/keys", json=given)
        key, tenant = (await admin.get("/v1/audit")).json()["data"]
    defaults = asdict(api.services.config.tenant_defaults)
    told = {name: limit for name, limit in defaults.items() if limit is not None}
    assert tenant["detail"] == {"limits": {**told, "adapters": 3}}
    assert key["detail"] == {**given, "expires_at": "2100-01-01T00:00:00.000000Z"}


async def test_an_owner_is_told_which_version_an_adapter_without_this_alias_has(api: Api) -> None:
    acme = await api.tenant("acme")
    await upload(acme, "support")
    await acme.patch("/v1/adapters/support", json={"aliases": {"default": None}})
    for model in ("support", "support@9", "support@prod"):
        answer = await acme.post("/v1/completions", json={"model": model, "prompt": "x"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (404, "model_not_found")
        assert "no such version or alias: ask for `support@1`" in error["message"]
