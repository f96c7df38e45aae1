"""Where settings come from: command line, then `MANYLORA_...__...` environment, then a YAML file, then the defaults.

The sections themselves are the dataclasses of `manylora.config`; this module merges the sources, and pydantic makes
texts numbers. Unknown keys and misspelt `MANYLORA_*` names are errors that name the nearest setting.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from manylora.config import Config, GatewayConfig
from manylora.errors import ConfigError
from manylora.server.http.wrong_value import wrong_value

SECTIONS: dict[str, type[Any]] = get_type_hints(Config)
PREFIX = "MANYLORA_"
PLAIN_NAMES = frozenset(
    {"MANYLORA_ADMIN_KEY", "MANYLORA_PEPPER", "MANYLORA_CONFIG", "MANYLORA_URL", "MANYLORA_KEY"}
)
"""Names that are no settings of a section."""
SettingTree = Mapping[str, Mapping[str, object]]
ConfigT = TypeVar("ConfigT", Config, GatewayConfig)


def setting_names() -> list[str]:
    """Every setting as `section.name`, in the order of declaration."""
    return [
        f"{section}.{field.name}"
        for section, cls in SECTIONS.items()
        for field in dataclasses.fields(cls)
    ]


def load_config(
    overrides: SettingTree,
    environ: Mapping[str, str],
    config_file: Path | None = None,
    kind: type[ConfigT] = Config,  # type: ignore[assignment]  # mypy knows no defaults of type variables
) -> ConfigT:
    """Merge all sources into one `Config`, or one `GatewayConfig`, which leaves out the other sections.

    Args:
        overrides: Values of the command line by section and name; None means not given.
        environ: The process environment.
        config_file: YAML file; None takes the one that MANYLORA_CONFIG names, if any.
        kind: What to make.

    Raises:
        ConfigError: A name is unknown, or a value is malformed or out of range; the message names the setting.
    """
    from_environment = _from_environment(environ)
    if config_file is None and environ.get("MANYLORA_CONFIG"):
        config_file = Path(environ["MANYLORA_CONFIG"])
    given = {
        section: {name: value for name, value in values.items() if value is not None}
        for section, values in overrides.items()
    }
    from_file = read_yaml(config_file) if config_file else {}
    for tree, source in ((given, "the command line"), (from_file, str(config_file))):
        _check_names(tree, source)
    merged = merge_trees(from_file, from_environment, given)
    sections: dict[str, Any] = {}
    for name in get_type_hints(kind):
        try:
            sections[name] = TypeAdapter(SECTIONS[name]).validate_python(merged.get(name, {}))
        except ValidationError as error:
            raise _explain(name, error) from error
    return kind(**sections)


def environment_name(setting: str) -> str:
    """The environment variable of a setting: `server.port` is `MANYLORA_SERVER__PORT`."""
    return PREFIX + setting.replace(".", "__").upper()


def read_yaml(path: Path) -> dict[str, dict[str, object]]:
    """Settings of a YAML file: a mapping from sections to mappings.

    Raises:
        ConfigError: The file cannot be read, or is not such a mapping.
    """
    content = parse_yaml(path, "settings file")
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(
        isinstance(part, dict | None) for part in content.values()
    ):
        raise ConfigError(
            f"The settings file {path} must map section names to mappings of settings."
        )
    return {str(section): dict(part or {}) for section, part in content.items()}


def parse_yaml(path: Path, what: str, param: str | None = None) -> object:
    """The content of a YAML file.

    Args:
        path: The file.
        what: What errors call it.
        param: The setting that names it.

    Raises:
        ConfigError: It cannot be read, or is not YAML.
    """
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"Cannot read the {what} {path}: {error.strerror}.", param=param
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"The {what} {path} is not YAML: {error}", param=param) from error


def parse_assignments(assignments: list[str]) -> dict[str, dict[str, object]]:
    """Turn `section.name=value` words of the command line into a tree.

    Raises:
        ConfigError: A word is not of this form.
    """
    tree: dict[str, dict[str, object]] = {}
    for assignment in assignments:
        match = re.fullmatch(r"([a-z]+)\.([a-z_]+)=(.*)", assignment, re.DOTALL)
        if match is None:
            raise ConfigError(f"--set expects section.name=value, got {assignment!r}.")
        section, name, value = match.groups()
        tree.setdefault(section, {})[name] = value
    return tree


def merge_trees(*trees: SettingTree) -> dict[str, dict[str, object]]:
    """Merge trees; later ones win."""
    merged: dict[str, dict[str, object]] = {}
    for tree in trees:
        for section, values in tree.items():
            merged.setdefault(section, {}).update(values)
    return merged


def as_tree(config: Config) -> dict[str, dict[str, object]]:
    """All settings as plain values by section, with a database password blanked out."""
    tree: dict[str, dict[str, object]] = TypeAdapter(Config).dump_python(config, mode="json")
    url = tree["registry"]["database_url"]
    if isinstance(url, str):
        blanked = re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", url)
        tree["registry"]["database_url"] = re.sub(r"([?&]password=)[^&]*", r"\1***", blanked)
    return tree


def _from_environment(environ: Mapping[str, str]) -> dict[str, dict[str, object]]:
    """Settings by their variables; an empty variable counts as not set. Unknown `MANYLORA_*` variables are refused."""
    settings = {environment_name(setting): setting.split(".") for setting in setting_names()}
    tree: dict[str, dict[str, object]] = {}
    for given, value in environ.items():
        variable = given.upper()
        if variable in settings and value:
            section, name = settings[variable]
            tree.setdefault(section, {})[name] = None if value == "null" else value
        elif variable.startswith(PREFIX) and variable not in {*settings, *PLAIN_NAMES}:
            near = _did_you_mean(variable, [*settings, *PLAIN_NAMES])
            raise ConfigError(f"The environment variable {given} is not a setting.{near}")
    return tree


def _check_names(tree: SettingTree, source: str) -> None:
    known = setting_names()
    for section, values in tree.items():
        if section not in SECTIONS:
            raise ConfigError(
                f"{section!r} in {source} is not a section.{_did_you_mean(section, SECTIONS)}"
            )
        for name in values:
            if (setting := f"{section}.{name}") not in known:
                message = f"{setting} in {source} is not a setting.{_did_you_mean(setting, known)}"
                raise ConfigError(message, param=setting)


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]}?" if near else ""


def _explain(section: str, error: ValidationError) -> ConfigError:
    first = error.errors(include_url=False)[0]
    setting = f"{section}.{first['loc'][0]}"
    if first["type"] == "missing":
        hint = (
            "give --model or --set model.path=..."
            if setting == "model.path"
            else f"set {environment_name(setting)}"
        )
        return ConfigError(f"{setting} is required: {hint}.", param=setting)
    return ConfigError(f"{setting}: {wrong_value(first)}.", param=setting)
