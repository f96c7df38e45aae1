"""`weft.Client` against the real app on a real port."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import weft
from api_adapters import sound
from api_server import ADMIN_KEY, Api
from weft.config import environment

pytestmark = pytest.mark.anyio


async def calling(api: Api, calls: Callable[[str], Any]) -> Any:
    """What `calls` returns, which gets the address of the server and runs in a thread."""
    async with api.listening() as url:
        return await asyncio.to_thread(calls, url)


def test_importing_weft_brings_no_http_client() -> None:
    program = "import sys, weft; before = 'httpx' in sys.modules; weft.Client; print(before, 'torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


async def test_an_admin_manages_tenants_keys_and_reads_all(api: Api) -> None:
    def calls(url: str) -> None:
        with weft.Client(f"{url}/v1/", ADMIN_KEY) as admin:
            assert admin.create_tenant("acme", {"adapters": 3, "stored_bytes": None}, weight=2)["weight"] == 2
            assert admin.set_limits("acme", {"adapters": None, "pinned_pages": 5})["limits"]["pinned_pages"] == 5
            assert admin.get_tenant("acme")["limits"].get("adapters") is None
            assert admin.update_tenant("acme", weight=0.5)["weight"] == 0.5
            first = admin.create_key("acme", name="site", scopes=["usage"], limits={"tokens_per_month": 9})
            second = admin.rotate_key(first["id"])
            assert weft.Client(url, second["key"]).me()["key"]["scopes"] == ["usage"]
            admin.revoke_key(second["id"])
            with pytest.raises(weft.ClientError) as refused:
                weft.Client(url, second["key"]).me()
            assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
            assert admin.list_keys("acme") == []
            assert {entry["action"] for entry in weft.Client(url, ADMIN_KEY, "acme").audit()} >= {"key.create"}
            assert admin.engine()["model"] == "demo"
            admin.delete_tenant("acme")
            assert admin.list_tenants() == []

    await calling(api, calls)


async def test_a_tenant_pushes_changes_grants_and_deletes_adapters(api: Api, folder: Path) -> None:
    acme, rival = await api.key("acme"), await api.key("rival")
    seen: list[tuple[str, int, int]] = []

    def calls(url: str) -> None:
        client, admin = weft.Client(url, acme), weft.Client(url, ADMIN_KEY)
        first = client.push(folder, progress=lambda file, sent, size: seen.append((file.name, sent, size)))
        assert (first["name"], first["version"]) == ("my-adapter", 1)
        (folder / "adapter_config.json").write_bytes(sound(alpha=8).config)
        second = client.push(folder / "adapter_model.safetensors", "my-adapter", description="next", activate=False)
        assert (second["version"], second["aliases"]) == (2, {"default": 1})
        split = client.update_adapter("my-adapter", pinned=True, aliases={"default": {"1": 95, "2": 5}})
        assert (split["pinned"], split["aliases"]) == (True, {"default": {"1": 95, "2": 5}})
        assert [version["version"] for version in client.list_versions("my-adapter")] == [2, 1]
        assert client.fit(["my-adapter"], [{"rank": 8, "target_modules": "all-linear", "count": 2}])["fits"]
        other_id = weft.Client(url, rival).me()["tenant"]["id"]
        client.grant("my-adapter", other_id, 1)
        assert [grant["version"] for grant in client.list_grants("my-adapter")] == [1]
        client.withdraw_grant("my-adapter", other_id, 1)
        assert client.list_grants("my-adapter") == []
        weft.Client(url, rival).push(folder)
        assert [adapter["tenant"] for adapter in admin.list_adapters()] == ["acme", "rival"]
        assert [adapter["name"] for adapter in weft.Client(url, ADMIN_KEY, "acme").list_adapters()] == ["my-adapter"]
        client.delete_adapter("my-adapter", 2)
        client.delete_adapter("my-adapter")
        assert client.list_adapters() == []

    await calling(api, calls)
    size = (folder / "adapter_model.safetensors").stat().st_size
    assert seen[-2:] == [("adapter_model.safetensors", 0, size), ("adapter_model.safetensors", size, size)]


async def test_the_example_in_the_documents_pushes_an_adapter(api: Api, folder: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "registry.md").read_text()
    (example,) = (part for part in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "weft.Client" in part)
    key = await api.key("acme")

    def calls(url: str) -> subprocess.CompletedProcess[str]:
        variables = {**environment(), "WEFT_URL": url, "WEFT_KEY": key}
        command = [sys.executable, "-P", "-c", example]
        return subprocess.run(command, cwd=folder.parent, env=variables, capture_output=True, text=True, check=False)

    done = await calling(api, calls)
    assert done.returncode == 0, done.stderr
    assert (await api.client(key).get("/v1/adapters/support")).json()["version"] == 1


async def test_a_push_with_the_same_idempotency_key_is_the_same_upload(api: Api, folder: Path) -> None:
    key = await api.key("acme")

    def calls(url: str) -> int:
        client = weft.Client(url, key)
        one, two = (client.push(folder, idempotency_key="run-1") for _ in range(2))
        assert (one.pop("is_new"), two.pop("is_new")) == (True, False)
        assert one == two
        return len(client.request("GET", "/v1/uploads")["data"])

    assert await calling(api, calls) == 1


async def test_usage_is_read_to_its_last_page(api: Api) -> None:
    key = await api.key("acme")

    def calls(url: str) -> None:
        client = weft.Client(url, key)
        for _ in range(3):
            client.request("POST", "/v1/completions", json={"model": "demo", "prompt": "hi", "max_tokens": 2})
        assert client.usage(group_by="adapter")["totals"]["requests"] == 3
        events = client.usage(events=True, limit=1)["data"]
        assert len({event["request_id"] for event in events}) == 3
        pages = list(client.usage_csv(events=True, limit=2))
        assert [page.count("\n") for page in pages] == [3, 1]

    await calling(api, calls)


async def test_errors_say_what_is_wrong_and_what_to_do(api: Api, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = await api.key("acme")

    def failing(call: Callable[[], object]) -> weft.ClientError:
        with pytest.raises(weft.ClientError) as failed:
            call()
        return failed.value

    def calls(url: str) -> None:
        client = weft.Client(url, key)
        missing = failing(lambda: client.get_adapter("none"))
        assert (missing.status, missing.code) == (404, "not_found")
        (folder / "adapter_config.json").write_bytes(b'{"peft_type": "LORA", "use_dora": true, "bias": "all"}')
        refused = failing(lambda: client.push(folder))
        assert (refused.status, len(refused.findings) > 1, bool(refused.hint)) == (422, True, True)
        assert all(finding["message"] in str(refused) for finding in refused.findings)
        unnamed = failing(lambda: weft.Client(url).me())
        assert (unnamed.status, "WEFT_KEY" in str(unnamed)) == (401, True)
        monkeypatch.setenv("WEFT_URL", url)
        monkeypatch.setenv("WEFT_KEY", key)
        assert weft.Client().me()["tenant"]["name"] == "acme"

    await calling(api, calls)
    monkeypatch.delenv("WEFT_KEY", raising=False)
    for url in ("http://127.0.0.1:9", "127.0.0.1:8000", "http://[::"):
        away = failing(partial(lambda address: weft.Client(address).me(), url))
        assert (away.status, "Is `weft serve` running there?" in str(away)) == (None, True)
    absent = failing(lambda: weft.Client().push(folder / "none"))
    assert (absent.status, "There is no folder" in str(absent)) == (None, True)
    (folder / "adapter_config.json").unlink()
    assert "cannot be read" in str(failing(lambda: weft.Client().push(folder / "adapter_model.safetensors", "a")))
