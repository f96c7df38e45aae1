"""The schema: an empty database is made from the models, an older one goes through the revisions under `versions/`.

A change of the models needs an Alembic revision that changes databases in the same way.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection

from weft.errors import ConfigError
from weft.registry.db.models import Base

OLDEST = "0006"
"""The first revision that can be upgraded."""


def upgrade(connection: Connection) -> tuple[str | None, str | None]:
    """Bring the schema to the newest revision, inside the connection's transaction.

    Returns:
        The revision found, None for an empty database, and the one it is at now.

    Raises:
        ConfigError: The database is at a revision that this version of Weft does not know, or no longer knows.
    """
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    migration = MigrationContext.configure(connection)
    before = migration.get_current_revision()
    if before is None:
        Base.metadata.create_all(connection, checkfirst=False)
        migration.stamp(ScriptDirectory.from_config(config), "head")
    elif before < OLDEST:
        raise _refused(
            f"The database is at schema {before}; this version of Weft takes {OLDEST} and later. "
            f"Run `weft db upgrade` of an earlier Weft, which ends at {OLDEST}, or start with an empty database."
        )
    else:
        try:
            command.upgrade(config, "head")
        except CommandError as error:
            raise _refused(
                "The database was written by a newer Weft; use that version, or a backup from before the upgrade."
            ) from error
    return before, migration.get_current_revision()


def _refused(message: str) -> ConfigError:
    return ConfigError(message, param="registry.database_url")
