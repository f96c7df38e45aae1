"""Servers as child processes: their lines are passed on behind their names, and they end with their parent."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from manylora.errors import ManyloraError
from manylora.server.server_process import PROGRAM, child_command

_READY = re.compile(r"manylora: (?:listening|replicas run) on (\S+)")


class Child(subprocess.Popen[str]):
    """A `manylora` command in a process of its own, which does not outlive this one.

    Args:
        name: Stands before its lines.
        arguments: Of `manylora`.
        environment: All of it.
        held: File descriptors that it keeps open as long as it lives.
        cores: It and its own children run on these; all that we may use if empty.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        held: Sequence[int] = (),
        cores: Sequence[int] = (),
    ) -> None:
        super().__init__(
            child_command(PROGRAM, arguments, cores),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=held,
            text=True,
            errors="replace",
            start_new_session=True,  # a terminal's Ctrl-C comes to us alone
        )
        self._name = name
        self._url: str | None = None
        self._pump = threading.Thread(target=self._pass_on, name=f"lines of {name}", daemon=True)
        self._pump.start()

    def wait_ready(self) -> str:
        """Wait until it listens; returns where.

        Raises:
            ManyloraError: It ended before.
        """
        while self._url is None:
            if self.poll() is not None:
                self._pump.join(
                    1
                )  # its last lines come before the error; a child of its own may hold the pipe
                message = f"{self._name} ended with status {self.returncode} while it started; its last lines say why."
                raise ManyloraError(message)
            time.sleep(0.05)
        return self._url

    def end(self, within_s: float) -> None:
        """Drain it, and kill it if that takes longer."""
        self.terminate()
        try:
            self.wait(within_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def _pass_on(self) -> None:
        with self:  # closes the pipes in the end
            for line in self.stdout or ():
                if self._url is None and (found := _READY.match(line)):
                    self._url = found[1]
                with suppress(
                    OSError
                ):  # nobody reads us any more, and the child must not block on that
                    sys.stdout.write(f"{self._name} | {line}")
                    sys.stdout.flush()
