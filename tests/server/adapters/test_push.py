"""Ephemeral versions over HTTP: what they do, how long they live, who sees them, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_adapters import sound
from api_server import Api, api, eventually
from bad_uploads import bad_uploads
from fake_engine import demo_ready
from manylora.config import AdapterConfig
from manylora.server.adapters.push import CONFIG_HEADER
from manylora.server.http.wire import MAX_HEAD_BYTES
from manylora.server.serve import sweeper_of

pytestmark = pytest.mark.anyio
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[Api]:
    async with api(tmp_path, push_bytes=64 << 20) as opened:
        yield opened


def other_weights(number: int) -> bytes:
    """Sound weights that differ in their last value."""
    weights = bytearray(sound().weights)
    weights[-4:] = number.to_bytes(2, "little") + weights[-2:]
    return bytes(weights)


async def push(
    client: httpx.AsyncClient,
    weights: bytes,
    config: bytes | None = None,
    name: str = "policy",
    **params: Any,
) -> httpx.Response:
    headers = {
        CONFIG_HEADER: base64.b64encode(sound().config if config is None else config).decode()
    }
    params = {"ephemeral": True, **params}
    return await client.put(
        f"/v1/adapters/{name}/versions:push", content=weights, headers=headers, params=params
    )


async def pushed(client: httpx.AsyncClient, weights: bytes, **params: Any) -> dict[str, Any]:
    answer = await push(client, weights, **params)
    assert answer.status_code in (200, 201), answer.text
    return dict(answer.json())


async def ask(client: httpx.AsyncClient, model: str = "policy") -> httpx.Response:
    return await client.post("/v1/completions", json={"model": model, "prompt": "x"})


async def versions(client: httpx.AsyncClient) -> list[int]:
    answer = await client.get("/v1/adapters/policy/versions")
    return (
        [version["version"] for version in answer.json()["data"]]
        if answer.status_code == 200
        else []
    )


async def test_a_push_is_in_memory_only_and_answers_at_once(app: Api) -> None:
    client = await app.tenant("acme")
    body = await pushed(client, sound().weights)
    assert (body["version"], body["ephemeral"], body["aliases"]) == (1, True, {"default": 1})
    assert app.files() == []
    ((ref, taken),) = app.engine.taken.values()
    assert (ref.digest, taken) == (body["digest"], sound().weights)
    assert (await ask(client)).headers["x-manylora-adapter-digest"] == body["digest"]
    audit = (await app.admin.get("/v1/audit")).json()["data"]
    assert audit[0]["action"] == "adapter.publish"


async def test_the_same_bytes_again_are_the_same_version(app: Api) -> None:
    client = await app.tenant("acme")
    first = await push(client, sound().weights)
    again = await push(client, sound().weights)
    assert (first.status_code, again.status_code, again.json()["version"]) == (201, 200, 1)
    assert app.services.versions.weights.blobs.num_bytes == len(sound().weights)


async def test_only_the_newest_stay_and_those_that_an_alias_means(app: Api) -> None:
    client = await app.tenant("acme")
    for number in range(3):
        await pushed(client, other_weights(number), keep=2)
    assert await versions(client) == [3, 2]
    await client.patch("/v1/adapters/policy", json={"aliases": {"best": 2}})
    for number in range(3, 6):
        await pushed(client, other_weights(number), keep=1)
    assert await versions(client) == [6, 2]
    await eventually(lambda: len(app.services.versions.weights.blobs.digests()) == 2)
    assert len(app.engine.taken) == 2
    assert (await ask(client, "policy@5")).json()["error"]["code"] == "model_not_found"


async def test_a_running_request_keeps_the_weights_of_its_version(app: Api) -> None:
    client = await app.tenant("acme")
    first = await pushed(client, other_weights(0), keep=1)
    app.engine.token_s = 0.05
    running = asyncio.create_task(ask(client))
    await eventually(lambda: app.engine.running)
    second = await pushed(client, other_weights(1), keep=1)
    assert len(app.engine.taken) == 2
    assert (await running).headers["x-manylora-adapter-digest"] == first["digest"]
    await eventually(lambda: len(app.engine.taken) == 1)
    assert (await ask(client)).headers["x-manylora-adapter-digest"] == second["digest"]


async def test_a_request_that_found_its_version_keeps_it_before_the_engine_knows(app: Api) -> None:
    """Between the two a request may wait for its turn or its tokens."""
    client = await app.tenant("acme")
    body = await pushed(client, other_weights(0), keep=1)
    (weights,) = app.services.versions.weights.blobs.digests()
    app.services.versions.weights._held[weights] += 1
    await pushed(client, other_weights(1), keep=1)
    await asyncio.sleep(0.1)
    assert weights in app.services.versions.weights.blobs
    app.services.versions.weights._held[weights] -= 1
    await eventually(lambda: weights not in app.services.versions.weights.blobs)
    assert body["digest"] in app.engine.dropped


async def test_time_ends_a_version_and_then_its_memory_is_free(app: Api) -> None:
    client = await app.tenant("acme")
    body = await pushed(client, sound().weights, ttl_s=60)
    assert body["expires_at"] is not None
    assert (await ask(client)).status_code == 200
    app.ahead = timedelta(seconds=61)
    assert (await ask(client)).json()["error"]["code"] == "model_not_found"
    await sweeper_of(app.services).sweep()
    assert (
        await versions(client),
        app.services.versions.weights.blobs.digests(),
        app.engine.taken,
    ) == ([], [], {})


async def test_an_alias_does_not_fall_back_to_other_weights(app: Api) -> None:
    client = await app.tenant("acme")
    await pushed(client, other_weights(0), ephemeral=False)
    await pushed(client, other_weights(1), ttl_s=1)
    app.ahead = timedelta(seconds=2)
    await sweeper_of(app.services).sweep()
    refused = await ask(client)
    assert refused.status_code == 404
    assert "policy@1" in refused.json()["error"]["message"]


async def test_a_restart_withdraws_what_was_in_memory_and_nothing_else(tmp_path: Path) -> None:
    async with api(tmp_path, push_bytes=1 << 20) as before:
        client = await before.tenant("acme")
        key = before.keys["acme"]
        await pushed(client, other_weights(0), ephemeral=False)
        await pushed(client, other_weights(1))
        await pushed(client, other_weights(2), name="lost")
    async with api(tmp_path, push_bytes=1 << 20) as after:
        client = after.client(key)
        assert (await ask(client)).json()["error"]["code"] == "adapter_not_here"
        await sweeper_of(after.services).sweep(is_start=True)
        assert await versions(client) == [1]
        assert (await ask(client, "policy@1")).status_code == 200
        assert (await client.get("/v1/adapters/lost")).status_code == 404
        assert (await pushed(client, other_weights(1)))["version"] == 3


async def test_another_server_says_that_it_has_not_got_it(
    app: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await app.tenant("acme")
    body = await pushed(client, sound().weights)
    object.__setattr__(app.services, "server_name", "srv_other")
    monkeypatch.setattr(app.services.versions.weights, "server", "srv_other")
    refused = await ask(client)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "adapter_not_here")
    assert "retry-after" in refused.headers
    # It comes to this server when it is pushed to this one.
    assert (await pushed(client, sound().weights))["digest"] == body["digest"]
    assert (await ask(client)).status_code == 200


async def test_a_usual_upload_of_the_same_bytes_makes_it_lasting(app: Api) -> None:
    client = await app.tenant("acme")
    await pushed(client, sound().weights, ttl_s=60)
    body = await pushed(client, sound().weights, ephemeral=False)
    assert (body["version"], body["ephemeral"], body["expires_at"]) == (1, False, None)
    await sweeper_of(app.services).sweep()
    assert app.services.versions.weights.blobs.digests() == []
    assert len(app.files()) == 1
    # And ephemeral bytes that are in the store already are not taken a second time.
    assert not (await pushed(client, sound().weights))["ephemeral"]
    assert app.services.versions.weights.blobs.num_bytes == 0


async def test_memory_and_storage_are_limits(tmp_path: Path) -> None:
    size = len(sound().weights)
    async with api(tmp_path, push_bytes=2 * size) as app:
        client = await app.tenant("acme")
        await pushed(client, other_weights(0))
        await pushed(client, other_weights(1))
        full = await push(client, other_weights(2))
        assert (full.status_code, full.json()["error"]["code"]) == (507, "storage.full")
        assert "adapter.push_gib" in full.json()["error"]["message"]
        assert (await versions(client), app.services.versions.weights.blobs.num_bytes) == (
            [2, 1],
            2 * size,
        )
        await app.admin.patch("/v1/tenants/acme", json={"limits": {"stored_bytes": 2 * size}})
        refused = await push(client, other_weights(3))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "quota.storage")


async def test_one_tenant_leaves_half_of_the_memory_to_others(tmp_path: Path) -> None:
    async with api(tmp_path, push_bytes=4 * len(sound().weights)) as app:
        acme = await app.tenant("acme")
        for number in range(3):  # by itself it may have all
            await pushed(acme, other_weights(number), keep=2)
        globex = await app.tenant("globex")
        await eventually(lambda: len(app.services.versions.weights.blobs.digests()) == 2)
        full = await push(acme, other_weights(3))
        assert (full.status_code, full.json()["error"]["code"]) == (507, "storage.full")
        assert "one tenant" in full.json()["error"]["message"]
        await pushed(globex, other_weights(4))
        await pushed(globex, other_weights(5))
        await acme.delete("/v1/adapters/policy")
        await pushed(acme, other_weights(6))


async def test_a_push_that_needs_room_frees_what_has_expired(tmp_path: Path) -> None:
    async with api(tmp_path, push_bytes=2 * len(sound().weights)) as app:
        client = await app.tenant("acme")
        await pushed(client, other_weights(0), ttl_s=60)
        await pushed(client, other_weights(1), ttl_s=120)
        app.ahead = timedelta(seconds=61)
        await pushed(client, other_weights(2))
        assert await versions(client) == [3, 2]
        assert len(app.services.versions.weights.blobs.digests()) == 2


async def test_tenants_do_not_see_each_other(app: Api) -> None:
    acme, globex = await app.tenant("acme"), await app.tenant("globex")
    await pushed(acme, sound().weights)
    assert (await ask(globex)).status_code == 404
    assert (await globex.post(UNLOAD, json={"lora_name": "policy"})).status_code == 404
    # The same bytes of two tenants are one blob, which stays as long as one of them has it.
    await pushed(globex, sound().weights)
    assert (await acme.post(UNLOAD, json={"lora_name": "policy"})).status_code == 200
    assert (await ask(globex)).status_code == 200
    assert len(app.services.versions.weights.blobs.digests()) == 1
    reader = await app.tenant("acme", "infer")
    assert (await push(reader, sound().weights)).status_code == 403


async def test_bad_uploads_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    async with api(tmp_path, push_bytes=1 << 28) as app:
        client = await app.tenant("acme")
        for case in bad_uploads(demo_ready().base):
            upload = case.make()
            if len(upload.config) > MAX_HEAD_BYTES // 2:  # has no room in a head
                continue
            answer = await push(client, upload.weights, upload.config)
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                case.status,
                case.code,
            ), case.name
            assert (app.services.versions.weights.blobs.num_bytes, app.engine.taken) == (0, {})
        assert (app.files(), await versions(client)) == ([], [])


@pytest.mark.parametrize(
    ("headers", "params", "param"),
    [
        ({}, {}, CONFIG_HEADER),
        ({CONFIG_HEADER: "{}"}, {}, CONFIG_HEADER),
        ({CONFIG_HEADER: "e30="}, {"keep": 2}, "ephemeral"),
        ({CONFIG_HEADER: "e30="}, {"ephemeral": True, "keep": 0}, "keep"),
        ({CONFIG_HEADER: "e30="}, {"ephemeral": True, "ttl_s": 1 << 40}, "ttl_s"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    app: Api, headers: dict[str, str], params: dict[str, Any], param: str
) -> None:
    client = await app.tenant("acme")
    answer = await client.put(
        "/v1/adapters/policy/versions:push", content=b"x", headers=headers, params=params
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_client_that_leaves_in_the_middle_leaves_nothing(app: Api) -> None:
    key = await app.key("acme")
    weights = sound().weights
    async with app.listening() as url:
        reader, writer = await asyncio.open_connection(httpx.URL(url).host, httpx.URL(url).port)
        del reader
        head = (
            f"PUT /v1/adapters/policy/versions:push?ephemeral=true HTTP/1.1\r\nHost: x\r\n"
            f"Authorization: Bearer {key}\r\nContent-Length: {len(weights)}\r\n"
            f"{CONFIG_HEADER}: {base64.b64encode(sound().config).decode()}\r\n\r\n"
        )
        writer.write(head.encode() + weights[: len(weights) // 2])
        await writer.drain()
        await eventually(lambda: app.services.uploads.streams)
        writer.close()
        await eventually(
            lambda: (
                not app.services.uploads.streams
                and not app.services.versions.weights.blobs.num_bytes
            )
        )
    assert app.services.versions.weights.blobs.digests() == []


def saved(folder: Path, weights: bytes | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_bytes(sound().config)
    (folder / "adapter_model.safetensors").write_bytes(
        sound().weights if weights is None else weights
    )
    return folder


@pytest.fixture
async def loading(tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Api, Path]]:
    """A client, the app and the folder that it may load from."""
    root = tmp_path / "adapters"
    root.mkdir()
    async with api(
        tmp_path / "app", adapter=AdapterConfig(load_roots=f"{root}, {tmp_path / 'none'}")
    ) as app:
        yield await app.tenant("acme"), app, root


async def test_loading_as_vllm_does(loading: tuple[httpx.AsyncClient, Api, Path]) -> None:
    client, app, root = loading
    body = {"lora_name": "policy", "lora_path": str(saved(root / "step-1")), "load_inplace": False}
    loaded = await client.post(LOAD, json=body)
    assert (loaded.status_code, loaded.text) == (
        200,
        "Success: LoRA adapter 'policy' added successfully.",
    )
    first = (await ask(client)).headers["x-manylora-adapter-digest"]
    saved(root / "step-1", other_weights(1))
    assert (await client.post(LOAD, json={**body, "load_inplace": True})).status_code == 200
    assert (await ask(client)).headers["x-manylora-adapter-digest"] != first
    assert await versions(client) == [2]
    unloaded = await client.post(UNLOAD, json={"lora_name": "policy", "lora_int_id": 1})
    assert (unloaded.status_code, unloaded.text) == (
        200,
        "Success: LoRA adapter 'policy' removed successfully.",
    )
    assert (await ask(client)).status_code == 404
    assert (await client.post(UNLOAD, json={"lora_name": "policy"})).status_code == 404
    assert app.services.versions.weights.blobs.digests() == []


async def test_unloading_leaves_what_was_uploaded(
    loading: tuple[httpx.AsyncClient, Api, Path],
) -> None:
    client, _, root = loading
    await pushed(client, other_weights(7), ephemeral=False)
    assert (await client.post(UNLOAD, json={"lora_name": "policy"})).status_code == 404
    saved(root)
    assert (
        await client.post(LOAD, json={"lora_name": "policy", "lora_path": str(root)})
    ).status_code == 200
    assert (await client.post(UNLOAD, json={"lora_name": "policy"})).status_code == 200
    assert await versions(client) == [1]


async def test_without_the_setting_nothing_is_loaded(app: Api, tmp_path: Path) -> None:
    body = {"lora_name": "policy", "lora_path": str(saved(tmp_path / "adapter"))}
    refused = await (await app.tenant("acme")).post(LOAD, json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "adapter.path_forbidden")
    assert "adapter.load_roots" in refused.json()["error"]["message"]


def escapes(root: Path) -> dict[str, str]:
    """Paths that lead out of the root, by how."""
    outside = saved(root.parent / "outside")
    (root / "link").symlink_to(outside)
    (root / "inner").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (root / "inner" / name).symlink_to(outside / name)
    saved(root.parent / "adapters-too")
    return {
        "outside": str(outside),
        "dots": f"{root}/../outside",
        "link to a folder": str(root / "link"),
        "links to files": str(root / "inner"),
        "a name that begins alike": str(root.parent / "adapters-too"),
        "relative": os.path.relpath(root / "good"),
        "a hub": "organization/repository",
        "nothing there": "/nonexistent",
        "devices": "/dev",
        "the process": "/proc/self/fd",
    }


async def test_no_path_leads_out_of_the_roots(loading: tuple[httpx.AsyncClient, Api, Path]) -> None:
    client, app, root = loading
    saved(root / "good")
    for how, path in escapes(root).items():
        refused = await client.post(LOAD, json={"lora_name": "policy", "lora_path": path})
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            403,
            "adapter.path_forbidden",
        ), how
    assert app.services.versions.weights.blobs.num_bytes == 0


async def test_only_plain_files_of_a_bounded_size_are_loaded(
    loading: tuple[httpx.AsyncClient, Api, Path],
) -> None:
    client, app, root = loading
    pipe, folder, large, config = (
        saved(root / name) for name in ("pipe", "folder", "large", "config")
    )
    (pipe / "adapter_model.safetensors").unlink()
    os.mkfifo(pipe / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").mkdir()
    with (large / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(app.services.config.server.max_upload_bytes + 1)
    (config / "adapter_config.json").write_bytes(b" " * (1 << 17))
    outcomes = {
        str(pipe): (400, "invalid_value"),
        str(folder): (400, "invalid_value"),
        str(large): (413, "upload.too_large"),
        str(config): (413, "config.too_large"),
        str(root / "missing"): (400, "invalid_value"),
        f"{root}/\ud800": (400, "invalid_json"),
        f"{root}/{'x' * 4000}": (400, "invalid_value"),
    }
    for path, expected in outcomes.items():
        raw = json.dumps({"lora_name": "policy", "lora_path": path})
        refused = await client.post(LOAD, content=raw)
        assert (refused.status_code, refused.json()["error"]["code"]) == expected, path
    assert app.services.versions.weights.blobs.num_bytes == 0


async def test_a_link_that_stays_below_a_root_is_followed(
    loading: tuple[httpx.AsyncClient, Api, Path],
) -> None:
    client, _, root = loading
    saved(root / "step-1")
    (root / "latest").symlink_to("step-1")
    loaded = await client.post(
        LOAD, json={"lora_name": "policy", "lora_path": str(root / "latest")}
    )
    assert loaded.status_code == 200, loaded.text


async def test_what_is_loaded_is_validated(loading: tuple[httpx.AsyncClient, Api, Path]) -> None:
    client, _, root = loading
    for case in bad_uploads(demo_ready().base)[::7]:
        upload = case.make()
        folder = saved(root / "bad", upload.weights)
        (folder / "adapter_config.json").write_bytes(upload.config)
        refused = await client.post(LOAD, json={"lora_name": "policy", "lora_path": str(folder)})
        assert (refused.status_code, refused.json()["error"]["code"]) == (case.status, case.code), (
            case.name
        )


async def test_the_name_is_an_adapters(loading: tuple[httpx.AsyncClient, Api, Path]) -> None:
    client, _, root = loading
    body = {"lora_name": "../etc", "lora_path": str(saved(root))}
    assert (await client.post(LOAD, json=body)).json()["error"]["code"] == "adapter.name_invalid"
    refused = await client.post(
        LOAD, json={**body, "lora_name": "policy", "is_3d_lora_weight": True}
    )
    assert refused.status_code == 400
