"""Every route by every kind of caller: no key, wrong key, another tenant, the admin, the right tenant."""

from __future__ import annotations

import re
from typing import Any

import pytest

from api_adapters import upload
from api_server import ADMIN_KEY, BASE, Api

pytestmark = pytest.mark.anyio
COMPLETION = {"model": BASE, "prompt": "x"}
CHAT = {"model": BASE, "messages": [{"role": "user", "content": "x"}]}
FILE = {"size": 1, "sha256": "0" * 64}
ANNOUNCED = {"name": "new", "files": {"adapter_config.json": FILE, "adapter_model.safetensors": FILE}}
USAGE = "/v1/organization/usage/completions"

# method, path, body, and the status for: another tenant, the admin, the right tenant
TABLE: list[tuple[str, str, Any, int, int, int]] = [
    ("POST", "/v1/completions", COMPLETION, 200, 200, 200),
    ("POST", "/v1/chat/completions", CHAT, 200, 200, 200),
    ("GET", "/v1/models", None, 200, 200, 200),
    ("GET", f"/v1/models/{BASE}", None, 200, 200, 200),
    ("GET", "/v1/models/mine", None, 404, 404, 200),
    ("GET", "/v1/models/acme/mine", None, 404, 200, 200),
    ("POST", "/v1/tenants", {"name": "new"}, 403, 201, 403),
    ("GET", "/v1/tenants", None, 403, 200, 403),
    ("GET", "/v1/tenants/acme", None, 403, 200, 403),
    ("PATCH", "/v1/tenants/acme", {"limits": {}}, 403, 200, 403),
    ("POST", "/v1/tenants/acme/keys", {}, 403, 201, 403),
    ("GET", "/v1/tenants/acme/keys", None, 403, 200, 403),
    ("POST", "/v1/keys/key_none/rotate", {}, 403, 404, 403),
    ("DELETE", "/v1/keys/key_none", None, 403, 404, 403),
    ("GET", "/v1/audit", None, 403, 200, 403),
    ("PATCH", "/v1/keys/key_none", {"name": "x"}, 403, 404, 403),
    ("DELETE", "/v1/keys/key_none", None, 403, 404, 403),
    ("GET", "/v1/me", None, 200, 200, 200),
    ("POST", "/v1/session", None, 201, 201, 201),
    ("POST", "/v1/session/links", None, 201, 201, 201),
    ("DELETE", "/v1/session", None, 204, 204, 204),
    ("GET", "/v1/me?tenant=acme", None, 404, 200, 200),
    ("GET", "/v1/adapters", None, 200, 400, 200),
    ("GET", "/v1/adapters?tenant=acme", None, 404, 200, 200),
    ("GET", "/v1/adapters?tenant=*", None, 404, 200, 404),
    ("GET", "/v1/adapters/mine?tenant=*", None, 404, 404, 404),
    ("GET", "/v1/adapters/mine", None, 404, 400, 200),
    ("GET", "/v1/adapters/mine?tenant=acme", None, 404, 200, 200),
    ("GET", "/v1/adapters/mine/versions", None, 404, 400, 200),
    ("PATCH", "/v1/adapters/mine", {"description": "d"}, 404, 400, 200),
    ("GET", "/v1/adapters/mine/grants", None, 404, 400, 200),
    ("GET", "/v1/adapters/mine/grants?tenant=acme", None, 404, 200, 200),
    ("POST", "/v1/adapters/mine/grants", {"tenant": "ten_none"}, 404, 400, 404),
    ("POST", "/v1/adapters/mine/grants?tenant=acme", {"tenant": "rival"}, 404, 201, 404),
    ("DELETE", "/v1/adapters/mine/grants/ten_none", None, 404, 400, 404),
    ("DELETE", "/v1/adapters/mine/grants/rival?tenant=acme", None, 404, 204, 404),
    ("POST", "/v1/adapters", None, 400, 400, 400),
    ("POST", "/v1/adapters:fit", {"adapters": ["mine"]}, 404, 404, 200),
    ("POST", "/v1/adapters:fit?tenant=acme", {"adapters": ["mine"]}, 404, 200, 200),
    ("POST", "/v1/uploads", ANNOUNCED, 201, 400, 201),
    ("POST", "/v1/uploads", {**ANNOUNCED, "tenant": "acme"}, 404, 201, 201),
    ("GET", "/v1/uploads", None, 200, 400, 200),
    ("GET", "/v1/uploads/{upload}", None, 404, 400, 200),
    ("GET", "/v1/uploads/{upload}?tenant=acme", None, 404, 200, 200),
    ("PUT", "/v1/uploads/{upload}/files/adapter_config.json", None, 404, 400, 200),
    ("POST", "/v1/uploads/{upload}/complete", None, 404, 400, 409),
    ("DELETE", "/v1/uploads/{upload}", None, 404, 400, 204),
    ("POST", "/v1/adapters:import", {"name": "a", "source": "ftp://x", "tenant": "acme"}, 403, 400, 403),
    ("DELETE", "/v1/adapters/mine", None, 404, 400, 204),
    ("GET", "/v1/usage", None, 200, 200, 200),
    ("GET", "/v1/usage?tenant=acme", None, 404, 200, 200),
    ("GET", "/v1/usage/events", None, 200, 200, 200),
    ("GET", "/v1/usage/events?tenant=acme", None, 404, 200, 200),
    ("GET", "/v1/usage/latency", None, 200, 200, 200),
    ("GET", "/v1/usage/latency?tenant=acme", None, 404, 200, 200),
    ("GET", f"{USAGE}?start_time=0&bucket_width=1d", None, 200, 200, 200),
    ("POST", "/v1/files", None, 400, 400, 400),
    ("GET", "/v1/files", None, 200, 400, 200),
    ("GET", "/v1/files/file-none", None, 404, 400, 404),
    ("GET", "/v1/files/file-none/content", None, 404, 400, 404),
    ("DELETE", "/v1/files/file-none", None, 404, 400, 404),
    ("POST", "/v1/batches", {"input_file_id": "x", "endpoint": "/v1/completions"}, 400, 400, 400),
    ("GET", "/v1/batches", None, 200, 400, 200),
    ("GET", "/v1/batches/batch_none", None, 404, 400, 404),
    ("POST", "/v1/batches/batch_none/cancel", None, 404, 400, 404),
    ("POST", "/tokenize", {"prompt": "x"}, 200, 200, 200),
    ("POST", "/detokenize", {"tokens": [5]}, 200, 200, 200),
    ("GET", "/tokenizer_info", None, 200, 200, 200),
    ("GET", "/v1/engine", None, 403, 200, 403),
    ("GET", "/metrics", None, 403, 200, 403),
    ("DELETE", "/v1/tenants/acme", None, 403, 204, 403),
]
PUBLIC = ["/health", "/ready", "/version", "/openapi.json"]
STREAMED = "/v1/engine/events"


