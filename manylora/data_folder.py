"""The data folder and the secrets in it. Needs no database, so commands that start a server import it in no time."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile

from manylora.errors import ConfigError


def prepare_folder(folder: Path) -> None:
    """Make the data folder (mode 0700), and see that files can be written there.

    Raises:
        ConfigError: They cannot.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"Cannot write to {folder}: {error.strerror}. Give another folder with --data-dir."
        raise ConfigError(message, param="server.data_dir") from error


def read_pepper(data_dir: Path, pepper: str | None) -> bytes:
    """The pepper that was given, or the one in `data_dir`, made when missing."""
    if pepper is not None:
        return pepper.encode()
    return bytes.fromhex(kept_secret(data_dir / "pepper", secrets.token_hex(32)))


def kept_secret(path: Path, fresh: str) -> str:
    """The secret in a file, which is made (mode 0600) with the content `fresh` when missing.

    The file appears complete or not at all, and is never replaced.

    Raises:
        OSError: It cannot be read or made.
        UnicodeDecodeError: It is not ASCII.
    """
    if not path.exists():
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as file:  # mode 0600
            file.write(fresh.encode())
            file.flush()
            os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(file.name, path)
    return path.read_text(encoding="ascii").strip()
