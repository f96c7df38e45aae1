"""A plain `manylora serve` in a process of its own, for commands that need a server for a while."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from manylora.config import environment as manylora_environment
from manylora.data_folder import prepare_folder
from manylora.errors import ConfigError, ManyloraError

HOST = "127.0.0.1"
PROGRAM = "manylora.cli"
USUAL_PORT = 8000
READY_WITHIN_S = 120.0
POLL_S = 0.05
STOP_WITHIN_S = 60.0
LOG_TAIL_LINES = 15
Variables = Mapping[str, str] | None


def child_command(program: str, arguments: Sequence[str], cores: Sequence[int] = ()) -> list[str]:
    """A program in a process that ends with this one. Its standard input must be a pipe, of which we hold the end.

    Args:
        program: The module that is run.
        arguments: Of the program.
        cores: It and its own children run on these; all that we may use if empty.
    """
    watched = ("-m", "manylora.cli.cluster.child", ",".join(map(str, cores)))
    return [sys.executable, "-P", *watched, program, *arguments]


class ServerProcess:
    """A running server.

    Args:
        port: Port to bind, free a moment ago.
        data_dir: Folder of the server's data; its output goes to serve.log there.
        options: Further options of `manylora serve`, `--model` among them.
        environment: Of the server; this process's own when None.
        program: The module that is run.
    """

    def __init__(
        self,
        port: int,
        data_dir: Path,
        options: Sequence[str],
        environment: Variables = None,
        program: str = PROGRAM,
    ) -> None:
        self.url = f"http://{HOST}:{port}"
        self._data_dir = data_dir
        self._log = data_dir / "serve.log"
        self._given_admin_key = (
            manylora_environment() if environment is None else environment
        ).get("MANYLORA_ADMIN_KEY")
        own = ("--host", HOST, "--port", str(port), "--data-dir", str(data_dir))
        self._log.touch(mode=0o600)  # a first start writes the admin key there
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                child_command(program, ["serve", *own, *options]),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # a terminal's Ctrl-C comes to us alone, and the server gets one signal
            )

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def wait_ready(self, within_s: float = READY_WITHIN_S) -> None:
        """Return once requests are answered.

        Raises:
            ManyloraError: The server ended or takes too long; the message ends with what it wrote last.
        """
        deadline = time.monotonic() + within_s
        with httpx.Client(timeout=5, trust_env=False) as http:
            while time.monotonic() < deadline:
                if (status := self._process.poll()) is not None:
                    raise ManyloraError(
                        f"The server ended with status {status}. It wrote last:\n{self._log_tail()}"
                    )
                with contextlib.suppress(httpx.TransportError):
                    if http.get(f"{self.url}/ready").status_code == httpx.codes.OK:
                        return
                time.sleep(POLL_S)
        raise ManyloraError(
            f"The server was not ready within {within_s:.0f} s. It wrote last:\n{self._log_tail()}"
        )

    def admin_key(self) -> str:
        """The key that the server was given, or made at its first start.

        Raises:
            ManyloraError: There is none.
        """
        if self._given_admin_key:
            return self._given_admin_key
        path = self._data_dir / "admin.key"
        try:
            return path.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ManyloraError(
                f"Cannot read the admin key in {path}: {error.strerror}."
            ) from error

    def wait(self) -> int:
        """Wait until the server ends by itself; returns its exit status."""
        return self._process.wait()

    def stop(self) -> None:
        """Let running requests finish, then end; killed if that takes too long or Ctrl-C comes again."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_WITHIN_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


@contextlib.contextmanager
def server_process(
    port: int | None,
    data_dir: Path,
    options: Sequence[str],
    environment: Variables = None,
    program: str = PROGRAM,
) -> Iterator[ServerProcess]:
    """Start a server on `port` (None takes 8000 or, if that is in use, any free one) and end it with the block.

    Raises:
        ConfigError: The port is in use, or the folder cannot be written.
    """
    prepare_folder(data_dir)
    server = ServerProcess(choose_port(port), data_dir, options, environment, program)
    try:
        yield server
    finally:
        server.stop()


def choose_port(wanted: int | None) -> int:
    """A port that is free now.

    Raises:
        ConfigError: The wanted one is in use.
    """
    for port in [USUAL_PORT, 0] if wanted is None else [wanted]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError as error:
                reason = error.strerror
                continue
            return int(probe.getsockname()[1])
    raise ConfigError(
        f"Port {wanted} cannot be used: {reason}. Choose another --port, or leave it out.",
        param="port",
    )
