"""Errors that the engine survives and logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from simulation.adapters import PlannedError


@contextmanager
def logged_faults(failures: list[str]) -> Iterator[None]:
    """Add to `failures` whatever the engine survives and logs meanwhile, unless the scenario planned it."""
    logger = logging.getLogger("manylora")
    handler = _FaultHandler(failures)
    before = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before[:2]
        logger.setLevel(before[2])


class _FaultHandler(logging.Handler):
    """Takes note of errors that the engine logs."""

    def __init__(self, failures: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._failures = failures

    def emit(self, record: logging.LogRecord) -> None:
        fault = record.exc_info[1] if record.exc_info else None
        if not isinstance(fault, PlannedError):
            self._failures.append(logging.Formatter().format(record))
