"""What became of an untrusted document: a result, or a refusal fit to be shown. Anything else fails the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from manylora.errors import AdapterError

Result = TypeVar("Result")


def outcome(read: Callable[[], Result]) -> Result | AdapterError:
    """What `read` returns, or the refusal it raises."""
    try:
        return read()
    except AdapterError as error:
        return error


def is_presentable(error: AdapterError, prefix: str) -> bool:
    """Whether the code is of the right family and the message can go into a log line and an answer."""
    return error.code.startswith(prefix) and error.message.isascii() and error.message.isprintable()
