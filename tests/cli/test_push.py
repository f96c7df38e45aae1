"""`manylora adapter push` against a real server, and over a connection that breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from safetensors.torch import load
from typer.testing import CliRunner

from api_adapters import sound
from api_server import Api
from manylora import client
from manylora.cli import make_app
from manylora.errors import ClientError
from manylora.server.uploads.staged_files import StagedFiles

pytestmark = pytest.mark.anyio


async def run(*arguments: str) -> Any:
    environ = {"NO_COLOR": "1", "COLUMNS": "200"}
    return await asyncio.to_thread(lambda: CliRunner().invoke(make_app(), arguments, env=environ))


@asynccontextmanager
async def breaking(url: str, cuts: list[int]) -> AsyncIterator[str]:
    """A way to the server on which each connection that sends more than the next number of bytes is cut there."""
    host, port = url.removeprefix("http://").split(":")

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_up: bool) -> None:
        passed = 0
        while data := await source.read(4096):
            if is_up and cuts and passed + len(data) > cuts[0]:
                sink.write(data[: cuts.pop(0) - passed])
                await sink.drain()
                await asyncio.sleep(
                    0.3
                )  # bytes that come together with the end may be lost with it
                break
            passed += len(data)
            sink.write(data)
            await sink.drain()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        pumps = (pump(reader, up_writer, True), pump(up_reader, writer, False))
        ways = [asyncio.create_task(way) for way in pumps]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        writer.transport.abort()
        up_writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_push_uploads_the_folder_and_says_how_to_ask_for_it(api: Api, folder: Path) -> None:
    key = await api.key("acme")
    async with api.listening() as url:
        pushed = await run("adapter", "push", str(folder), "--url", url, "--key", key)
        assert pushed.exit_code == 0, pushed.output
        assert pushed.output.splitlines()[-1] == 'ready: ask for it with "model": "my-adapter"'
        (folder / "adapter_config.json").write_bytes(sound(alpha=8).config)
        second = await run(
            "adapter", "push", str(folder), "--url", url, "--key", key, "--no-activate"
        )
        assert second.output.splitlines()[-1] == 'ready: ask for it with "model": "my-adapter@2"'
        again = await run("adapter", "push", str(folder), "--url", url, "--key", key)
        assert (
            "nothing new: version 2 has these very bytes; the plain name means version 2 now"
            in again.output
        )
        await api.client(key).patch(
            "/v1/adapters/my-adapter", json={"aliases": {"default": {"1": 95, "2": 5}}}
        )
        (folder / "adapter_config.json").write_bytes(sound(alpha=4).config)
        beside = await run(
            "adapter", "push", str(folder), "--url", url, "--key", key, "--no-activate"
        )
        assert (
            "the plain name still means 1:95,2:5; to change that: manylora adapter alias my-adapter"
            in beside.output
        )
        (folder / "adapter_config.json").write_bytes(sound(alpha=2).config)
        canary = await run("adapter", "push", str(folder), "--url", url, "--key", key)
        assert (canary.exit_code, "Upload with --no-activate" in canary.output) == (1, True), (
            canary.output
        )
        (folder / "adapter_config.json").write_bytes(b"{}")
        refused = await run(
            "adapter", "push", str(folder), "--url", url, "--key", key, "--no-activate"
        )
        assert (refused.exit_code, "config." in refused.output) == (2, True)
    assert len(api.files()) == 1


async def test_push_goes_on_after_a_broken_connection(
    api: Api, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PAUSES_S", (0, *[0.2] * 7))
    key, size = await api.key("acme"), len(sound().weights)
    received: list[int] = []
    opening = StagedFiles.writer

    def seen(staged: StagedFiles, upload_id: str, name: str, offset: int | None) -> Any:
        if name.endswith("safetensors"):
            received.append(offset or 0)
        return opening(staged, upload_id, name, offset)

    monkeypatch.setattr(StagedFiles, "writer", seen)
    cuts = [size // 3, size // 3]
    async with api.listening() as url, breaking(url, cuts) as broken:
        pushed = await run("adapter", "push", str(folder), "--url", broken, "--key", key, "--json")
    assert pushed.exit_code == 0, pushed.output
    assert cuts == []
    assert len(received) == 3
    assert 0 == received[0] < received[1] < received[2] < size
    assert len((await api.client(key).get("/v1/uploads")).json()["data"]) == 1


async def test_push_started_again_finds_what_was_sent(
    api: Api, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PAUSES_S", (0,))
    key, acme = await api.key("acme"), await api.tenant("acme")
    async with api.listening() as url:
        async with breaking(url, [len(sound().weights) // 2]) as broken:
            cut = await run("adapter", "push", str(folder), "--url", broken, "--key", key)
        assert (cut.exit_code, "Run the command again" in cut.output) == (1, True)
        (upload,) = (await acme.get("/v1/uploads")).json()["data"]
        assert upload["files"]["adapter_model.safetensors"]["received"] > 0
        monkeypatch.setattr(client, "PAUSES_S", (0, *[0.2] * 7))
        again = await run("adapter", "push", str(folder), "--url", url, "--key", key)
        assert again.exit_code == 0, again.output
    (ended,) = (await acme.get("/v1/uploads")).json()["data"]
    assert (ended["id"], ended["state"]) == (upload["id"], "ready")


async def test_a_folder_of_mlx_is_pushed_as_it_is(api: Api, mlx_folder: Path) -> None:
    async with api.listening() as url:
        pushed = await run(
            "adapter", "push", str(mlx_folder), "--url", url, "--key", await api.key("acme")
        )
    assert pushed.exit_code == 0, pushed.output
    assert "read as: mlx" in pushed.stdout
    assert "warning: The config says that the base was 'meta/Big'" in pushed.stderr


async def test_an_ephemeral_push_stays_in_memory(api: Api, folder: Path) -> None:
    key = await api.key("acme")
    async with api.listening() as url:
        options = ("--url", url, "--key", key, "--ephemeral", "--keep", "1", "--ttl", "60")
        pushed = await run("adapter", "push", str(folder), *options)
        assert pushed.exit_code == 0, pushed.output
        assert pushed.output.splitlines()[-1] == 'ready: ask for it with "model": "my-adapter"'
        assert (api.files(), len(api.services.versions.weights.blobs.digests())) == ([], 1)
        senseless = await run(
            "adapter", "push", str(folder), "--url", url, "--key", key, "--keep", "1"
        )
        assert senseless.exit_code != 0
        assert "--ephemeral" in senseless.output


async def test_a_script_pushes_tensors_and_what_peft_calls_its_config(api: Api) -> None:
    tensors = load(sound().weights)
    key = await api.key("acme")
    config: Any = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    async with api.listening() as url:
        trainer = client.Client(url, key)
        made = await asyncio.to_thread(trainer.push_ephemeral, "policy", tensors, config, keep=1)
        assert (made["version"], made["is_new"], made["ephemeral"]) == (1, True, True)
        again = await asyncio.to_thread(trainer.push_ephemeral, "policy", tensors, config.to_dict())
        assert (again["digest"], again["is_new"]) == (made["digest"], False)
        for bad in (None, {"r": object()}):
            with pytest.raises(ClientError, match="config"):
                await asyncio.to_thread(trainer.push_ephemeral, "policy", tensors, bad)
