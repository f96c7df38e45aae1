"""The admin's key: from MANYLORA_ADMIN_KEY, else from the data folder, where it is made at first start."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from manylora.data_folder import kept_secret
from manylora.errors import ConfigError

VARIABLE = "MANYLORA_ADMIN_KEY"
FILE = "admin.key"
IS_OFF = "authentication is off: everybody on this machine is admin"
MIN_LENGTH = 16


@dataclass(frozen=True, slots=True)
class AdminKey:
    """The key, and whether this start made it and must show it."""

    secret: str
    is_new: bool
    path: Path | None
    """The file it is kept in; None for one from the environment."""

    @property
    def announcement(self) -> list[str]:
        """Lines for the operator: always where the key is, because the start that made it may have failed before."""
        if self.path is None:
            return [f"admin key from {VARIABLE}"]
        return [*([f"admin key {self.secret}"] if self.is_new else []), f"admin key in {self.path}"]


def admin_key(data_dir: Path, environ: Mapping[str, str]) -> AdminKey:
    """Find the key, or make one.

    Raises:
        ConfigError: The key is too short, or the file cannot be read or written.
    """
    given = environ.get(VARIABLE)
    if given is not None:
        return AdminKey(_checked(given, VARIABLE), False, None)
    path = data_dir / FILE
    fresh = f"manylora_admin_{secrets.token_urlsafe(32)}"
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        secret = _checked(kept_secret(path, f"{fresh}\n"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The admin key in {path} cannot be read or written: {error}.") from error
    return AdminKey(secret, secret == fresh, path)


def given_pepper(environ: Mapping[str, str]) -> str | None:
    """The value of MANYLORA_PEPPER: the secret in the digests of keys, shared by servers that share a database.

    Raises:
        ConfigError: It is too short.
    """
    given = environ.get("MANYLORA_PEPPER")
    if given is not None and len(given) < MIN_LENGTH:
        raise ConfigError(f"MANYLORA_PEPPER must have at least {MIN_LENGTH} characters.")
    return given


def check_shared_secrets(role: str, pepper: str | None, admin_key: str | None) -> None:
    """Return if the secrets that all servers share were given.

    Raises:
        ConfigError: They were not, so this server would make its own.
    """
    for name, value in (("MANYLORA_PEPPER", pepper), (VARIABLE, admin_key)):
        if value is None:
            message = f"A {role} needs {name} in its environment, the same text for all servers over one database."
            raise ConfigError(message, param="server.role")


def _checked(secret: str, source: str) -> str:
    if (
        len(secret) < MIN_LENGTH
        or not secret.isascii()
        or any(letter.isspace() for letter in secret)
    ):
        raise ConfigError(
            f"The admin key in {source} must be at least {MIN_LENGTH} ASCII characters without spaces."
        )
    return secret
