"""Which folders are packages: every folder below the parts and manylora/ that has an `__init__.py`.

All else stands in pyproject.toml. The links in manylora/ are in no sdist, so the parts are looked for at the top.
"""

import tomllib
from pathlib import Path

from setuptools import find_packages, setup

SETTINGS = tomllib.loads((Path(__file__).parent / "pyproject.toml").read_text())["tool"][
    "setuptools"
]
PARTS = SETTINGS["package-dir"].values()
FOUND = find_packages(include=[pattern for part in PARTS for pattern in (part, f"{part}.*")])

setup(
    packages=sorted(
        {
            *find_packages(include=["manylora", "manylora.*"]),
            *(f"manylora.{name}" for name in FOUND),
        }
    )
)
