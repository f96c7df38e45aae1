"""A server killed at each step of an upload: everything is there or nothing, and sending it again gives the same."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api_adapters import sound
from bad_upload import Upload
from manylora.config import environment
from manylora_server import ADMIN_KEY, DEMO_MODEL, upload_bytes
from piecewise_client import CONFIG, WEIGHTS, facts

SUPPORT = Path(__file__).parents[2] / "support"
PUBLISHING = (
    "before validation",
    "after validation",
    "before blob",
    "before rename",
    "after rename",
    "after blob",
    "before transaction",
    "before limits",
    "after limits",
    "before naming",
    "before answer",
)
ONE_FORM = (
    "before temporary bytes",
    "after temporary bytes",
    "before blob",
    "after blob",
    "before answer",
)
"""Publishing is the same as that of pieces: only its begin and its end are tried again."""
IN_PIECES = (
    "before announcement",
    "after announcement",
    "before staged bytes",
    "after staged bytes",
    "after staged sync",
    "before gathering",
    "after gathering",
    *PUBLISHING,
    "before clearing",
    "after clearing",
)


def in_one_form(client: httpx.Client, name: str, files: Upload) -> dict[str, Any]:
    client.headers["idempotency-key"] = f"form-{name}"
    answer = upload_bytes(client, name, files.config, files.weights)
    assert answer.status_code in (200, 201), answer.text
    return dict(answer.json())


def in_pieces(client: httpx.Client, name: str, files: Upload) -> dict[str, Any]:
    manifest = {CONFIG: facts(files.config), WEIGHTS: facts(files.weights)}
    client.headers["idempotency-key"] = f"begin-{name}"
    made = client.post("/v1/uploads", json={"name": name, "files": manifest})
    assert made.status_code == 201, made.text
    place = f"/v1/uploads/{made.json()['id']}"
    state = client.get(place).json()
    for file, content in ((CONFIG, files.config), (WEIGHTS, files.weights)):
        start = state["files"][file]["received"]
        if file in state["missing"]:
            part = {"content-range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
            sent = client.put(f"{place}/files/{file}", content=content[start:], headers=part)
            assert sent.status_code == 200, sent.text
    client.headers["idempotency-key"] = f"end-{name}"
    done = client.post(f"{place}/complete")
    assert done.status_code in (200, 201), done.text
    return dict(done.json())


def check_nothing_is_half(data_dir: Path) -> None:
    """What must hold after a start, whatever the server was doing when it died."""
    with sqlite3.connect(data_dir / "registry.sqlite") as database:
        adapters = {row[0] for row in database.execute("SELECT id FROM adapters")}
        versions = list(database.execute("SELECT adapter_id, weights_sha256 FROM adapter_versions"))
        aliases = list(database.execute("SELECT adapter_id FROM adapter_aliases"))
        audited = database.execute(
            "SELECT count(*) FROM audit_log WHERE action = 'adapter.publish'"
        ).fetchone()[0]
        ready = database.execute("SELECT count(*) FROM uploads WHERE state = 'ready'").fetchone()[0]
        ended = database.execute(
            "SELECT count(*) FROM idempotency_keys WHERE key LIKE 'end-%'"
        ).fetchone()[0]
        open_ids = {
            row[0] for row in database.execute("SELECT id FROM uploads WHERE state = 'uploading'")
        }
    assert adapters == {adapter for adapter, _ in versions}
    assert len(versions) == len(aliases) == len(adapters) == audited
    assert ready == ended
    stored = {path.name for path in (data_dir / "blobs" / "sha256").rglob("*") if path.is_file()}
    assert stored == {sha256 for _, sha256 in versions}
    assert list((data_dir / "blobs" / "tmp").iterdir()) == []
    assert {path.name for path in (data_dir / "uploads").iterdir()} <= open_ids


class Nursery:
    """Servers one after the other over one data folder, which is another one for each test."""

    def __init__(self, root: Path) -> None:
        self.where = root / "where"
        self.data_dir = root
        self._log = root / "server.log"
        self._log.touch()
        env = {
            **environment(),
            "PYTHONPATH": f"{SUPPORT}:{environment().get('PYTHONPATH', '')}",
            "DIE_WHERE": str(self.where),
            "LOG": str(self._log),
            "MANYLORA_ADMIN_KEY": ADMIN_KEY,
        }
        self._program = subprocess.Popen(
            (sys.executable, "-P", str(SUPPORT / "dying_server.py")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self._pid = 0
        self._url = ""

    def client(self, key: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self._url, headers=headers, timeout=60, trust_env=False)

    def start(self) -> None:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        seen = self._log.stat().st_size
        options = ["--model", str(DEMO_MODEL), "--port", "0", "--data-dir", str(self.data_dir)]
        self._program.stdin.write(json.dumps(["serve", *options]) + "\n")
        self._program.stdin.flush()
        self._pid = int(self._program.stdout.readline())
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if found := re.search(r"listening on (http://\S+)\n", self._log.read_text()[seen:]):
                self._url = found[1]
                return
            time.sleep(0.02)
        raise RuntimeError(self._log.read_text())

    def status(self) -> int:
        """How the server ended."""
        assert self._program.stdout is not None
        self._pid, status = 0, int(self._program.stdout.readline())
        return status

    def end(self) -> None:
        """End the server that runs."""
        if self._pid:
            os.kill(self._pid, signal.SIGTERM)
            self.status()

    def close(self) -> None:
        self._program.communicate(timeout=20)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """The program of the servers, which imports all that they need once."""
    with contextlib.closing(Nursery(tmp_path_factory.mktemp("nursery"))) as made:
        yield made


@pytest.fixture
def nursery(imported: Nursery, tmp_path: Path) -> Iterator[Nursery]:
    imported.data_dir = tmp_path / "data"
    yield imported
    imported.end()


@pytest.mark.slow
@pytest.mark.parametrize(("send", "points"), [(in_one_form, ONE_FORM), (in_pieces, IN_PIECES)])
def test_a_crash_at_each_step(
    nursery: Nursery,
    send: Callable[[httpx.Client, str, Upload], dict[str, Any]],
    points: tuple[str, ...],
) -> None:
    nursery.start()
    with nursery.client(ADMIN_KEY) as admin:
        assert admin.post("/v1/tenants", json={"name": "acme"}).status_code == 201
        key = admin.post("/v1/tenants/acme/keys", json={}).json()["key"]
    expected: set[str] = set()
    for number, point in enumerate(points):
        nursery.where.write_text(point)
        name, files = (
            f"a{number}",
            sound(alpha=number + 1, rank=8 * (1 + number % 8)),
        )  # each its own digest
        with nursery.client(key) as client, pytest.raises(httpx.TransportError):
            send(client, name, files)
        assert nursery.status() == -9
        assert not nursery.where.exists()
        nursery.start()
        check_nothing_is_half(nursery.data_dir)
        with nursery.client(key) as client:
            again = send(client, name, files)
            assert again["version"] == 1
            assert send(client, name, files) == again
            expected.add(name)
            assert {one["name"] for one in client.get("/v1/adapters").json()["data"]} == expected
        check_nothing_is_half(nursery.data_dir)
