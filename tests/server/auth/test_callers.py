"""No key and odd keys on every route."""

from __future__ import annotations

import pytest

from api_server import ADMIN_KEY, Api

pytestmark = pytest.mark.anyio
PUBLIC = ["/health", "/ready", "/version", "/openapi.json"]


async def test_public_routes_need_no_key(api: Api) -> None:
    async with api.client() as client:
        for path in PUBLIC:
            statuses = [
                (await client.request(method, path)).status_code
                for method in ("GET", "HEAD", "POST")
            ]
            assert statuses == [200, 200, 401], path
        api.services.drain.is_draining = True
        assert (await client.head("/ready")).status_code == 503


async def test_what_is_not_listed_is_closed(api: Api) -> None:
    paths = [
        "/docs",
        "/redoc",
        "/v1",
        "/.//health",
        "/health/",
        "/HEALTH",
        "/health%2f",
        "/nothing",
    ]
    paths += [path for path in api.app.openapi()["paths"] if path not in PUBLIC]
    assert len(paths) > 40
    async with api.client() as client:
        found = {
            (method, path): (await client.request(method, path)).status_code
            for path in paths
            for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE")
        }
    assert {key: status for key, status in found.items() if status != 401} == {}


async def test_a_revoked_key_stops_at_once(api: Api) -> None:
    async with api.admin as admin:
        await admin.post("/v1/tenants", json={"name": "acme"})
        made = (await admin.post("/v1/tenants/acme/keys", json={"scopes": ["infer"]})).json()
        assert made["scopes"] == ["infer"]
        async with api.client(made["key"]) as client:
            assert (await client.get("/v1/models")).status_code == 200
            listed = (await admin.get("/v1/tenants/acme/keys")).json()["data"]
            assert "key" not in listed[0]
            assert (await admin.delete(f"/v1/keys/{made['id']}")).status_code == 204
            assert (await client.get("/v1/models")).status_code == 401


async def test_a_repeated_or_odd_authorization_header_is_refused(api: Api) -> None:
    async with api.client() as client:
        for value in (
            "Basic abc",
            "Bearer",
            "Bearer ",
            "x" * 9000,
            "Bearer manylora_wrong_key",
            f"Bearer {ADMIN_KEY}x",
        ):
            assert (
                await client.get("/v1/models", headers={"authorization": value})
            ).status_code == 401
        twice = [("authorization", f"Bearer {ADMIN_KEY}"), ("authorization", f"Bearer {ADMIN_KEY}")]
        assert (await client.get("/v1/models", headers=twice)).status_code == 401
        assert (
            await client.get("/v1/models", headers={"authorization": f"bearer {ADMIN_KEY}"})
        ).status_code == 200
