"""Imports by the admin, from a hub and from S3."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from huggingface_hub import constants

from api_adapters import sound, upload
from api_server import Api, Client
from api_server import api as open_api
from manylora.server.adapters.schemas import AdapterView
from piecewise_client import CONFIG, WEIGHTS, code
from s3_server import S3Server

pytestmark = pytest.mark.anyio


class Hub:
    """Answers what the hub does for a file: the file, or a redirect to where it lies."""

    def __init__(self) -> None:
        self.files: dict[str, bytes | int] = {}
        self.seen: list[tuple[str, str | None]] = []

    async def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.seen.append((path, request.headers.get("authorization")))
        found = self.files.get(path.removeprefix("/cdn"), 404)
        if isinstance(found, int):
            return httpx.Response(found)
        if path.endswith(WEIGHTS) and not path.startswith("/cdn"):
            return httpx.Response(302, headers={"location": f"/cdn{path}"})
        return httpx.Response(200, content=found)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub()
    monkeypatch.setattr(
        httpx.AsyncHTTPTransport, "handle_async_request", lambda _, request: made.answer(request)
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    return made


async def ask(api: Api, body: dict[str, str]) -> httpx.Response:
    return await api.admin.post("/v1/adapters:import", json=body)


async def test_from_the_hub(api: Api, acme: Client, hub: Hub) -> None:
    files = sound()
    hub.files = {
        f"/org/lora/resolve/main/{CONFIG}": files.config,
        f"/org/lora/resolve/main/{WEIGHTS}": files.weights,
    }
    body = {"name": "pirate", "tenant": "acme", "source": "hf://org/lora"}
    made = await ask(api, body)
    assert made.status_code == 201, made.text
    view = AdapterView.model_validate_json(made.content)
    assert (view.name, view.tenant, view.version) == ("pirate", "acme", 1)
    assert hub.seen[0] == (f"/org/lora/resolve/main/{CONFIG}", "Bearer hf_secret")
    assert (await upload(acme, "pirate")).status_code == 200
    assert (await ask(api, body)).status_code == 200
    hub.files = {path.replace("main", "v1"): content for path, content in hub.files.items()}
    pinned = await ask(api, {**body, "source": "hf://org/lora@v1"})
    assert pinned.status_code == 200
    assert len(api.files()) == 1


async def test_what_the_hub_does_not_give(api: Api, hub: Hub) -> None:
    await api.key("acme")
    base = f"/org/lora/resolve/main/{CONFIG}"
    body = {"name": "a", "tenant": "acme", "source": "hf://org/lora"}
    for answer, expected in (
        (404, (404, "import.not_found")),
        (401, (404, "import.not_found")),
        (500, (503, "import.unavailable")),
        (b"x" * 70_000, (413, "config.too_large")),
        (b"{}", (404, "import.not_found")),  # without weights
    ):
        hub.files = {base: answer}
        assert code(await ask(api, body)) == expected, answer
    hub.files = {base: sound().config, base.replace(CONFIG, WEIGHTS): b"PK\x03\x04 no weights"}
    assert code(await ask(api, body)) == (422, "weights.not_safetensors")
    assert api.files() == []


async def test_from_s3(api: Api, s3: S3Server, bucket: str) -> None:
    files = sound()
    await api.key("acme")
    body = {"name": "pirate", "tenant": "acme", "source": f"s3://{bucket}/team/pirate"}
    missing = await ask(api, body)
    assert code(missing) == (404, "import.not_found")
    s3.put(bucket, f"team/pirate/{CONFIG}", files.config)
    s3.put(bucket, f"team/pirate/{WEIGHTS}", files.weights)
    headers = {"idempotency-key": "k"}
    made = await api.admin.post("/v1/adapters:import", json=body, headers=headers)
    assert made.status_code == 201, made.text
    again = await api.admin.post("/v1/adapters:import", json=body, headers=headers)
    assert (again.content, again.headers["idempotent-replayed"]) == (made.content, "true")
    other = await ask(api, {**body, "source": "s3://no-such-bucket/x"})
    assert code(other) == (404, "import.not_found")
    assert made.json()["digest"] == (await upload(api.admin, "b", tenant="acme")).json()["digest"]


async def test_an_import_is_bounded(tmp_path: Path, hub: Hub) -> None:
    base = f"/org/lora/resolve/main/{CONFIG}"
    hub.files = {base: sound().config, base.replace(CONFIG, WEIGHTS): sound().weights}
    async with open_api(tmp_path, max_upload_bytes=4096) as api:
        await api.key("acme")
        body = {"name": "a", "tenant": "acme", "source": "hf://org/lora"}
        assert code(await ask(api, body)) == (413, "upload.too_large")
        assert api.files() == []


async def test_only_admins_import_and_only_from_there(api: Api, acme: Client, hub: Hub) -> None:
    body = {"name": "a", "source": "hf://org/lora", "tenant": "acme"}
    assert (await acme.post("/v1/adapters:import", json=body)).status_code == 403
    for source in (
        *(
            "http://127.0.0.1/x",
            "file:///etc/passwd",
            "hf://org",
            "hf://org/a/b",
            "hf://org/lora@a/b",
        ),
        *("s3://B/x", "s3://models/a\nb", "hf://org/..@x?y"),
    ):
        answer = await ask(api, {**body, "source": source})
        assert code(answer) == (400, "invalid_value"), source
    dots = await ask(api, {**body, "source": "hf://../.."})
    assert code(dots) in ((404, "import.not_found"), (400, "invalid_value"))
    assert [path for path, _ in hub.seen if "resolve" not in path] == []
    assert (await ask(api, {**body, "tenant": "none"})).status_code == 404


async def test_an_import_without_credentials_says_so(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.key("acme")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    body = {"name": "support", "tenant": "acme", "source": "s3://bucket/lora"}
    refused = await ask(api, body)
    assert code(refused) == (404, "import.not_found")
    assert "(no AWS credentials were found)" in refused.json()["error"]["message"]
