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

from manylora.errors import ConfigError
from manylora.registry.db.models import Base


def upgrade(connection: Connection) -> tuple[str | None, str | None]:
    """Bring the schema to the newest revision, inside the connection's transaction.

    Returns:
        The revision before (None for an empty database), and the revision now.

    Raises:
        ConfigError: This version of Manylora does not know the database's revision.
    """
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    migration = MigrationContext.configure(connection)
    before = migration.get_current_revision()
    if before is None:
        Base.metadata.create_all(connection, checkfirst=False)
        migration.stamp(ScriptDirectory.from_config(config), "head")
    else:
        try:
            command.upgrade(config, "head")
        except CommandError as error:
            raise ConfigError(
                f"The database has schema {before}, which this version of Manylora does not know: a newer Manylora or "
                "a pre-release wrote it. Use that version, restore a backup from before its upgrade, or start with an "
                "empty database.",
                param="registry.database_url",
            ) from error
    return before, migration.get_current_revision()
