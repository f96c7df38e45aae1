"""`python -m weft.cli.cluster.child ARGUMENTS`: the `weft` command for a parent process that it must not outlive.

The parent holds the other end of standard input. When that closes, however the parent ended, this process gets a
SIGTERM, which drains a server.
"""

from __future__ import annotations

import os
import signal
import threading

from weft.cli import main


def _watch_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()
    main()
