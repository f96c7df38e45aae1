"""Which role may use which route: the written table, tried on every route with a key of each role."""

from __future__ import annotations

import re
from typing import Any

import pytest

from api_adapters import upload
from api_server import ADMIN_KEY, BASE, Api

pytestmark = pytest.mark.anyio
ROLES = ("infer", "adapters", "usage")
COMPLETION = {"model": BASE, "prompt": "x", "max_tokens": 1}
CHAT = {"model": BASE, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
FILE = {"size": 1, "sha256": "0" * 64}
ANNOUNCED = {"name": "new", "files": {"adapter_config.json": FILE, "adapter_model.safetensors": FILE}}

# Route, who may use it (a scope, `any` key, the `admin`, the `public`), and a body that is no reason to refuse it.
TABLE: dict[tuple[str, str], tuple[str, Any]] = {
    ("POST", "/v1/completions"): ("infer", COMPLETION),
    ("POST", "/v1/chat/completions"): ("infer", CHAT),
    ("POST", "/v1/responses"): ("infer", {"model": BASE, "input": "x", "max_output_tokens": 1}),
    ("POST", "/v1/messages"): ("infer", CHAT),
    ("POST", "/v1/messages/count_tokens"): ("infer", {"model": BASE, "messages": CHAT["messages"]}),
    ("POST", "/v1/files"): ("infer", None),
    ("GET", "/v1/files"): ("infer", None),
    ("GET", "/v1/files/{file_id}"): ("infer", None),
    ("GET", "/v1/files/{file_id}/content"): ("infer", None),
    ("DELETE", "/v1/files/{file_id}"): ("infer", None),
    ("POST", "/v1/batches"): ("infer", {}),
    ("GET", "/v1/batches"): ("infer", None),
    ("GET", "/v1/batches/{batch_id}"): ("infer", None),
    ("POST", "/v1/batches/{batch_id}/cancel"): ("infer", None),
    ("POST", "/tokenize"): ("infer", {"prompt": "x"}),
    ("POST", "/detokenize"): ("infer", {"tokens": [5]}),
    ("GET", "/tokenizer_info"): ("infer", None),
    ("GET", "/v1/models"): ("any", None),
    ("GET", "/v1/models/{model_id}"): ("any", None),
    ("GET", "/v1/adapters"): ("any", None),
    ("POST", "/v1/adapters"): ("adapters", None),
    ("POST", "/v1/adapters:fit"): ("adapters", {"adapters": ["mine"]}),
    ("GET", "/v1/adapters/{name}"): ("any", None),
    ("PATCH", "/v1/adapters/{name}"): ("adapters", {"description": "d"}),
    ("GET", "/v1/adapters/{name}/versions"): ("any", None),
    ("GET", "/v1/adapters/{name}/grants"): ("any", None),
    ("POST", "/v1/adapters/{name}/grants"): ("adapters", {"tenant": "ten_none"}),
    ("DELETE", "/v1/adapters/{name}/grants/{grantee}"): ("adapters", None),
    ("DELETE", "/v1/adapters/{name}"): ("adapters", None),
    ("POST", "/v1/uploads"): ("adapters", ANNOUNCED),
    ("GET", "/v1/uploads"): ("any", None),
    ("GET", "/v1/uploads/{upload_id}"): ("any", None),
    ("PUT", "/v1/uploads/{upload_id}/files/{file}"): ("adapters", None),
    ("POST", "/v1/uploads/{upload_id}/complete"): ("adapters", None),
    ("DELETE", "/v1/uploads/{upload_id}"): ("adapters", None),
    ("PUT", "/v1/adapters/{name}/versions:push"): ("adapters", None),
    ("POST", "/v1/load_lora_adapter"): ("adapters", {"lora_name": "new"}),
    ("POST", "/v1/unload_lora_adapter"): ("adapters", {"lora_name": "nothing"}),
    ("POST", "/v1/adapters:import"): ("admin", {"name": "new", "source": "ftp://nowhere"}),
    ("GET", "/v1/usage"): ("usage", None),
    ("GET", "/v1/usage/events"): ("usage", None),
    ("GET", "/v1/usage/latency"): ("usage", None),
    ("GET", "/v1/organization/usage/completions"): ("usage", None),
    ("POST", "/pause"): ("admin", None),
    ("POST", "/resume"): ("admin", None),
    ("GET", "/is_paused"): ("admin", None),
    ("POST", "/reset_prefix_cache"): ("admin", None),
    ("GET", "/get_world_size"): ("admin", None),
    ("GET", "/server_info"): ("admin", None),
    ("POST", "/v1/tenants"): ("admin", {"name": "new"}),
    ("GET", "/v1/tenants"): ("admin", None),
    ("GET", "/v1/tenants/{name}"): ("admin", None),
    ("PATCH", "/v1/tenants/{name}"): ("admin", {"limits": {}}),
    ("POST", "/v1/tenants/{name}/keys"): ("admin", {}),
    ("GET", "/v1/tenants/{name}/keys"): ("admin", None),
    ("GET", "/v1/me"): ("any", None),
    ("POST", "/v1/session"): ("any", None),
    ("POST", "/v1/session/links"): ("any", None),
    ("DELETE", "/v1/session"): ("any", None),
    ("PATCH", "/v1/keys/{key_id}"): ("admin", {}),
    ("POST", "/v1/keys/{key_id}/rotate"): ("admin", {}),
    ("DELETE", "/v1/keys/{key_id}"): ("admin", None),
    ("DELETE", "/v1/tenants/{name}"): ("admin", None),
    ("GET", "/v1/audit"): ("admin", None),
    ("GET", "/v1/engine"): ("admin", None),
    ("GET", "/v1/engine/events"): ("admin", None),
    ("GET", "/metrics"): ("admin", None),
    ("GET", "/health"): ("public", None),
    ("GET", "/ready"): ("public", None),
    ("GET", "/version"): ("public", None),
}
ENDLESS = "/v1/engine/events"


def documented(api: Api) -> set[tuple[str, str]]:
    paths: dict[str, dict[str, Any]] = api.app.openapi()["paths"]
    return {(method.upper(), path) for path, operations in paths.items() for method in operations}


def filled(path: str, name: str = "mine") -> str:
    """The path with names in it: of an own adapter unless another is named, of another tenant, and of nothing."""
    names = {"model_id": BASE, "name": "rival" if "/tenants/" in path else name, "grantee": "ten_none"}
    return re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], "none"), path)


async def test_the_table_has_every_route(api: Api) -> None:
    assert set(TABLE) == documented(api)


async def test_each_role_gets_what_the_table_says(api: Api) -> None:
    keys = {**{role: await api.key("acme", role) for role in ROLES}, "admin": ADMIN_KEY, "nobody": None}
    await api.key("rival")
    await upload(await api.tenant("acme"), "mine")
    wrong = []
    for route, (allowed, body) in TABLE.items():
        paths = sorted({filled(route[1], name) for name in ("mine", "nothing")})
        for role, key in keys.items():
            if role == "admin" and route[1] == ENDLESS:
                continue
            async with api.client(key) as client:
                statuses = [(await client.request(route[0], path, json=body)).status_code for path in paths]
            is_let_in = allowed in ("public", role) or (role != "nobody" and (role == "admin" or allowed == "any"))
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
