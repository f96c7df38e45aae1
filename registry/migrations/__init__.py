"""The schema's history: numbered Alembic revisions under `versions/`, applied when the database is opened."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import Connection

from weft.errors import ConfigError


def upgrade(connection: Connection) -> tuple[str | None, str | None]:
    """Bring the schema to the newest revision, inside the connection's transaction.

    Returns:
        The revision found, None for an empty database, and the one it is at now.

    Raises:
        ConfigError: The database is at a revision that this version of Weft does not know.
    """
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    before = MigrationContext.configure(connection).get_current_revision()
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise ConfigError(
            "The database was written by a newer Weft; use that version, or a backup from before the upgrade.",
            param="registry.database_url",
        ) from error
    return before, MigrationContext.configure(connection).get_current_revision()
