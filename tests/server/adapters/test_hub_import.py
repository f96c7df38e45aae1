"""Imports by the admin, from a hub and from S3, each a real server on this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from api_adapters import sound, upload
from api_server import Api
from api_server import api as open_api
from piecewise_client import CONFIG, WEIGHTS, code
from s3_server import S3Server
from weft.server.adapters.schemas import AdapterView

pytestmark = pytest.mark.anyio


class Hub:
    """Answers what the hub does for a file: the file, or a redirect to where it lies."""

    def __init__(self) -> None:
        self.files: dict[str, bytes | int] = {}
        self.seen: list[tuple[str, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.seen.append((self.path, self.headers.get("authorization")))
                found = hub.files.get(self.path.removeprefix("/cdn"), 404)
                if isinstance(found, bytes) and self.path.endswith(WEIGHTS) and not self.path.startswith("/cdn"):
                    self.send_response(302)
                    self.send_header("location", f"/cdn{self.path}")
                    found = b""
                else:
                    self.send_response(found if isinstance(found, int) else 200)
                content = b"" if isinstance(found, int) else found
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub()
    thread = threading.Thread(target=made.server.serve_forever, daemon=True)
    thread.start()
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, made.url)  # HF_ENDPOINT is read early
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


async def test_from_the_hub(api: Api, hub: Hub) -> None:
    files = sound()
    hub.files = {f"/org/lora/resolve/main/{CONFIG}": files.config, f"/org/lora/resolve/main/{WEIGHTS}": files.weights}
    client, body = await api.tenant("acme"), {"name": "pirate", "tenant": "acme", "source": "hf://org/lora"}
    made = await api.admin.post("/v1/adapters:import", json=body)
    assert made.status_code == 201, made.text
    view = AdapterView.model_validate_json(made.content)
    assert (view.name, view.tenant, view.version) == ("pirate", "acme", 1)
    assert hub.seen[0] == (f"/org/lora/resolve/main/{CONFIG}", "Bearer hf_secret")
    assert (await upload(client, "pirate")).status_code == 200
    assert (await api.admin.post("/v1/adapters:import", json=body)).status_code == 200
    hub.files = {path.replace("main", "v1"): content for path, content in hub.files.items()}
    pinned = await api.admin.post("/v1/adapters:import", json={**body, "source": "hf://org/lora@v1"})
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
        assert code(await api.admin.post("/v1/adapters:import", json=body)) == expected, answer
    hub.files = {base: sound().config, base.replace(CONFIG, WEIGHTS): b"PK\x03\x04 no weights"}
    assert code(await api.admin.post("/v1/adapters:import", json=body)) == (422, "weights.not_safetensors")
    assert api.files() == []


async def test_from_s3(api: Api, s3: S3Server, bucket: str) -> None:
    files = sound()
    await api.key("acme")
    body = {"name": "pirate", "tenant": "acme", "source": f"s3://{bucket}/team/pirate"}
    missing = await api.admin.post("/v1/adapters:import", json=body)
    assert code(missing) == (404, "import.not_found")
    s3.put(bucket, f"team/pirate/{CONFIG}", files.config)
    s3.put(bucket, f"team/pirate/{WEIGHTS}", files.weights)
    headers = {"idempotency-key": "k"}
    made = await api.admin.post("/v1/adapters:import", json=body, headers=headers)
    assert made.status_code == 201, made.text
    again = await api.admin.post("/v1/adapters:import", json=body, headers=headers)
    assert (again.content, again.headers["idempotent-replayed"]) == (made.content, "true")
    other = await api.admin.post("/v1/adapters:import", json={**body, "source": "s3://no-such-bucket/x"})
    assert code(other) == (404, "import.not_found")
    assert made.json()["digest"] == (await upload(api.admin, "b", tenant="acme")).json()["digest"]


async def test_an_import_is_bounded(tmp_path: Path, hub: Hub) -> None:
    base = f"/org/lora/resolve/main/{CONFIG}"
    hub.files = {base: sound().config, base.replace(CONFIG, WEIGHTS): sound().weights}
    async with open_api(tmp_path, max_upload_bytes=4096) as api:
        await api.key("acme")
        body = {"name": "a", "tenant": "acme", "source": "hf://org/lora"}
        assert code(await api.admin.post("/v1/adapters:import", json=body)) == (413, "upload.too_large")
        assert api.files() == []


async def test_only_admins_import_and_only_from_there(api: Api, hub: Hub) -> None:
    client = await api.tenant("acme")
    body = {"name": "a", "source": "hf://org/lora", "tenant": "acme"}
    assert (await client.post("/v1/adapters:import", json=body)).status_code == 403
    for source in (
        "http://127.0.0.1/x",
        "file:///etc/passwd",
        "hf://org",
        "hf://org/a/b",
        "hf://org/lora@a/b",
        "s3://B/x",
        "s3://models/a\nb",
        "hf://org/..@x?y",
    ):
        answer = await api.admin.post("/v1/adapters:import", json={**body, "source": source})
        assert code(answer) == (400, "invalid_value"), source
    dots = await api.admin.post("/v1/adapters:import", json={**body, "source": "hf://../.."})
    assert code(dots) in ((404, "import.not_found"), (400, "invalid_value"))
    assert [path for path, _ in hub.seen if "resolve" not in path] == []
    assert (await api.admin.post("/v1/adapters:import", json={**body, "tenant": "none"})).status_code == 404


async def test_an_import_without_credentials_says_so(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    await api.tenant("acme")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    body = {"name": "support", "tenant": "acme", "source": "s3://bucket/lora"}
    refused = await api.admin.post("/v1/adapters:import", json=body)
    assert code(refused) == (404, "import.not_found")
    assert "(no AWS credentials were found)" in refused.json()["error"]["message"]
