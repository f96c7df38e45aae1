"""Programs that tests use and pip does not have: a machine may lack them, CI may not."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from manylora.config import environment


def require_module(name: str, *, package: str) -> ModuleType:
    """A Python module of the extra `dev`; without it the test is skipped, and fails where CI is set."""
    if importlib.util.find_spec(name) is None and not environment().get("CI"):
        pytest.skip(f"{name} is missing: pip install {package}")
    return importlib.import_module(name)


def require(program: str, *, package: str) -> str:
    """The path of a program; without it the test is skipped, and fails where CI is set.

    Args:
        program: Its name on the PATH, or beside Python, where `scripts/system_packages` puts some.
        package: The Debian package that has it.
    """
    found = shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent))
    if found is not None:
        return found
    why = f"{program} is missing: scripts/system_packages, or install Debian's package {package}"
    if environment().get("CI"):
        pytest.fail(why)
    pytest.skip(why)
