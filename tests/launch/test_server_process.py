"""A server that a command starts for itself ends with the command."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from manylora.config import environment
from manylora.errors import ManyloraError
from manylora.launch.server_process import ServerProcess

SLEEPER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit("drained"))
print("serving", *sys.argv[1:2], flush=True)
time.sleep(300)
"""
COMMAND = """
import signal, sys, time
from pathlib import Path
# Tests may run in the background of a shell, which has SIGINT ignored, or under nohup, which has SIGHUP ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from manylora.launch.server_process import running_server
with running_server(Path(sys.argv[1]), [], program="sleeper") as server:
    print(server.pid, flush=True)
    while "serving" not in Path(sys.argv[1], "serve.log").read_text():
        time.sleep(0.01)
    print("started", flush=True)
    time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_server_ends_with_the_command_that_started_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    env = {**environment(), "PYTHONPATH": str(tmp_path)}
    given = [sys.executable, "-P", "-c", COMMAND, str(tmp_path / "data")]
    with subprocess.Popen(
        given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
    ) as command:
        assert command.stdout is not None
        server = psutil.Process(int(command.stdout.readline()))
        assert command.stdout.readline() == "started\n"
        command.send_signal(number)
        command.wait()
    _, alive = psutil.wait_procs([server], timeout=60)
    assert not alive
    assert (tmp_path / "data" / "serve.log").read_text() == "serving serve\ndrained\n"


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """Makes Python the module `program`; returns the environment that finds it."""

    def write(code: str) -> dict[str, str]:
        (tmp_path / "program.py").write_text(code)
        return {**environment(), "PYTHONPATH": str(tmp_path)}

    return write


LISTENS = "print('manylora: listening on http://127.0.0.1:1', flush=True)\n"
SLEEPS = "import time\ntime.sleep(300)\n"


@pytest.mark.parametrize("has_log", [True, False])
def test_a_server_says_where_it_listens(
    tmp_path: Path,
    program: Callable[[str], dict[str, str]],
    capfd: pytest.CaptureFixture[str],
    has_log: bool,
) -> None:
    log = tmp_path / "log" if has_log else None
    env = program("print('first')\n" + LISTENS + SLEEPS)
    server = ServerProcess("replica-0", [], env, log=log, program="program")
    assert server.wait_listening(60) == server.url == "http://127.0.0.1:1"
    assert server.stop() == -signal.SIGTERM
    if log is not None:
        assert log.read_text().startswith("first\nmanylora: listening")
        assert log.stat().st_mode & 0o777 == 0o600
    else:
        assert capfd.readouterr().out.startswith("replica-0 | first\nreplica-0 | manylora: list")


@pytest.mark.parametrize("has_log", [True, False])
def test_a_server_that_ends_while_it_starts_is_an_error_with_its_last_words(
    tmp_path: Path,
    program: Callable[[str], dict[str, str]],
    capfd: pytest.CaptureFixture[str],
    has_log: bool,
) -> None:
    log = tmp_path / "log" if has_log else None
    env = program("import sys\nsys.exit('no memory')")
    server = ServerProcess("replica-0", [], env, log=log, program="program")
    with pytest.raises(ManyloraError) as ended:
        server.wait_ready(60)
    server.stop()
    start = "replica-0 ended with status 1 while it started; "
    if log is not None:
        assert ended.value.message == start + "it wrote last:\nno memory"
    else:
        assert ended.value.message == start + "its last lines say why."
        assert capfd.readouterr().out == "replica-0 | no memory\n"


def test_a_server_that_is_not_ready_in_time_is_an_error(
    tmp_path: Path, program: Callable[[str], dict[str, str]]
) -> None:
    env = program(LISTENS + SLEEPS)
    server = ServerProcess("gateway", [], env, log=tmp_path / "log", program="program")
    server.wait_listening(60)
    with pytest.raises(ManyloraError, match="gateway is not ready in time; it wrote last"):
        server.wait_ready(0.1)
    server.stop()
