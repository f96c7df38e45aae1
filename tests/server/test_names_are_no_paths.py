"""Whatever clients call things, the server writes below its data folder only."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from api_adapters import sound, upload
from api_server import Api, Client
from raw_http import form_part

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
ROUNDS = 120
PIECES = (
    *(
        "..",
        "/",
        "\\",
        ".",
        "~",
        "%2e%2e",
        "%2f",
        "\0",
        "\n",
        "\r\n",
        "",
        " ",
        "é",
        "\u202e",
        "\uff0e",
        "\uff0f",
        "😀",
    ),
    *[
        "etc",
        "passwd",
        "tmp",
        "a",
        "C:",
        "//",
        "sha256",
        "sha256:",
        "con",
        "$HOME",
        "`id`",
        "{x}",
        "*",
        "@",
    ],
    *("0" * 64, "f" * 63),
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = frozenset(
    {
        "os.mkdir",
        "os.rename",
        "os.remove",
        "os.rmdir",
        "os.link",
        "os.symlink",
        "os.truncate",
        "os.chmod",
    }
)


class Watch:
    """Notes every path that this process writes to; such a hook stays for good, so it can be put to sleep."""

    def __init__(self) -> None:
        self.is_awake = False
        self.written: set[str] = set()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.is_awake:
            return
        if event == "open":
            path, mode, flags = arguments
            is_writing = bool(set(str(mode or "")) & set("wax+")) or (
                isinstance(flags, int) and flags & WRITING
            )
            paths = [path] if is_writing else []
        else:
            paths = (
                [argument for argument in arguments if isinstance(argument, str)]
                if event in CHANGES
                else []
            )
        self.written.update(
            os.fsdecode(path) for path in paths if isinstance(path, str | bytes | os.PathLike)
        )


@pytest.fixture(scope="module")
def hook() -> Watch:
    return Watch()


@pytest.fixture
def watch(hook: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    hook.written.clear()
    yield hook
    hook.is_awake = False


def hostile(words: random.Random) -> str:
    """Pieces of paths, mixed with any Unicode but surrogates, which HTTP cannot carry."""
    any_letter = (
        chr(words.choice((words.randrange(0x80), words.randrange(0xD800)))) for _ in range(3)
    )
    return "".join(words.choices((*PIECES, *any_letter), k=words.randrange(1, 6)))


async def call_everything(api: Api, client: Client, words: random.Random) -> None:
    """Names of tenants, adapters, versions, digests and files, each where the server takes one."""
    good = sound()
    answers = [
        await api.admin.post("/v1/tenants", json={"name": hostile(words)}),
        await client.get(f"/v1/adapters/{quoted(words)}"),
        await client.request(
            "DELETE", f"/v1/adapters/{quoted(words)}", params={"version": hostile(words)}
        ),
        await client.get(f"/v1/models/{quoted(words)}"),
        await client.post(
            "/v1/completions", json={"model": f"mine@{hostile(words)}", "prompt": "x"}
        ),
        await client.post(
            "/v1/completions", json={"adapter_id": f"mine@sha256:{hostile(words)}", "prompt": "x"}
        ),
        await client.patch("/v1/adapters/mine", json={"aliases": {hostile(words): 1}}),
        await client.get("/v1/usage", params={"adapter": hostile(words), "tenant": hostile(words)}),
        await upload(client, hostile(words), description=hostile(words)),
    ]
    if words.random() < 0.02:  # this one is checked whole, which takes a process
        name = hostile(words).replace("\r", "").replace("\n", "").replace('"', "")
        parts = [form_part("name", b"other"), form_part("config", good.config, name)]
        body = b"".join([*parts, form_part("weights", good.weights, name), b"--b--\r\n"])
        kind = {"content-type": "multipart/form-data; boundary=b"}
        answers.append(await client.post("/v1/adapters", content=body, headers=kind))
    assert [answer.status_code for answer in answers if answer.status_code >= 500] == []


def quoted(words: random.Random) -> str:
    return "".join(f"%{byte:02x}" for byte in hostile(words).encode("utf-8", "replace"))


async def test_no_name_is_a_path(api: Api, acme: Client, watch: Watch, tmp_path: Path) -> None:
    words = random.Random(5)
    assert (await upload(acme, "mine")).status_code == 201
    around = names_in(tmp_path)
    watch.is_awake = True
    for _ in range(ROUNDS):
        await call_everything(api, acme, words)
    watch.is_awake = False
    root = str(api.services.config.server.data_dir)
    outside = {path for path in watch.written if not inside(path, root)} - {os.devnull}
    assert watch.written, "the hook hears nothing"
    assert outside == set()
    assert names_in(tmp_path / "elsewhere") == set()
    assert names_in(tmp_path) == around


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def inside(path: str, root: str) -> bool:
    """Below the data folder, or a bare name, as the blob store uses it with an open folder."""
    return path.startswith(f"{root}/") if "/" in path else path not in ("..", ".")
