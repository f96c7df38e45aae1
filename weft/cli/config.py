"""`weft config`: show the settings as they would be used, or write a file with all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.options import fail
from weft.cli.serve import Setting

app = typer.Typer(help="Show or write settings.", no_args_is_help=True)
ConfigFile = Annotated[Path | None, typer.Option(help="Settings in YAML. [env: WEFT_CONFIG]")]


@app.command("show")
def show_config(config: ConfigFile = None, settings: Setting = None) -> None:
    """Print the settings that `weft serve` would use, from all sources."""
    import yaml

    from weft.config import environment
    from weft.server.settings import as_tree, load_config, parse_assignments

    loaded = load_config(parse_assignments(settings or []), environment(), config)
    typer.echo(yaml.safe_dump(as_tree(loaded), sort_keys=False), nl=False)


@app.command()
def init(path: Annotated[Path, typer.Argument(help="File to write.")] = Path("weft.yaml")) -> None:
    """Write a file with every setting and its default."""
    from weft.server.settings import defaults_as_yaml

    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(defaults_as_yaml())
    except FileExistsError:
        fail(f"{path} exists; choose another name.", 2)
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}. Choose a file in a folder that exists.", 2)
    typer.echo(f"wrote {path}")
