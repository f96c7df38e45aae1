"""Checks grammars in a child process, because no limit of llguidance bounds what some schemas take to read.

The child, `python -I -m weft.server.grammar_check`, is ended by the system once a grammar has used its share
of CPU time, and the next check starts another. A line with a grammar comes on its stdin, a line with what is wrong with
it, or null, goes to its stdout, both in JSON.
"""

from __future__ import annotations

import atexit
import json
import resource
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from functools import cache

from weft.engine.grammar.matcher import PARSER_LIMITS

CPU_S = 0.1
"""CPU seconds that a grammar may take."""
WALL_S = 5.0
"""Seconds after which a check is given up whatever it did."""
MAX_REMEMBERED = 1024
MEMORY_BYTES = 1 << 30
"""Address space of the child, of which the interpreter takes a tenth."""
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
    return subprocess.Popen(
        [sys.executable, "-I", "-m", "weft.server.grammar_check"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={},
    )


def main() -> None:
    """Check grammars until standard input ends."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**PARSER_LIMITS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # its signal ends the process
        is_error, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(messages[0] if is_error else None) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
