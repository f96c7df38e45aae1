"""`manylora config`: show the settings in use, or write a file with all of them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from manylora.cli.options import fail
from manylora.cli.serve import Config, Model, Setting, settings_of

HEADER = """\
# Settings of Manylora, each with its default. Remove the # before a name to give it another value.
"""
WIDTH = 110
app = typer.Typer(help="Show or write settings.", no_args_is_help=True)


@app.command("show")
def show_config(model: Model = None, config: Config = None, settings: Setting = None) -> None:
    """Print the settings that `manylora serve` would use with these options, from all sources."""
    import yaml

    from manylora.server.settings import as_tree

    loaded = settings_of({"model": {"path": model}}, settings, config)
    typer.echo(yaml.safe_dump(as_tree(loaded), sort_keys=False), nl=False)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("manylora.yaml"),
) -> None:
    """Write a file with every setting, its default and its effect."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(defaults_as_yaml())
    except FileExistsError:
        fail(f"{path} exists. Give another name, as `manylora config init other.yaml`.")
    except OSError as error:
        fail(f"{path} cannot be written: {error.strerror}. Choose a file in a folder that exists.")
    typer.echo(f"wrote {path}")


def defaults_as_yaml() -> str:
    """Write a settings file in which every setting is explained, and commented out at its default."""
    lines = [HEADER]
    for section, purpose, settings in explained():
        lines.append(f"\n{section}:  # {purpose}\n")
        for name, default, sentence in settings:
            lines += [f"  # {line}\n" for line in textwrap.wrap(sentence, WIDTH)]
            is_required = default is dataclasses.MISSING
            lines.append(
                f"  {name}: CHANGE-ME\n" if is_required else f"  #{name}: {json.dumps(default)}\n"
            )
    return "".join(lines)


def explained() -> Iterator[tuple[str, str, list[tuple[str, Any, str]]]]:
    """Sections of the settings: name, purpose, and for each setting its name, default and effect.

    The default is as in YAML; MISSING if there is none.
    """
    from manylora.server.settings import SECTIONS

    for section, cls in SECTIONS.items():
        (body,) = (
            node.body
            for node in ast.parse(inspect.getsource(cls)).body
            if isinstance(node, ast.ClassDef)
        )
        sentences = {
            ast.unparse(setting.target): " ".join(ast.literal_eval(text.value).split())
            for setting, text in pairwise(body)
            if isinstance(setting, ast.AnnAssign) and isinstance(text, ast.Expr)
        }
        settings = [
            (
                field.name,
                str(field.default) if isinstance(field.default, Path) else field.default,
                sentences[field.name],
            )
            for field in dataclasses.fields(cls)
        ]
        yield section, str(inspect.getdoc(cls)), settings
