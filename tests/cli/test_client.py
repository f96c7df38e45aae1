"""`manylora.Client` against the real app on a real port."""

from __future__ import annotations

import asyncio
import re
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import manylora
from api_adapters import sound
from api_server import ADMIN_KEY, Api
from manylora import client as client_module
from manylora.config import environment
from manylora.registry.idempotency import KeptAnswer
from manylora.registry.records import FileFacts, UploadDraft
from recording_server import Recorder

pytestmark = pytest.mark.anyio
DRAINING = {"error": {"message": "The server is shutting down.", "code": "server.draining"}}
SOON = {"retry-after": "7"}


async def calling(api: Api, calls: Callable[[str], Any]) -> Any:
    """What `calls` returns, which gets the address of the server and runs in a thread."""
    async with api.listening() as url:
        return await asyncio.to_thread(calls, url)


def failing(call: Callable[[], object]) -> manylora.ClientError:
    with pytest.raises(manylora.ClientError) as failed:
        call()
    return failed.value


def test_importing_manylora_brings_no_http_client() -> None:
    program = (
        "import sys, manylora; before = 'httpx' in sys.modules; "
        "manylora.Client; print(before, 'torch' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["False", "False"]


async def test_an_admin_manages_tenants_keys_and_reads_all(api: Api) -> None:
    def calls(url: str) -> None:
        with manylora.Client(f"{url}/v1/", ADMIN_KEY) as admin:
            assert (
                admin.create_tenant("acme", {"adapters": 3, "stored_bytes": None}, weight=2)[
                    "weight"
                ]
                == 2
            )
            assert (
                admin.set_limits("acme", {"adapters": None, "pinned_pages": 5})["limits"][
                    "pinned_pages"
                ]
                == 5
            )
            assert admin.get_tenant("acme")["limits"].get("adapters") is None
            assert admin.update_tenant("acme", weight=0.5)["weight"] == 0.5
            first = admin.create_key(
                "acme", name="site", scopes=["usage"], limits={"tokens_per_month": 9}
            )
            second = admin.rotate_key(first["id"])
            assert manylora.Client(url, second["key"]).me()["key"]["scopes"] == ["usage"]
            admin.revoke_key(second["id"])
            with pytest.raises(manylora.ClientError) as refused:
                manylora.Client(url, second["key"]).me()
            assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
            assert admin.list_keys("acme") == []
            assert {
                entry["action"] for entry in manylora.Client(url, ADMIN_KEY, "acme").audit()
            } >= {"key.create"}
            assert admin.engine()["model"] == "demo"
            admin.delete_tenant("acme")
            assert admin.list_tenants() == []

    await calling(api, calls)


async def test_a_tenant_pushes_changes_grants_and_deletes_adapters(api: Api, folder: Path) -> None:
    acme, rival = await api.key("acme"), await api.key("rival")
    seen: list[tuple[str, int, int]] = []

    def calls(url: str) -> None:
        client, admin = manylora.Client(url, acme), manylora.Client(url, ADMIN_KEY)
        first = client.push(
            folder, progress=lambda file, sent, size: seen.append((file.name, sent, size))
        )
        assert (first["name"], first["version"]) == ("my-adapter", 1)
        (folder / "adapter_config.json").write_bytes(sound(alpha=8).config)
        second = client.push(
            folder / "adapter_model.safetensors", "my-adapter", description="next", activate=False
        )
        assert (second["version"], second["aliases"]) == (2, {"default": 1})
        split = client.update_adapter(
            "my-adapter", pinned=True, aliases={"default": {"1": 95, "2": 5}}
        )
        assert (split["pinned"], split["aliases"]) == (True, {"default": {"1": 95, "2": 5}})
        assert [version["version"] for version in client.list_versions("my-adapter")] == [2, 1]
        assert client.fit(
            ["my-adapter"], [{"rank": 8, "target_modules": "all-linear", "count": 2}]
        )["fits"]
        other_id = manylora.Client(url, rival).me()["tenant"]["id"]
        client.grant("my-adapter", other_id, 1)
        assert [grant["version"] for grant in client.list_grants("my-adapter")] == [1]
        client.withdraw_grant("my-adapter", other_id, 1)
        assert client.list_grants("my-adapter") == []
        manylora.Client(url, rival).push(folder)
        assert [adapter["tenant"] for adapter in admin.list_adapters()] == ["acme", "rival"]
        assert [
            adapter["name"] for adapter in manylora.Client(url, ADMIN_KEY, "acme").list_adapters()
        ] == ["my-adapter"]
        client.delete_adapter("my-adapter", 2)
        client.delete_adapter("my-adapter")
        assert client.list_adapters() == []

    await calling(api, calls)
    size = (folder / "adapter_model.safetensors").stat().st_size
    assert seen[-2:] == [
        ("adapter_model.safetensors", 0, size),
        ("adapter_model.safetensors", size, size),
    ]


async def test_the_example_in_the_documents_pushes_an_adapter(api: Api, folder: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "registry.md").read_text()
    (example,) = (
        part
        for part in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        if "manylora.Client" in part
    )
    key = await api.key("acme")

    def calls(url: str) -> subprocess.CompletedProcess[str]:
        variables = {**environment(), "MANYLORA_URL": url, "MANYLORA_KEY": key}
        command = [sys.executable, "-P", "-c", example]
        return subprocess.run(
            command, cwd=folder.parent, env=variables, capture_output=True, text=True, check=False
        )

    done = await calling(api, calls)
    assert done.returncode == 0, done.stderr
    assert (await api.client(key).get("/v1/adapters/support")).json()["version"] == 1


async def test_a_push_with_the_same_idempotency_key_has_the_same_end(
    api: Api, folder: Path
) -> None:
    key = await api.key("acme")

    def calls(url: str) -> None:
        client = manylora.Client(url, key)
        one, two = (client.push(folder, idempotency_key="run-1") for _ in range(2))
        assert (one.pop("is_new"), two.pop("is_new")) == (True, False)
        assert one == two
        assert len(client.request("GET", "/v1/uploads")["data"]) == 1
        (folder / "adapter_config.json").write_bytes(
            b'{"peft_type": "LORA", "use_dora": true, "r": -1}'
        )
        first, again = (
            failing(lambda: client.push(folder, idempotency_key="run-2")) for _ in range(2)
        )
        assert (first.status, len(first.findings) > 1, bool(first.hint)) == (422, True, True)
        assert all(finding["message"] in str(first) for finding in first.findings)
        assert (again.status, again.code, again.findings) == (
            first.status,
            first.code,
            first.findings,
        )

    await calling(api, calls)


async def test_a_push_finds_its_upload_behind_a_hundred_ended_ones(api: Api, folder: Path) -> None:
    key, uploads = await api.key("acme"), api.services.registry.uploads
    tenant_id = (await api.client(key).get("/v1/me")).json()["tenant"]["id"]
    files = {
        name: FileFacts(size=1, sha256="0" * 64)
        for name in ("adapter_config.json", "adapter_model.safetensors")
    }
    draft = UploadDraft(name="old", description=None, activate=True, files=files)
    for _ in range(100):
        made = await uploads.create(
            tenant_id,
            draft,
            None,
            None,
            lambda upload: KeptAnswer(status=201, body={"id": upload.id}),
        )
        await uploads.reject(tenant_id, made.body["id"], {"findings": []})

    def leave(*_: object) -> None:
        raise InterruptedError

    def calls(url: str) -> None:
        client = manylora.Client(url, key)
        with pytest.raises(InterruptedError):
            client.push(folder, progress=leave)
        assert client.push(folder)["version"] == 1

    await calling(api, calls)
    pages = [await uploads.list(tenant_id, None, 100)]
    pages.append(await uploads.list(tenant_id, pages[0].next, 100))
    assert Counter(upload.state for page in pages for upload in page.items) == {
        "rejected": 100,
        "ready": 1,
    }


async def test_usage_is_read_to_its_last_page(api: Api) -> None:
    key = await api.key("acme")

    def calls(url: str) -> None:
        client = manylora.Client(url, key)
        for _ in range(3):
            client.request(
                "POST", "/v1/completions", json={"model": "demo", "prompt": "hi", "max_tokens": 2}
            )
        assert client.usage(group_by="adapter")["totals"]["requests"] == 3
        events = client.usage(events=True, limit=1)["data"]
        assert len({event["request_id"] for event in events}) == 3
        pages = list(client.usage_csv(events=True, limit=2))
        assert [page.count("\n") for page in pages] == [3, 1]

    await calling(api, calls)


async def test_errors_say_what_is_wrong_and_what_to_do(
    api: Api, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await api.key("acme")

    def calls(url: str) -> None:
        client = manylora.Client(url, key)
        missing = failing(lambda: client.get_adapter("none"))
        assert (missing.status, missing.code) == (404, "not_found")
        unnamed = failing(lambda: manylora.Client(url).me())
        assert (unnamed.status, "MANYLORA_KEY" in str(unnamed)) == (401, True)
        monkeypatch.setenv("MANYLORA_URL", url)
        monkeypatch.setenv("MANYLORA_KEY", key)
        assert manylora.Client().me()["tenant"]["name"] == "acme"

    await calling(api, calls)
    monkeypatch.delenv("MANYLORA_KEY", raising=False)
    for url in ("http://127.0.0.1:9", "127.0.0.1:8000", "http://[::"):
        away = failing(partial(lambda address: manylora.Client(address).me(), url))
        assert (away.status, "Is `manylora serve` running there?" in str(away)) == (None, True)
    absent = failing(lambda: manylora.Client().push(folder / "none"))
    assert (absent.status, "There is no folder" in str(absent)) == (None, True)
    (folder / "adapter_config.json").unlink()
    assert "cannot be read" in str(
        failing(lambda: manylora.Client().push(folder / "adapter_model.safetensors", "a"))
    )


def every_kind_of_call(client: manylora.Client, folder: Path) -> list[Callable[[], object]]:
    """Calls that read the answer in each way that the client has."""
    return [
        client.list_adapters,
        client.audit,
        client.usage,
        lambda: list(client.usage_csv()),
        lambda: client.set_limits("acme", {"adapters": 1}),
        lambda: client.push(folder),
        lambda: client.push(folder, idempotency_key="run-1"),
    ]


def test_a_redirect_is_an_error_that_names_the_address(recorder: Recorder, folder: Path) -> None:
    recorder.status, recorder.headers["location"] = 301, "https://manylora.example/v1"
    client = manylora.Client(recorder.url, "secret")
    for call in (client.me, *every_kind_of_call(client, folder)):
        moved = failing(call)
        assert (moved.status, moved.code) == (301, "not_manylora")
        assert "another address: https://manylora.example/v1. Use this address" in str(moved)


@pytest.mark.parametrize("body", [{"hello": 1}, {"data": {}, "limits": [], "id": 1}, "[" * 100_000])
def test_json_of_another_server_is_an_error_of_every_method(
    recorder: Recorder, folder: Path, body: object
) -> None:
    recorder.body = body
    for call in every_kind_of_call(manylora.Client(recorder.url, "secret"), folder):
        assert failing(call).code == "not_manylora"


@pytest.mark.parametrize("upload", [1, {"files": {}}, {"files": {"adapter_config.json": 1}}])
def test_uploads_of_another_server_are_an_error(
    recorder: Recorder, folder: Path, upload: object
) -> None:
    recorder.body = {"data": [upload]}
    assert (
        failing(lambda: manylora.Client(recorder.url, "secret").push(folder)).code == "not_manylora"
    )


def test_a_body_that_cannot_be_unpacked_is_an_error(recorder: Recorder) -> None:
    recorder.headers["content-encoding"] = "gzip"
    assert failing(manylora.Client(recorder.url, "secret").me).code == "not_manylora"


@pytest.mark.parametrize("error", [{"code": None}, {"code": "other", "findings": [{}]}])
def test_a_refusal_of_another_server_is_not_taken_for_one_of_manylora(
    recorder: Recorder, error: dict[str, object]
) -> None:
    recorder.status, recorder.body = 400, {"error": {"message": "no", **error}}
    assert failing(manylora.Client(recorder.url, "secret").me).code == "not_manylora"


def test_a_closed_client_says_so(recorder: Recorder, folder: Path) -> None:
    client = manylora.Client(recorder.url, "secret")
    client.close()
    for call in (client.me, *every_kind_of_call(client, folder)):
        assert failing(call).code == "client_closed"


@pytest.mark.parametrize("start", ["", "//", "v1/"])
def test_a_key_is_never_sent_to_the_address_in_a_path(recorder: Recorder, start: str) -> None:
    client = manylora.Client("http://127.0.0.1:9", "secret")
    path = start + (recorder.url if not start else "me")
    assert failing(lambda: client.request("GET", path)).code == "invalid_path"
    assert not recorder.calls


@pytest.mark.parametrize(
    ("failure", "code", "retry_after_s", "pauses_s"),
    [
        (
            {"status": 503, "body": DRAINING, "headers": SOON},
            "server.draining",
            7,
            [7, 7, 7, 7, 8, 15, 30],
        ),
        ({"status": 503, "headers": {"retry-after": "3600"}}, "not_manylora", 3600, []),
        ({"body": "<html>"}, "not_manylora", None, []),
        (
            {"status": 400, "headers": {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}},
            "not_manylora",
            None,
            [],
        ),
    ],
    ids=["busy", "busy for long", "another server", "refused"],
)
def test_a_push_waits_as_long_as_the_server_asks_where_that_is_of_use(
    recorder: Recorder,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: dict[str, object],
    code: str,
    retry_after_s: float | None,
    pauses_s: list[float],
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(client_module, "time", SimpleNamespace(sleep=slept.append))
    names = ("adapter_config.json", "adapter_model.safetensors")
    files = {name: {"received": 0} for name in names}
    recorder.body = {
        "data": [],
        "id": "upl_1",
        "state": "uploading",
        "files": files,
        "missing": names,
    }
    client = manylora.Client(recorder.url, "secret")
    refused = failing(
        lambda: client.push(folder, progress=lambda *_: vars(recorder).update(failure))
    )
    assert (refused.code, refused.retry_after_s) == (code, retry_after_s)
    assert slept == [0, *pauses_s]


def test_a_certificate_that_is_not_trusted_is_no_broken_connection(
    recorder: Recorder, tmp_path: Path
) -> None:
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "manylora.example")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    certificate = (
        builder.not_valid_before(now)
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    private = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    file = tmp_path / "server.pem"
    file.write_bytes(
        key.private_bytes(*private) + certificate.public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    recorder.server.socket = context.wrap_socket(recorder.server.socket, server_side=True)
    refused = failing(manylora.Client(recorder.url.replace("http:", "https:"), "secret").me)
    assert (refused.code, refused.status, "SSL_CERT_FILE" in str(refused)) == (
        "untrusted_certificate",
        None,
        True,
    )
