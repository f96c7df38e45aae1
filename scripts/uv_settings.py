"""Tell uv what pip was told: which indexes, folders of wheels, constraints and certificates it uses.

usage: uv_settings.py, with the Python whose pip is asked

Prints one `NAME=value` a line for the environment of uv. What the environment has already stays as it is. Exit status 1
where a setting of pip's has no equal in uv: then pip has to install.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterable

EQUALS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}
"""Settings of pip by name, and the variables that stand for them in uv's environment."""
COMMA_SEPARATED = {"UV_FIND_LINKS"}
WITHOUT_EFFECT = {
    "break-system-packages",
    "cache-dir",
    "compile",
    "config-file",
    "debug",
    "default-timeout",
    "disable-pip-version-check",
    "exists-action",
    "log",
    "no-cache-dir",
    "no-color",
    "no-compile",
    "no-input",
    "no-python-version-warning",
    "no-warn-conflicts",
    "no-warn-script-location",
    "prefer-binary",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "resume-retries",
    "retries",
    "root-user-action",
    "timeout",
    "user",
    "verbose",
}
"""Settings that do not change what an installation into .venv ends with."""
SECTIONS = ("global", "install", ":env:")
"""Sections of pip's settings; the later ones win."""


def read_settings(lines: Iterable[str]) -> dict[str, str]:
    """Settings of `pip install` by name, from what `pip config list` prints."""
    found: dict[tuple[str, str], str] = {}
    for line in lines:
        section, _, rest = line.partition(".")
        name, _, value = rest.partition("=")
        found[section, name] = ast.literal_eval(value)
    return {
        name: found[section, name]
        for wanted in SECTIONS
        for section, name in found
        if section == wanted
    }


def variables(settings: dict[str, str]) -> dict[str, str]:
    """Environment variables with which uv does the same.

    Raises:
        SystemExit: A setting has no equal in uv.
    """
    found = {
        "UV_INDEX_STRATEGY": "unsafe-best-match"
    }  # the best version of all indexes, as pip takes it
    for name, value in settings.items():
        if name in WITHOUT_EFFECT or not value.strip():
            continue
        if name not in EQUALS:
            raise SystemExit(f"pip's setting {name} has no equal in uv")
        variable = EQUALS[name]
        found[variable] = ("," if variable in COMMA_SEPARATED else " ").join(value.split())
    return {variable: value for variable, value in found.items() if variable not in os.environ}  # noqa: TID251


if __name__ == "__main__":
    command = [sys.executable, "-P", "-m", "pip", "config", "list"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    for variable, value in variables(read_settings(listed.splitlines())).items():
        print(f"{variable}={value}")