async def call(api: Api, key: str | None, method: str, path: str, body: Any) -> tuple[int, Any]:
    async with api.client(key) as client:
        answer = await client.request(method, path, json=body)
    is_json = answer.headers.get("content-type", "").startswith("application/json")
    return answer.status_code, answer.json() if is_json else None


async def test_each_caller_gets_what_is_due(api: Api) -> None:
    acme, rival = await api.key("acme"), await api.key("rival")
    assert (await upload(api.client(acme), "mine")).status_code == 201
    announced = (await api.client(acme).post("/v1/uploads", json=ANNOUNCED)).json()
    callers = {None: 401, "weft_wrong_key": 401, ADMIN_KEY + "x": 401}
    wrong = []
    for method, path, body, other, admin, right in TABLE:
        for key, expected in {**callers, rival: other, acme: right, ADMIN_KEY: admin}.items():
            status, answer = await call(api, key, method, path.replace("{upload}", announced["id"]), body)
            if status != expected or (status >= 400 and set(answer["error"]) != {"message", "type", "param", "code"}):
                wrong.append((method, path, key, expected, status, answer))
    assert wrong == []


async def test_every_route_stands_in_the_table(api: Api) -> None:
    seen = [(method, path.partition("?")[0]) for method, path, *_ in TABLE]
    seen += [("GET", path) for path in (*PUBLIC, STREAMED)]
    documented = [
        (method.upper(), re.compile(re.sub(r"\{[^}]*\}", ".+", path)))
        for path, operations in api.app.openapi()["paths"].items()
        for method in operations
    ]
    missing = [
        (method, pattern.pattern)
        for method, pattern in documented
        if not any(method == seen_method and pattern.fullmatch(path) for seen_method, path in seen)
    ]
    assert len(documented) > 25
    assert missing == []


async def test_public_routes_need_no_key(api: Api) -> None:
    async with api.client() as client:
        for path in PUBLIC:
            assert (await client.get(path)).status_code == 200
            assert (await client.post(path)).status_code == 401


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
    paths += [path for _, path, *_ in TABLE]
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


async def test_scopes_limit_a_key(api: Api) -> None:
    cases: list[tuple[str, str, str, Any, int]] = [
        ("usage", "POST", "/v1/completions", COMPLETION, 403),
        ("infer", "POST", "/v1/completions", COMPLETION, 200),
        ("infer", "GET", "/v1/usage", None, 403),
        ("usage", "GET", "/v1/usage", None, 200),
        ("infer", "DELETE", "/v1/adapters/mine", None, 403),
        ("infer", "POST", "/v1/adapters", None, 403),
        ("infer", "POST", "/v1/uploads", ANNOUNCED, 403),
        ("infer", "DELETE", "/v1/uploads/upl_none", None, 403),
        ("infer", "GET", "/v1/adapters", None, 200),
    ]
    for scope, method, path, body, expected in cases:
        status, answer = await call(api, await api.key("acme", scope), method, path, body)
        assert status == expected, (scope, path, answer)


async def test_another_tenants_adapter_looks_like_none_at_all(api: Api) -> None:
    await upload(await api.tenant("acme"), "secret")
    rival = await api.key("rival")
    for name in ("secret", "acme/secret", "secret@1"):
        _, foreign = await call(api, rival, "POST", "/v1/completions", {**COMPLETION, "model": name})
        missing_name = name.replace("secret", "zzzzzz").replace("acme", "nope")
        _, missing = await call(api, rival, "POST", "/v1/completions", {**COMPLETION, "model": missing_name})
        assert foreign["error"]["code"] == "model_not_found"
        assert str(foreign).replace(name, "X") == str(missing).replace(missing_name, "X")


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
        for value in ("Basic abc", "Bearer", "Bearer ", "x" * 9000):
            assert (await client.get("/v1/models", headers={"authorization": value})).status_code == 401
        twice = [("authorization", f"Bearer {ADMIN_KEY}"), ("authorization", f"Bearer {ADMIN_KEY}")]
        assert (await client.get("/v1/models", headers=twice)).status_code == 401
        assert (await client.get("/v1/models", headers={"authorization": f"bearer {ADMIN_KEY}"})).status_code == 200


async def test_load_balancers_may_ask_with_head(api: Api) -> None:
    async with api.client() as client:
        assert [(await client.head(path)).status_code for path in PUBLIC] == [200] * len(PUBLIC)
        api.services.drain.is_draining = True
        assert (await client.head("/ready")).status_code == 503
