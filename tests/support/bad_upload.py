"""What one case of a bad upload is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EVIL_REGEX = r"(([a-z_.0-9])*)*X"
"""Takes longer than anyone waits when it is matched."""


@dataclass(frozen=True)
class Upload:
    """The two files of an upload."""

    config: bytes
    weights: bytes


@dataclass(frozen=True)
class BadUpload:
    """A case: made on demand, since some are large."""

    name: str
    code: str
    make: Callable[[], Upload]
    status: int = 422


class MaliciousPickle:
    """Creates a file named PWNED in the working directory when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return open, ("PWNED", "w")
