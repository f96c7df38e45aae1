"""A server that a command starts for itself ends with the command."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from manylora.config import environment

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
from manylora.server.server_process import server_process
with server_process(0, Path(sys.argv[1]), [], program="sleeper") as server:
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
