"""A program for a parent process that it must not outlive: the `manylora` command, or another module.

    python -m manylora.launch.child CORES MODULE ARGUMENTS

CORES are the numbers of those that it may use, with commas between; empty for those of its parent. The parent holds the
other end of standard input. When that closes, however the parent ended, this process gets a SIGTERM, which drains a
server.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def _watch_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    if cores := sys.argv.pop(1):
        os.sched_setaffinity(0, map(int, cores.split(",")))
    threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
