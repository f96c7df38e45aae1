"""A `manylora` command in a process of its own, for programs that need servers for a while."""

from __future__ import annotations

import contextlib
import math
import re
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from manylora.data_folder import prepare_folder
from manylora.errors import ManyloraError

HOST = "127.0.0.1"
PROGRAM = "manylora.cli"
READY_WITHIN_S = 120.0
POLL_S = 0.05
STOP_WITHIN_S = 60.0
LOG_TAIL_LINES = 15
_LISTENS = re.compile(r"^manylora: (?:listening|replicas run) on (\S+)\n", re.MULTILINE)


class ServerProcess(subprocess.Popen[str]):
    """A process that ends with this one, however this one ends.

    Args:
        name: Of the server, for its lines and for errors.
        arguments: Of the program.
        environment: All of it; this process's own when None.
        log: File that takes what it writes. None passes its lines on to our standard output, behind its name.
        program: The module that is run.
        held: File descriptors that it keeps open as long as it lives.
        cores: It and its own children run on these; all that we may use if empty.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        log: Path | None = None,
        program: str = PROGRAM,
        held: Sequence[int] = (),
        cores: Sequence[int] = (),
    ) -> None:
        self.url = ""
        """The address that it listens on, once `wait_listening` has returned."""
        self._name = name
        self._log = log
        self._start_lines = ""
        if log is not None:
            log.touch(mode=0o600)  # a first start writes the admin key there
        with contextlib.nullcontext(subprocess.PIPE) if log is None else log.open("w") as output:
            super().__init__(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "manylora.launch.child",
                    ",".join(map(str, cores)),
                    program,
                    *arguments,
                ],
                stdin=subprocess.PIPE,  # it ends when this closes
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=held,
                text=True,
                errors="replace",
                start_new_session=True,  # a terminal's Ctrl-C comes to us alone, and the server gets one signal
            )
        self._pump: threading.Thread | None = None
        if log is None:
            self._pump = threading.Thread(
                target=self._pass_on, name=f"lines of {name}", daemon=True
            )
            self._pump.start()

    def wait_listening(self, within_s: float = math.inf) -> str:
        """Wait until it listens; returns where. A gateway listens before it has replicas.

        Raises:
            ManyloraError: It ended, or takes too long.
        """
        deadline_s = time.monotonic() + within_s
        while (found := _LISTENS.search(self._written())) is None:
            self._check_start(deadline_s)
        self.url = found[1]
        return self.url

    def wait_ready(self, within_s: float = READY_WITHIN_S) -> str:
        """Wait until it answers requests of clients; returns where.

        Raises:
            ManyloraError: It ended, or takes too long.
        """
        deadline_s = time.monotonic() + within_s
        self.wait_listening(within_s)
        no_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # the system's certificates take 20 ms
        with httpx.Client(timeout=5, trust_env=False, verify=no_tls) as http:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if http.get(f"{self.url}/ready").status_code == httpx.codes.OK:
                        return self.url
                self._check_start(deadline_s)

    def stop(self, within_s: float = STOP_WITHIN_S) -> int:
        """Let running requests finish, then end; killed if that takes too long or Ctrl-C comes again.

        Returns:
            The exit status.
        """
        self.terminate()
        try:
            self.wait(within_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self.kill()
        status = self.wait()
        self._end_output()
        return status

    def _written(self) -> str:
        """Content of its log, or all that it wrote before it listened."""
        return self._start_lines if self._log is None else self._log.read_text(errors="replace")

    def _check_start(self, deadline_s: float) -> None:
        """Sleep a little; raises ManyloraError where the server has ended or the time is over."""
        status = self.poll()
        if status is None and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            return
        end = "is not ready in time"
        if status is not None:
            self._end_output()
            end = f"ended with status {status} while it started"
        tail = "\n".join(self._written().splitlines()[-LOG_TAIL_LINES:])
        reason = "its last lines say why." if self._log is None else f"it wrote last:\n{tail}"
        raise ManyloraError(f"{self._name} {end}; {reason}")

    def _end_output(self) -> None:
        """Pass on its last lines, and close its standard input."""
        if self._pump is not None:
            self._pump.join(1)  # it closes the pipes; another process may hold them open
        elif self.stdin is not None:
            self.stdin.close()

    def _pass_on(self) -> None:
        is_starting = True
        with self:  # closes the pipes in the end
            for line in self.stdout or ():
                if is_starting:
                    self._start_lines += line
                    is_starting = _LISTENS.match(line) is None
                with contextlib.suppress(OSError):  # nobody reads us any more; it must not block
                    sys.stdout.write(f"{self._name} | {line}")
                    sys.stdout.flush()


@contextlib.contextmanager
def running_server(
    data_dir: Path,
    options: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    port: int = 0,
    program: str = PROGRAM,
    cores: Sequence[int] = (),
) -> Iterator[ServerProcess]:
    """Start `manylora serve` on this machine, and end it with the block. Its log is serve.log in the data folder.

    Args:
        data_dir: Folder of the server's data.
        options: Of `manylora serve`, `--model` among them.
        environment: As of `ServerProcess`.
        port: Port to bind; 0 takes a free one.
        program: As of `ServerProcess`.
        cores: As of `ServerProcess`.

    Raises:
        ConfigError: The folder cannot be written.
    """
    prepare_folder(data_dir)
    place = ("--host", HOST, "--port", str(port), "--data-dir", str(data_dir))
    log = data_dir / "serve.log"
    server = ServerProcess(
        "The server",
        ["serve", *place, *options],
        environment,
        log=log,
        program=program,
        cores=cores,
    )
    try:
        yield server
    finally:
        server.stop()
