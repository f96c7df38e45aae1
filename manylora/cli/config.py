"""`manylora config`: show the settings in use, or write a file with all of them; and options for settings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer

from manylora.cli.options import fail, with_options
from manylora.config import Config as Settings
from manylora.config import GatewayConfig, environment

ConfigT = TypeVar("ConfigT", Settings, GatewayConfig)
SECTIONS: dict[str, type[Any]] = get_type_hints(Settings)
HEADER = """\
# Settings of Manylora, each with its default. Remove the # before a name to give it another value.
"""
WIDTH = 110
app = typer.Typer(help="Show or write settings.", no_args_is_help=True)


@dataclasses.dataclass(frozen=True, slots=True)
class GivenSettings:
    """The settings of a command line."""

    tree: Mapping[str, Mapping[str, object]]
    """Values by section and name; None is not given."""
    file: Path | None

    def load(self, kind: type[ConfigT] = Settings) -> ConfigT:  # type: ignore[assignment]
        """Merge them with the environment and the file.

        Raises:
            ConfigError: A setting is wrong.
        """
        from manylora.server.settings import load_config

        return load_config(self.tree, environment(), self.file, kind)


def given_settings(
    names: Mapping[str, str],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SECTION.NAME=VALUE",
            help="Any setting of `manylora config init`; repeat for more.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Settings in YAML. [env: MANYLORA_CONFIG]")
    ] = None,
    **options: object,
) -> GivenSettings:
    """Make the settings of a command line.

    Args:
        names: Setting by the name of the option.
        settings: Assignments, which override the options.
        config: File.
        options: Values by the name of the option.
    """
    from manylora.server.settings import merge_trees, parse_assignments

    places = [(names[option].split("."), value) for option, value in options.items()]
    trees = [{section: {name: value}} for (section, name), value in places]
    return GivenSettings(merge_trees(*trees, parse_assignments(settings or [])), config)


def settings_command(**names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a decorator that gives a command options for settings, `--set` and `--config`.

    The first argument of the command is a `GivenSettings`.

    Args:
        names: Setting by the name of the option.
    """
    _, *sources, _ = inspect.signature(given_settings, eval_str=True).parameters.values()
    options = [_option(option, setting) for option, setting in names.items()]
    make = partial(given_settings, names)
    return partial(with_options, added=[*options, *sources], make=make)


def _option(option: str, setting: str) -> inspect.Parameter:
    """Make an option of a setting. Its help is the first sentence on the setting."""
    section, _, name = setting.partition(".")
    hint, default, effect = _described(section)[name]
    kind = next((each for each in (int, float, Path) if each in (hint, *get_args(hint))), str)
    shown = "" if default in (None, dataclasses.MISSING) else f" [default: {default}]"
    sentence = effect.split(". ")[0].rstrip(".")
    text = f"{sentence}.{shown} [env: MANYLORA_{section.upper()}__{name.upper()}]"
    return inspect.Parameter(
        option,
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(None, help=text),
        annotation=kind,
    )


@cache
def _described(section: str) -> dict[str, tuple[Any, Any, str]]:
    """Type, default and effect of each setting of a section, by its name; the effect is read from the source."""
    cls = SECTIONS[section]
    (body,) = (
        node.body
        for node in ast.parse(inspect.getsource(cls)).body
        if isinstance(node, ast.ClassDef)
    )
    effects = {
        ast.unparse(setting.target): " ".join(ast.literal_eval(text.value).split())
        for setting, text in pairwise(body)
        if isinstance(setting, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    hints = get_type_hints(cls)
    fields = dataclasses.fields(cls)
    return {each.name: (hints[each.name], each.default, effects[each.name]) for each in fields}


@app.command("show")
@settings_command(model="model.path")
def show_config(given: GivenSettings) -> None:
    """Print the settings that `manylora serve` would use with these options, from all sources."""
    import yaml

    from manylora.server.settings import as_tree

    typer.echo(yaml.safe_dump(as_tree(given.load()), sort_keys=False), nl=False)


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
    for section, cls in SECTIONS.items():
        settings = [
            (name, str(default) if isinstance(default, Path) else default, effect)
            for name, (_, default, effect) in _described(section).items()
        ]
        yield section, str(inspect.getdoc(cls)), settings
