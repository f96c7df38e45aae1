"""The start of an engine process, before what it shall do is known.

It imports torch for a second or more, so a server starts it before it imports what it needs itself. Importing this
module takes no time.
"""

from __future__ import annotations

import subprocess
import sys

from manylora.config import environment

KEPT_FROM_ENGINE = frozenset({"MANYLORA_ADMIN_KEY", "MANYLORA_PEPPER", "MANYLORA_REGISTRY__DATABASE_URL"})
"""Environment variables that the engine does not need and does not get."""


def start_worker() -> subprocess.Popen[bytes]:
    """Start an engine process. It waits for its launch on standard input, and ends with that."""
    kept = {name: value for name, value in environment().items() if name not in KEPT_FROM_ENGINE}
    command = [sys.executable, "-P", "-m", "manylora.engine.process.worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=kept)  # noqa: S603 - our own program
