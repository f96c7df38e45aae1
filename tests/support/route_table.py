"""Every route of a server, who may use it, and a body that is no reason to refuse it."""

from __future__ import annotations

import re
from typing import Any

from api_server import BASE, Api

COMPLETION = {"model": BASE, "prompt": "x", "max_tokens": 1}
CHAT = {"model": BASE, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
FILE = {"size": 1, "sha256": "0" * 64}
ANNOUNCED = {
    "name": "new",
    "files": {"adapter_config.json": FILE, "adapter_model.safetensors": FILE},
}

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
    names = {
        "model_id": BASE,
        "name": "rival" if "/tenants/" in path else name,
        "grantee": "ten_none",
    }
    return re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], "none"), path)
