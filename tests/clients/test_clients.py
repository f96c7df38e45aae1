"""Client libraries as their users install them, against a real server. docs/clients.md says what they do here."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from client_table import CLIENTS, ENVIRONMENTS, HERE, NODE, Client, Row, rows, write
from manylora.config import environment as inherited
from manylora_server import (
    DEMO_ADAPTERS,
    DEMO_MODEL,
    ManyloraServer,
    expected_answers,
    manylora_server,
)

pytestmark = pytest.mark.slow

ADAPTER = "pirate"
PROGRAM_TIMEOUT_S = 240.0
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "DO_NOT_TRACK": "1",
    "NO_PROXY": "*",
}
"""No client asks anything of another server."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyloraServer]:
    with manylora_server(tmp_path_factory.mktemp("clients"), "--dtype", "float32") as running:
        running.publish("shop", ADAPTER)
        yield running


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyloraServer]:
    """A server without keys, which trainers of its machine use."""
    roots = {"adapter.load_roots": DEMO_ADAPTERS}
    with manylora_server(
        tmp_path_factory.mktemp("open"), "--dtype", "float32", "--auth", "off", settings=roots
    ) as running:
        yield running


def command(client: Client) -> list[str]:
    program = str(HERE / "programs" / client.program)
    if client.environment == NODE:
        return ["node", program]
    return [str(ENVIRONMENTS / client.environment / "bin" / "python"), program]


def asked_and_known() -> dict[str, str]:
    """What the programs ask, and the answers that transformers and PEFT gave."""
    question = expected_answers()["questions"][0]
    ids = {
        "PROMPT_IDS": question["prompt_token_ids"],
        "ANSWER_IDS": question["answer_token_ids"][ADAPTER],
    }
    return {
        "MANYLORA_ADAPTER": ADAPTER,
        "MANYLORA_QUESTION": question["question"],
        "MANYLORA_ANSWER": question["answers"][ADAPTER],
        "MANYLORA_MODEL_PATH": str(DEMO_MODEL),
        "MANYLORA_ADAPTER_PATH": str(DEMO_ADAPTERS / ADAPTER),
        **{f"MANYLORA_{name}": " ".join(map(str, tokens)) for name, tokens in ids.items()},
    }


def run(client: Client, server: ManyloraServer, home: Path) -> list[dict[str, Any]]:
    """What the program reports of each feature."""
    key = server.tenants.get("shop", "none")
    where = {
        "MANYLORA_URL": server.url,
        "MANYLORA_KEY": key,
        "MANYLORA_BASE": DEMO_MODEL.name,
        "HOME": str(home),
    }
    path = {"PATH": inherited()["PATH"]}
    done = subprocess.run(
        command(client),
        env={**path, **QUIET, **asked_and_known(), **where},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=PROGRAM_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"feature"')]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_does_what_the_page_says(
    client: Client, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if not client.folder.exists():
        pytest.skip("run scripts/clients, which installs the client libraries")
    server = request.getfixturevalue("open_server" if client.is_open else "server")
    lines = run(client, server, tmp_path)
    failed = {line["feature"]: line["note"] for line in lines if not line["ok"]}
    assert {name: note for name, note in failed.items() if name not in client.limits} == {}
    assert [name for name in client.limits if name not in failed] == [], "these work now"
    row = Row.of(client, [line["feature"] for line in lines])
    if request.config.getoption("--write-table", default=False):
        write(row)
    assert rows()[client.name].without_version == row.without_version, (
        "run scripts/clients --write-table"
    )


def test_the_page_lists_these_clients_and_no_others() -> None:
    assert list(rows()) == [client.name for client in CLIENTS]
