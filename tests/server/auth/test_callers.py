"""No key and odd keys on every route, and the admin with and without a tenant."""

from __future__ import annotations

from typing import Any

import pytest

from api_adapters import upload
from api_server import ADMIN_KEY, Api

pytestmark = pytest.mark.anyio
FILE = {"size": 1, "sha256": "0" * 64}
ANNOUNCED = {"name": "new", "files": {"adapter_config.json": FILE, "adapter_model.safetensors": FILE}}

# Method, path and body of what is done for a tenant, and the status where the admin names one.
FOR_A_TENANT: list[tuple[str, str, Any, int]] = [
    ("GET", "/v1/adapters/mine", None, 200),
    ("GET", "/v1/adapters/mine/versions", None, 200),
    ("PATCH", "/v1/adapters/mine", {"description": "d"}, 200),
    ("GET", "/v1/adapters/mine/grants", None, 200),
    ("POST", "/v1/adapters/mine/grants", {"tenant": "rival"}, 201),
    ("DELETE", "/v1/adapters/mine/grants/rival", None, 204),
    ("POST", "/v1/uploads", ANNOUNCED, 201),
    ("GET", "/v1/uploads", None, 200),
    ("GET", "/v1/uploads/{upload}", None, 200),
    ("PUT", "/v1/uploads/{upload}/files/adapter_config.json", None, 200),
    ("POST", "/v1/uploads/{upload}/complete", None, 409),
    ("DELETE", "/v1/uploads/{upload}", None, 204),
    ("GET", "/v1/files", None, 200),
    ("GET", "/v1/files/file-none", None, 404),
    ("DELETE", "/v1/files/file-none", None, 404),
    ("GET", "/v1/batches", None, 200),
    ("GET", "/v1/batches/batch_none", None, 404),
    ("POST", "/v1/batches/batch_none/cancel", None, 404),
    ("DELETE", "/v1/adapters/mine", None, 204),
]
PUBLIC = ["/health", "/ready", "/version", "/openapi.json"]


async def call(api: Api, key: str | None, method: str, path: str, body: Any) -> tuple[int, Any]:
    async with api.client(key) as client:
        answer = await client.request(method, path, json=body)
    is_json = answer.headers.get("content-type", "").startswith("application/json")
    return answer.status_code, answer.json() if is_json else None


async def test_an_admin_names_the_tenant_where_one_is_needed(api: Api) -> None:
    await api.key("rival")
    assert (await upload(await api.tenant("acme"), "mine")).status_code == 201
    announced = (await (await api.tenant("acme")).post("/v1/uploads", json=ANNOUNCED)).json()
    wrong = []
    for method, form, body, expected in FOR_A_TENANT:
        path = form.replace("{upload}", announced["id"])
        without, error = await call(api, ADMIN_KEY, method, path, body)
        status, answer = await call(api, ADMIN_KEY, method, f"{path}?tenant=acme", body)
        if (without, error["error"]["param"], status) != (400, "tenant", expected):
            wrong.append((method, path, without, status, answer))
    assert wrong == []


async def test_public_routes_need_no_key(api: Api) -> None:
    async with api.client() as client:
        for path in PUBLIC:
            assert (await client.get(path)).status_code == 200
            assert (await client.post(path)).status_code == 401


async def test_what_is_not_listed_is_closed(api: Api) -> None:
    paths = ["/docs", "/redoc", "/v1", "/.//health", "/health/", "/HEALTH", "/health%2f", "/nothing"]
    paths += [path for path in api.app.openapi()["paths"] if path not in PUBLIC]
    assert len(paths) > 40
    async with api.client() as client:
        found = {
            (method, path): (await client.request(method, path)).status_code
            for path in paths
            for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE")
        }
    assert {key: status for key, status in found.items() if status != 401} == {}


async def test_unknown_routes_and_methods_have_the_error_shape(api: Api) -> None:
    status, answer = await call(api, ADMIN_KEY, "GET", "/v1/nothing", None)
    assert (status, answer["error"]["code"]) == (404, "not_found")
    status, answer = await call(api, ADMIN_KEY, "PUT", "/v1/tenants", {})
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")


async def test_a_revoked_key_stops_at_once(api: Api) -> None:
    async with api.admin as admin:
        await admin.post("/v1/tenants", json={"name": "acme"})
        made = (await admin.post("/v1/tenants/acme/keys", json={"scopes": ["infer"]})).json()
        assert made["scopes"] == ["infer"]
        assert (await call(api, made["key"], "GET", "/v1/models", None))[0] == 200
        listed = (await admin.get("/v1/tenants/acme/keys")).json()["data"]
        assert "key" not in listed[0]
        assert (await admin.delete(f"/v1/keys/{made['id']}")).status_code == 204
    assert (await call(api, made["key"], "GET", "/v1/models", None))[0] == 401


async def test_a_repeated_or_odd_authorization_header_is_refused(api: Api) -> None:
    async with api.client() as client:
        for value in ("Basic abc", "Bearer", "Bearer ", "x" * 9000, "Bearer weft_wrong_key", f"Bearer {ADMIN_KEY}x"):
            assert (await client.get("/v1/models", headers={"authorization": value})).status_code == 401
        twice = [("authorization", f"Bearer {ADMIN_KEY}"), ("authorization", f"Bearer {ADMIN_KEY}")]
        assert (await client.get("/v1/models", headers=twice)).status_code == 401
        assert (await client.get("/v1/models", headers={"authorization": f"bearer {ADMIN_KEY}"})).status_code == 200


async def test_load_balancers_may_ask_with_head(api: Api) -> None:
    async with api.client() as client:
        assert [(await client.head(path)).status_code for path in PUBLIC] == [200] * len(PUBLIC)
        api.services.drain.is_draining = True
        assert (await client.head("/ready")).status_code == 503
