"""Checks grammars in a child process, because no limit of llguidance bounds what some schemas take to read.

The child, `python -I -m manylora.server.sandbox.grammar_check`, does what the engine will do: it compiles a grammar for
the model's tokenizer, and computes the first mask. The system ends it once a grammar has used its share of CPU time or
memory, and the next check starts another. A line with the checkpoint's folder and a grammar comes on its stdin, a line
with what is wrong with it, or null, goes to its stdout, both in JSON.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from manylora.engine.grammar.matcher import PARSER_LIMITS, GrammarTokens, compiled_parser
from manylora.engine.grammar.problems import TOO_COMPLEX
from manylora.engine.text.tokenizer import read_eos_token_ids
from manylora.errors import CapacityError, ManyloraError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

CPU_S = 0.075
"""CPU seconds that a grammar may take. A schema of 1,000 properties takes 0.04 with 151,000 tokens, one of 200 0.01."""
NUM_WALKED = 8
"""Tokens of an answer that are tried: some grammars are found too complex only where an answer is under way."""
WALL_S = 20.0
"""Seconds after which a check is given up whatever it did; the first makes the tokenizer, which takes some."""
MAX_REMEMBERED = 1024
MEMORY_BYTES = 256 << 20
"""Address space that a grammar may take beyond that of the interpreter and the tokenizer."""
NICENESS = 10
"""What the child adds to its own: where steps use all cores it gets a tenth of one."""
VERDICTS = frozenset({-signal.SIGPROF, -signal.SIGABRT, -signal.SIGSEGV})
"""How a child ends by a grammar: by its CPU time, memory or stack."""


class GrammarChecker:
    """One child, one check at a time. Thread-safe; takes some milliseconds, or 0.075 s for what is refused by time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._remembered: OrderedDict[tuple[str, Path, str], tuple[str | None]] = OrderedDict()
        """By tenant, so that nobody learns from a short wait what others sent."""

    def is_sound(self, digest: str, folder: Path, tenant: str) -> bool:
        """True of a grammar that was sent by this tenant before, and has no fault."""
        return self._remembered.get((tenant, folder, digest)) == (None,)

    def problem(self, text: str, digest: str, folder: Path, tenant: str) -> str | None:
        """What is wrong with a grammar for the checkpoint of a folder; None if it is one.

        Raises:
            CapacityError: The child ended twice by something else.
        """
        key = (tenant, folder, digest)
        known = self._remembered.get(key)  # which waits for no check of others
        if known is not None:
            return known[0]
        with self._lock:
            answer = self._remembered.get(key) or self._ask(text, folder) or self._ask(text, folder)
            if answer is None:
                raise CapacityError(
                    "Grammars and schemas cannot be checked just now. Try again in a moment."
                )
            self._remembered[key] = answer
            if len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)
            return answer[0]

    def close(self) -> None:
        """End the child; the next check starts another."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    def _ask(self, text: str, folder: Path) -> tuple[str | None] | None:
        """What `problem` returns, in a tuple; None if the child ended by something else than the grammar."""
        child = self._child = self._child or _start()
        stdin, stdout = child.stdin, child.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the child was started without pipes")
        is_over = threading.Event()
        threading.Thread(
            target=_kill_if_hung, args=(child, is_over), name="grammar-check", daemon=True
        ).start()
        try:
            stdin.write(json.dumps([str(folder.absolute()), text]).encode() + b"\n")
            stdin.flush()
            answer = stdout.readline()
            if answer.endswith(b"\n"):
                return (json.loads(answer),)
            return (TOO_COMPLEX,) if child.wait() in VERDICTS else None
        except BrokenPipeError:
            child.wait()  # it ended before it was asked
            return None
        finally:
            is_over.set()
            if child.poll() is not None:
                self.close()


@cache
def grammar_checker() -> GrammarChecker:
    """The checker of this process, whose child ends with it."""
    checker = GrammarChecker()
    atexit.register(checker.close)
    return checker


def _start() -> subprocess.Popen[bytes]:
    """A child without this process's environment, which may hold secrets; it ends when its standard input does."""
    return subprocess.Popen(
        [sys.executable, "-I", "-m", "manylora.server.sandbox.grammar_check"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"RAYON_NUM_THREADS": "1"},  # each thread takes address space
    )


def _kill_if_hung(child: subprocess.Popen[bytes], is_over: threading.Event) -> None:
    """Kill a child that was stopped, or takes too long, before its check is over."""
    from manylora.server.sandbox.processes import LOOK_S, is_stopped

    end_s = time.monotonic() + WALL_S
    while not is_over.wait(LOOK_S):
        if time.monotonic() > end_s or is_stopped(child.pid):
            child.kill()
            return


@lru_cache(maxsize=1)
def _tokenizer(folder: Path) -> LLTokenizer | None:
    """None where grammars do not know it, which the engine says to who asks. Bounds the memory for what comes after."""
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    try:
        found = GrammarTokens(folder, read_eos_token_ids(folder)).tokenizer
    except ManyloraError:
        found = None
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = num_pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    return found


def _problem(tokenizer: LLTokenizer | None, text: str) -> str | None:
    from llguidance import LLMatcher, LLParserLimits

    if tokenizer is None:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(
            text, limits=LLParserLimits(**PARSER_LIMITS)
        )
        return messages[0] if is_error else None
    try:
        parser = compiled_parser(tokenizer, text)
        for _ in range(NUM_WALKED):
            allowed = int.from_bytes(parser.compute_bitmask(), "little")
            token_id = (allowed & -allowed).bit_length() - 1
            if parser.is_error() or parser.is_accepting() or token_id < 0:
                break
            parser.consume_tokens([token_id])
        return parser.get_error() or None
    except BaseException:  # noqa: BLE001 - a panic of llguidance is no Exception
        return TOO_COMPLEX


def main() -> None:
    """Check grammars until standard input ends."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        folder, text = json.loads(line)
        tokenizer = _tokenizer(Path(folder))
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # its signal ends the process
        problem = _problem(tokenizer, text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(problem) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
