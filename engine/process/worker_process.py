"""The start of an engine process, before its settings are known.

The process imports torch for a second or more, so a server starts it before its own imports. Importing this module
takes no time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NamedTuple

from manylora.config import environment
from manylora.engine.process.pulse import Pulse

KEPT_FROM_ENGINE = frozenset(
    {"MANYLORA_ADMIN_KEY", "MANYLORA_PEPPER", "MANYLORA_REGISTRY__DATABASE_URL"}
)
"""Environment variables that the engine does not get, because it does not need them."""


class Worker(NamedTuple):
    """An engine process that waits for its launch on standard input, and ends when standard input ends."""

    process: subprocess.Popen[bytes]
    pulse: Pulse
    pulse_fd: int
    """Descriptor of the page of `Pulse` in the process."""


def start_worker() -> Worker:
    """Start an engine process."""
    kept = {name: value for name, value in environment().items() if name not in KEPT_FROM_ENGINE}
    command = [sys.executable, "-P", "-m", "manylora.engine.process.worker"]
    fd = Pulse.create()
    try:
        pulse = Pulse(fd)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=kept, pass_fds=[fd])  # noqa: S603 - our own program
    finally:
        os.close(fd)
    return Worker(process, pulse, fd)
