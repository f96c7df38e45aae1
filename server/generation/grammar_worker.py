"""The child process that checks grammars, run as a file: it imports nothing of Weft, so that it starts at once.

A line with a grammar comes on stdin, a line with what is wrong with it, or null, goes to stdout, both in JSON.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

from llguidance import LLMatcher, LLParserLimits

MEMORY_BYTES = 1 << 30
"""Address space, of which the interpreter takes a tenth."""


def main() -> None:
    """Check grammars until standard input ends."""
    settings = json.loads(sys.argv[1])
    limits = LLParserLimits(**settings["limits"])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, settings["cpu_s"])  # its signal ends the process
        is_error, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(messages[0] if is_error else None) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
