"""`manylora db`: upgrade the registry's database while no server runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Upgrade the database of tenants, keys, adapters and usage.", no_args_is_help=True
)


@app.callback()
def _group() -> None:
    """Make `manylora db` a group: typer would turn a single command into `manylora db` itself."""


@app.command()
def upgrade(
    database_url: Annotated[
        str | None,
        typer.Option(
            envvar="MANYLORA_REGISTRY__DATABASE_URL",
            show_envvar=False,
            help="sqlite:///PATH or postgresql://USER:PASSWORD@HOST/DATABASE. [env: MANYLORA_REGISTRY__DATABASE_URL]",
        ),
    ] = None,
    data_dir: Annotated[
        Path,
        typer.Option(
            help="Data folder of the server; its SQLite file is used without --database-url."
        ),
    ] = Path("manylora-data"),
) -> None:
    """Bring the database to the schema of this version of Manylora. `manylora serve` does the same when it starts."""
    import asyncio

    from manylora.registry.db.database import Database

    async def run() -> tuple[str | None, str | None]:
        database = await Database.open(database_url, data_dir)
        await database.close()
        return database.revision_before, database.revision

    if database_url is None:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    before, after = asyncio.run(run())
    typer.echo(
        f"schema {after}: up to date"
        if before == after
        else f"schema {before or 'none'} -> {after}"
    )
