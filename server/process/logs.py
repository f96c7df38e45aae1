"""Logs as one JSON object per line on stderr, readable lines on a terminal. Values are escaped and cut."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

MAX_FIELD = 512
QUIET_LOGGERS = ("alembic", "uvicorn", "httpx", "httpcore", "asyncio", "aiosqlite", "sqlalchemy")


def configure_logs() -> None:
    """Send structlog and the standard library's logging down one path."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _cut,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    rendered: list[structlog.typing.Processor] = [structlog.dev.ConsoleRenderer()]
    if not sys.stderr.isatty():
        rendered = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendered],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(
        logging.ERROR
    )  # its warnings are one per malformed request
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def _cut(_: object, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for name, value in event.items():
        if isinstance(value, str) and len(value) > MAX_FIELD:
            event[name] = value[:MAX_FIELD] + "..."
    return event
