from __future__ import annotations

import pytest

from api_adapters import sound, upload
from api_server import Api, Client
from manylora.server.adapters.schemas import AdapterList

pytestmark = pytest.mark.anyio
EVERY = {"tenant": "*"}


async def test_an_admin_sees_the_adapters_of_all_tenants_in_pages(api: Api, acme: Client) -> None:
    for number, (tenant, name) in enumerate(
        (("rival", "a"), ("acme", "b"), ("acme", "a"), ("zeta", "a"))
    ):
        assert (
            await upload(await api.tenant(tenant), name, sound(alpha=number + 1))
        ).status_code == 201
    used = {"model": "b", "prompt": "x"}
    assert (await acme.post("/v1/completions", json=used)).status_code == 200
    await api.services.registry.usage.flush()
    whole = (await api.admin.get("/v1/adapters", params=EVERY)).json()
    assert AdapterList.model_validate(whole).next is None
    assert (await api.admin.get("/v1/adapters")).json() == whole  # a single one is another matter
    assert (await api.admin.get("/v1/adapters/b")).status_code == 400
    seen = [(adapter["tenant"], adapter["name"]) for adapter in whole["data"]]
    assert seen == [("acme", "a"), ("acme", "b"), ("rival", "a"), ("zeta", "a")]
    for tenant in ("acme", "rival", "zeta"):
        alone = (await api.admin.get("/v1/adapters", params={"tenant": tenant})).json()["data"]
        assert alone == [adapter for adapter in whole["data"] if adapter["tenant"] == tenant]
    assert [adapter["usage"]["requests"] for adapter in whole["data"]] == [0, 1, 0, 0]
    first = (await api.admin.get("/v1/adapters", params={**EVERY, "limit": 3})).json()
    rest = (
        await api.admin.get("/v1/adapters", params={**EVERY, "limit": 3, "after": first["next"]})
    ).json()
    assert (first["data"] + rest["data"], rest["next"]) == (whole["data"], None)


async def test_nobody_else_sees_more_than_a_tenant_that_does_not_exist(
    api: Api, acme: Client, rival: Client
) -> None:
    await upload(acme, "mine")
    for method, path in (
        ("GET", "/v1/adapters"),
        ("GET", "/v1/adapters/mine"),
        ("DELETE", "/v1/adapters/mine"),
    ):
        for client in (rival, acme):
            answer = await client.request(method, path, params=EVERY)
            missing = await client.request(method, path, params={"tenant": "nobody"})
            assert (answer.status_code, answer.text.replace("*", "nobody")) == (404, missing.text)
    for method, path in (
        ("GET", "/v1/adapters/mine"),
        ("DELETE", "/v1/adapters/mine"),
        ("GET", "/v1/usage"),
    ):
        assert (await api.admin.request(method, path, params=EVERY)).status_code == 404
    assert (
        await api.admin.get("/v1/adapters", params={**EVERY, "after": "x" * 128})
    ).status_code == 400
    assert (await api.admin.get("/v1/adapters", params={**EVERY, "after": "acme/zzz"})).json()[
        "data"
    ] == []
