"""What a client does to upload an adapter in pieces."""

from __future__ import annotations

import hashlib
from typing import Any

import httpx

from bad_upload import Upload

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def facts(content: bytes) -> dict[str, Any]:
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


async def announce(
    client: httpx.AsyncClient,
    files: Upload,
    name: str = "pirate",
    headers: Any = None,
    **fields: Any,
) -> httpx.Response:
    manifest = {CONFIG: facts(files.config), WEIGHTS: facts(files.weights)}
    return await client.post(
        "/v1/uploads", json={"name": name, "files": manifest, **fields}, headers=headers
    )


async def put(
    client: httpx.AsyncClient,
    upload_id: str,
    name: str,
    content: bytes,
    start: int | None = None,
    total: int = 0,
) -> httpx.Response:
    headers = (
        {}
        if start is None
        else {"content-range": f"bytes {start}-{start + len(content) - 1}/{total}"}
    )
    return await client.put(
        f"/v1/uploads/{upload_id}/files/{name}", content=content, headers=headers
    )


async def send_all(
    client: httpx.AsyncClient, files: Upload, name: str = "pirate", **fields: Any
) -> str:
    made = (await announce(client, files, name, **fields)).json()
    for file in made["missing"]:
        answer = await put(
            client, made["id"], file, files.config if file == CONFIG else files.weights
        )
        assert answer.status_code == 200, answer.text
    return str(made["id"])


async def complete(client: httpx.AsyncClient, upload_id: str, **headers: str) -> httpx.Response:
    return await client.post(f"/v1/uploads/{upload_id}/complete", headers=headers)
