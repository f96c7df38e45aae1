"""`manylora serve`: the engine's process is started before the server is imported, and never left behind."""

from __future__ import annotations

import subprocess
import sys
from unittest.mock import Mock

import pytest

import manylora.cli.serve as command
from manylora.cli.config import GivenSettings
from manylora.errors import ConfigError
from manylora.server import serve as server

GIVEN = GivenSettings({"model": {"path": "m"}}, None)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Mock:
    made = Mock()
    monkeypatch.setattr(command, "start_worker", lambda: made)
    return made


def test_an_engine_process_is_handed_to_the_server(
    worker: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Mock(return_value=3)
    monkeypatch.setattr(server, "serve", run)
    assert command._run(GIVEN) == 3
    assert run.call_args.args[2] is worker


def test_a_server_that_cannot_start_ends_the_engine_process(
    worker: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "serve", Mock(side_effect=ConfigError("no folder")))
    with pytest.raises(ConfigError, match="no folder"):
        command._run(GIVEN)
    worker.process.kill.assert_called_once()


def test_a_wrong_setting_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "start_worker", Mock(side_effect=AssertionError))
    with pytest.raises(ConfigError):
        command._run(GivenSettings({"model": {"path": "m", "dtype": "float8"}}, None))


def test_commands_that_start_a_server_import_no_database_and_the_start_of_an_engine_no_torch() -> (
    None
):
    for module, absent in (
        ("manylora.cli.demo.run", ("sqlalchemy", "alembic", "torch", "numpy")),
        ("manylora.cli.serve", ("torch", "numpy", "zmq", "sqlalchemy", "fastapi")),
    ):
        code = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
        found = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
        ).stdout
        assert found == "[]\n", module
