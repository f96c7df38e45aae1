"""Whatever clients call things, a line of the log is one JSON object."""

from __future__ import annotations

import json
import subprocess
import sys

HOSTILE = [
    'x"}\n{"event": "forged", "level": "info"}',
    "\r\nERROR forged",
    "\x1b[2J\x1b[31mred",
    "\u2028\u2029\x85\x0b\x0c",
    "\ud800 alone",
    "\0",
    "%s %d {0} {x!r}",
    "y" * 100_000,
]
PROGRAM = """
import json, logging, sys, structlog
from manylora.server.process.logs import configure_logs
configure_logs()
log = structlog.get_logger("manylora.server")
for text in json.load(sys.stdin):
    log.error("internal_error", path=text, request_id=text, nested={"name": text})
    logging.getLogger("manylora.engine").warning("said %s", text)
    try:
        raise RuntimeError(text)
    except RuntimeError as error:
        log.error("internal_error", exc_info=error)
"""


def test_every_line_is_one_json_object() -> None:
    run = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        input=json.dumps(HOSTILE).encode(),
        capture_output=True,
        check=True,
    )
    lines = run.stderr.split(b"\n")
    assert lines.pop() == b""
    events = [json.loads(line) for line in lines]
    assert len(events) == 3 * len(HOSTILE)
    assert {event["event"].partition(" ")[0] for event in events} == {"internal_error", "said"}
    assert all(event["level"] in ("error", "warning") for event in events)
    assert run.stderr.isascii()
