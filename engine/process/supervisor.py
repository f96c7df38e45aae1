"""One life of the engine process, and when to give it another. Knows no messages but the launch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from weft.config import Config, environment
from weft.engine.process.messages import Launch, encode_launch

SOCKET_NAME = "engine"
MAX_SOCKET_PATH = 100
"""The system takes 107 characters; some room for the folder's random part."""
KEPT_FROM_ENGINE = frozenset({"WEFT_ADMIN_KEY", "WEFT_PEPPER", "WEFT_REGISTRY__DATABASE_URL"})
"""Variables that the engine has no business with."""

CRASH_LOOP_DEATHS = 3
CRASH_LOOP_WINDOW_S = 60.0
CRASH_LOOP_DELAY_S = 30.0
SECOND_DELAY_S = 1.0


class EngineProcess:
    """A child process and its private folder, which only this user may enter.

    Args:
        config: Settings of the engine.
        on_exit: Called once with the exit code, from a thread of its own.
    """

    def __init__(self, config: Config, on_exit: Callable[[int], None]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="weft-", dir=_short_folder()))
        self.address = f"ipc://{self._folder / SOCKET_NAME}"
        self._config = config
        self._on_exit = on_exit
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id, once started."""
        return self._popen.pid if self._popen else None

    def start(self) -> None:
        """Start the process; the socket at `address` must be bound by now."""
        kept = {name: value for name, value in environment().items() if name not in KEPT_FROM_ENGINE}
        command = [sys.executable, "-P", "-m", "weft.engine.process.worker"]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, env=kept)  # noqa: S603 - our own program
        threading.Thread(target=self._wait, args=(self._popen,), name="engine-wait", daemon=True).start()
        self._write(encode_launch(Launch(self._config, self.address)))

    def end_input(self) -> None:
        """Close its standard input, which ends it softly within seconds."""
        if self._popen is not None and self._popen.stdin is not None:
            try:
                self._popen.stdin.close()
            except BrokenPipeError:
                return

    def kill(self) -> None:
        """End it now."""
        if self._popen is not None:
            self._popen.kill()

    def clean_up(self) -> None:
        """Remove what an ended process leaves."""
        self.end_input()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, line: bytes) -> None:
        if self._popen is None or self._popen.stdin is None:
            return
        try:
            self._popen.stdin.write(line)
            self._popen.stdin.flush()
        except BrokenPipeError:
            return  # it died at once; its exit code tells

    def _wait(self, popen: subprocess.Popen[bytes]) -> None:
        self._on_exit(popen.wait())


class RestartPolicy:
    """When to start again: at once, then after a second, and every half minute where it keeps dying.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deaths: deque[float] = deque(maxlen=CRASH_LOOP_DEATHS)

    @property
    def is_crash_loop(self) -> bool:
        """Whether it died too often in too short a time."""
        return len(self._deaths) == CRASH_LOOP_DEATHS

    def died(self) -> float:
        """Note a death; returns the seconds to wait before the next start."""
        now = self._clock()
        while self._deaths and now - self._deaths[0] > CRASH_LOOP_WINDOW_S:
            self._deaths.popleft()
        self._deaths.append(now)
        return (0.0, SECOND_DELAY_S, CRASH_LOOP_DELAY_S)[len(self._deaths) - 1]


def _short_folder() -> str:
    folder = tempfile.gettempdir()
    return folder if len(folder) + len("/weft-12345678/") + len(SOCKET_NAME) <= MAX_SOCKET_PATH else "/tmp"  # noqa: S108
