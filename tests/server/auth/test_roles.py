"""Which role may use which route: the written table, tried on every route with a key of each role."""

from __future__ import annotations

import pytest

from api_adapters import upload
from api_server import ADMIN_KEY, Api
from route_table import ENDLESS, TABLE, documented, filled

pytestmark = pytest.mark.anyio
ROLES = ("infer", "adapters", "usage")


async def test_the_table_has_every_route(api: Api) -> None:
    assert set(TABLE) == documented(api)


async def test_each_role_gets_what_the_table_says(api: Api) -> None:
    keys = {
        **{role: await api.key("acme", role) for role in ROLES},
        "admin": ADMIN_KEY,
        "nobody": None,
    }
    await api.key("rival")
    await upload(await api.tenant("acme"), "mine")
    wrong = []
    for route, (allowed, body) in TABLE.items():
        paths = sorted({filled(route[1], name) for name in ("mine", "nothing")})
        for role, key in keys.items():
            if role == "admin" and route[1] == ENDLESS:
                continue
            async with api.client(key) as client:
                statuses = [
                    (await client.request(route[0], path, json=body)).status_code for path in paths
                ]
            is_let_in = allowed in ("public", role) or (
                role != "nobody" and (role == "admin" or allowed == "any")
            )
            expected = "in" if is_let_in else 401 if role == "nobody" else 403
            for status in statuses:
                got = status if status in (401, 403) else "in"
                if got != expected or status >= 500:
                    wrong.append((route, role, expected, status))
    assert wrong == []


async def test_an_admin_names_the_tenant_where_one_is_needed(api: Api) -> None:
    """And reaches what this tenant has."""
    await upload(await api.tenant("acme"), "mine")
    wrong = []
    for (method, path), (_, body) in TABLE.items():
        if not path.startswith(("/v1/adapters/", "/v1/uploads", "/v1/files", "/v1/batches")):
            continue
        where, is_missing = filled(path), "none" in filled(path) + str(body)
        without = await api.admin.request(method, where, json=body)
        named = await api.admin.request(method, where, json=body, params={"tenant": "acme"})
        if (without.status_code, without.json()["error"]["param"]) != (400, "tenant"):
            wrong.append((method, path, without.text))
        if (
            (named.status_code == 404) != is_missing
            or named.status_code in (401, 403)
            or "name the tenant" in named.text
        ):
            wrong.append((method, path, named.text))
    assert wrong == []
