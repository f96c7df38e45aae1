"""A running server against its own OpenAPI page: Schemathesis makes up requests, right and wrong ones."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from expense import Trace
from manylora_server import ADMIN_KEY, DEMO_ADAPTERS, ManyloraServer, manylora_server

SCHEMATHESIS = str(Path(sys.executable).with_name("st"))
ENDLESS = ("/v1/engine/events",)
"""Streams until the client leaves, which Schemathesis never does."""
PAUSES = ("/pause",)
"""Stops all later requests, until somebody resumes."""
NOT_PROMISED = ("positive_data_acceptance",)
"""A body may be refused for what no schema says: a model that does not exist, two fields that exclude each other."""
REFUSALS = [400, 401, 403, 404, 405, 409, 413, 422, 429, 431]
"""Statuses of a request that breaks the page's rules; 431 is that of one whose line grew too long by it."""
EXAMPLES = 10
ADMINS_ONLY = (
    r"^/(v1/(tenants|keys|audit|engine)\b|v1/adapters:import$|metrics$"
    r"|(pause|resume|is_paused|reset_prefix_cache|get_world_size|server_info)$)"
)
"""Paths that refuse a tenant's key unread."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManyloraServer]:
    with manylora_server(tmp_path_factory.mktemp("contract")) as running:
        for folder in sorted(DEMO_ADAPTERS.iterdir()):
            assert running.upload(running.tenant("acme"), folder.name, folder).status_code == 201
        yield running


def test_the_paths_for_admins_are_those_that_refuse_a_tenant(server: ManyloraServer) -> None:
    client = server.tenant("acme")
    paths = client.get("/openapi.json").json()["paths"]
    refusing = set()
    for path, methods in paths.items():
        answers = [
            client.request(method, path.replace("{", "").replace("}", "")) for method in methods
        ]
        if any("Only the admin key may call this route." in answer.text for answer in answers):
            refusing.add(path)
    assert refusing == {path for path in paths if re.search(ADMINS_ONLY, path)}


@pytest.mark.parametrize("who", ["tenant", "admin"])
def test_the_server_does_what_its_page_says(
    server: ManyloraServer, who: str, tmp_path: Path
) -> None:
    """Every value of the page; random ones for the caller whom an operation is for."""
    before = Trace.of(server).engine
    command = [
        SCHEMATHESIS,
        "--config-file",
        str(config_file(tmp_path, who)),
        "run",
        f"{server.url}/openapi.json",
    ]
    command += ["--phases=coverage,fuzzing,stateful", "--mode=all", f"--max-examples={EXAMPLES}"]
    command += [
        "--generation-deterministic",
        "--continue-on-failure",
        "--no-color",
        "--suppress-health-check=all",
    ]
    command += ["--exclude-checks", ",".join(NOT_PROMISED)]
    command += [
        "-H",
        f"Authorization: Bearer {ADMIN_KEY if who == 'admin' else server.new_key('acme')}",
    ]
    command += [f"--exclude-path={path}" for path in (*ENDLESS, *PAUSES)]
    run = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "generated" in run.stdout
    assert Trace.of(server).engine == before
    log = server.log.read_text()
    assert "Traceback" not in log
    assert "internal_error" not in log


def config_file(folder: Path, who: str) -> Path:
    """Values that exist, without which hardly a made-up request would get beyond a 404; and who tries what."""
    path = folder / "schemathesis.toml"
    path.write_text(
        f"[checks]\nnegative_data_rejection.expected-statuses = {REFUSALS}\n\n"
        '[[operations]]\ninclude-path-regex = "^/v1/adapters/"\nparameters = { "path.name" = "pirate" }\n\n'
        + (
            f"[[operations]]\nexclude-path-regex = '{ADMINS_ONLY}'\nphases.fuzzing.enabled = false\n"
            if who == "admin"
            else f"[[operations]]\ninclude-path-regex = '{ADMINS_ONLY}'\nenabled = false\n"
        )
    )
    return path
