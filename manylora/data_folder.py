"""The data folder and its secrets. Needs no database, so commands that start a server import it quickly."""

from __future__ import annotations

import os
import secrets
import shlex
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryFile

from manylora.errors import ConfigError

MIN_PEPPER_BYTES = 16


def prepare_folder(folder: Path) -> None:
    """Make the data folder (mode 0700), and check that files can be written there.

    Raises:
        ConfigError: The folder cannot be made or written to.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = (
            f"Cannot write to {folder}: {error.strerror}. Give another folder with --data-dir."
        )
        raise ConfigError(message, param="server.data_dir") from error


def read_pepper(data_dir: Path, pepper: str | None, *, has_keys: bool) -> bytes:
    """Return the given pepper, or the one in `data_dir`, which is made if it is missing.

    Args:
        data_dir: The data folder.
        pepper: The value of MANYLORA_PEPPER.
        has_keys: True if there are keys already, which would not work with a new pepper.

    Raises:
        ConfigError: There are keys but no pepper, or the file cannot be read or made, or has no pepper.
    """
    if pepper is not None:
        return pepper.encode()
    path = data_dir / "pepper"
    if has_keys and not path.exists():
        raise ConfigError(
            f"{path} is missing, and no key in the database works without it. Restore it from a backup, or set "
            "MANYLORA_PEPPER if keys were made with that. To make all keys invalid on purpose: "
            f"(umask 077; openssl rand -hex 32 > {shlex.quote(str(path))}).",
            param="server.data_dir",
        )
    try:
        found = bytes.fromhex(kept_secret(path, secrets.token_hex(32)))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read or made: {error.strerror}.", param="server.data_dir"
        ) from error
    except ValueError:
        found = b""
    if len(found) < MIN_PEPPER_BYTES:
        message = f"{path} is damaged: it must be at least {2 * MIN_PEPPER_BYTES} hex digits. Restore it from a backup."
        raise ConfigError(message, param="server.data_dir")
    return found


def kept_secret(path: Path, fresh: str) -> str:
    """Read the secret in a file. A missing file is made (mode 0600) with the content `fresh`.

    The file appears complete or not at all, and is never replaced.

    Raises:
        OSError: The file cannot be read or made.
        UnicodeDecodeError: The secret is not ASCII.
    """
    if not path.exists():
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as file:  # mode 0600
            file.write(fresh.encode())
            file.flush()
            os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(file.name, path)
    return path.read_text(encoding="ascii").strip()
