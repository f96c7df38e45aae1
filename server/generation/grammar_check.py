"""Checks grammars in a child process, because no limit of llguidance bounds what some schemas take to read.

The child is ended by the system once a grammar has used its share of CPU time, and the next check starts another.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from functools import cache
from pathlib import Path

from weft.engine.grammar.matcher import PARSER_LIMITS

CPU_S = 0.1
"""CPU seconds that a grammar may take."""
WALL_S = 5.0
"""Seconds after which a check is given up whatever it did."""
MAX_REMEMBERED = 1024
WORKER = Path(__file__).with_name("grammar_worker.py")
TOO_COMPLEX = "it takes too long to read. Use fewer properties, alternatives and allOf, and simpler patterns"


class GrammarChecker:
    """One child, one check at a time. Thread-safe; takes a millisecond, or 0.1 s where a grammar is refused by time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._remembered: OrderedDict[str, str | None] = OrderedDict()

    def problem(self, text: str, digest: str) -> str | None:
        """What is wrong with a grammar; None if it is one."""
        with self._lock:
            if digest in self._remembered:
                self._remembered.move_to_end(digest)
                return self._remembered[digest]
            found = self._remembered[digest] = self._ask(text)
            if len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)
            return found

    def close(self) -> None:
        """End the child; the next check starts another."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    def _ask(self, text: str) -> str | None:
        child = self._child = self._child or _start()
        stdin, stdout = child.stdin, child.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the child was started without pipes")
        alarm = threading.Timer(WALL_S, child.kill)
        alarm.start()
        try:
            stdin.write(json.dumps(text).encode() + b"\n")
            stdin.flush()
            answer = stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            alarm.cancel()
        if not answer.endswith(b"\n"):
            self.close()
            return TOO_COMPLEX
        problem: str | None = json.loads(answer)
        return problem


@cache
def grammar_checker() -> GrammarChecker:
    """The checker of this process, whose child ends with it."""
    checker = GrammarChecker()
    atexit.register(checker.close)
    return checker


def _start() -> subprocess.Popen[bytes]:
    """A child without this process's environment, which may hold secrets; it ends when its standard input does."""
    settings = json.dumps({"limits": PARSER_LIMITS, "cpu_s": CPU_S})
    return subprocess.Popen(  # noqa: S603 - our own file
        [sys.executable, "-I", str(WORKER), settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
    )
