"""The user's cache: folders of files that can be made again, and the check that nobody else can change them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from manylora.config import environment


def cache_folder(part: str) -> Path:
    """Return a folder of this user for files that can be made again. It is made if it is missing.

    Raises:
        OSError: The folder cannot be made; PermissionError if others can write to it.
        RuntimeError: The home folder is unknown.
    """
    base = Path(environment().get("XDG_CACHE_HOME", ""))
    folder = (base if base.is_absolute() else Path.home() / ".cache") / "manylora" / part
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not is_private(folder):
        raise PermissionError(f"{folder} is another user's or can be written by others")
    return folder


def is_private(path: Path) -> bool:
    """True if this user owns it and no other user may write to it.

    Raises:
        OSError: Its owner and mode cannot be read.
    """
    state = path.stat()
    return state.st_uid == os.geteuid() and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
