"""Installing a checkout: which installer gets which packages, in which order, and what uv is told of pip's settings."""

import subprocess
import sys
from pathlib import Path

import pytest

from manylora.config import environment

ROOT = Path(__file__).resolve().parents[1]
# Stand for Python and uv. They note what they are asked; FAIL is a pattern of what they cannot do.
PYTHON = """#!/bin/sh
echo "python $*" >>"$NOTES"
case "$*" in $FAIL) echo "no network" >&2; exit 1 ;; esac
case "$*" in
  "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *uv_settings.py) printf 'UV_CONSTRAINT=/c\\nUV_INDEX=https://a.example/simple https://b.example/simple\\n' ;;
  *"--target .venv/uv"*) mkdir -p .venv/uv/bin && cp "$UV" .venv/uv/bin/uv ;;
esac
"""
UV = """#!/bin/sh
echo "uv $* index=$UV_INDEX" >>"$NOTES"
case "uv $*" in $FAIL) echo "no such package" >&2; exit 1 ;; esac
"""
ASKED = "pip install --quiet --python .venv/bin/python"
INDEX = "index=https://a.example/simple https://b.example/simple"
UV_INSTALLS = [f"uv {ASKED} torch>=2.11,<2.14 {INDEX}", f"uv {ASKED} -e . {INDEX}"]
PIP = "python -P -m pip install --quiet --disable-pip-version-check"
PIP_INSTALLS = [f"{PIP} --no-compile torch>=2.11,<2.14", f"{PIP} --no-compile -e ."]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/setup", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "scripts" / "setup").unlink()
    (tmp_path / "scripts" / "setup").write_text((ROOT / "scripts" / "setup").read_text())
    for name, text in (("python", PYTHON), ("uv", UV)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def set_up(checkout: Path, *, has_uv: bool = True, fail: str = "") -> tuple[list[str], str]:
    """Run the script; returns what was asked of Python and uv to install, and what was said."""
    notes, path = checkout / "notes", checkout / "path"
    path.mkdir(exist_ok=True)
    if has_uv and not (path / "uv").exists():
        (path / "uv").symlink_to(checkout / "uv")
    env = {
        "PATH": f"{path}:/usr/bin:/bin",
        "NOTES": str(notes),
        "FAIL": fail,
        "UV": str(checkout / "uv"),
    }
    notes.write_text("")
    result = subprocess.run(
        ["bash", str(checkout / "scripts" / "setup")],
        env={**env, "MANYLORA_PYTHON": str(checkout / "python")},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    asked = notes.read_text().splitlines()
    done = (checkout / ".venv" / "manylora-installed-run").exists()
    assert done == (result.returncode == 0), result.stderr
    return [line for line in asked if " install " in line], result.stderr


def test_uv_installs_torch_first_and_is_told_pip_s_indexes(checkout: Path) -> None:
    asked, _ = set_up(checkout)
    assert asked == UV_INSTALLS
    assert "-m manylora.kernels.native.compilation" in (checkout / "notes").read_text(), (
        "the kernels, meanwhile"
    )
    assert set_up(checkout)[0] == [], "the same pyproject.toml is installed"


def test_where_there_is_no_uv_pip_gets_it_first(checkout: Path) -> None:
    asked, told = set_up(checkout, has_uv=False)
    assert asked == [f"{PIP} --target .venv/uv uv>=0.9", *UV_INSTALLS]
    assert "pip" not in told


@pytest.mark.parametrize(
    ("fail", "has_uv", "before"),
    [
        ("*uv_settings.py", True, []),
        ("*--target*", False, [f"{PIP} --target .venv/uv uv>=0.9"]),
        ("uv*torch*", True, UV_INSTALLS[:1]),
        ("uv*-e*", True, UV_INSTALLS),
    ],
    ids=["a setting of pip's has no equal", "there is no uv", "uv finds no torch", "uv fails"],
)
def test_where_uv_cannot_install_pip_does_and_it_is_said(
    checkout: Path, fail: str, has_uv: bool, before: list[str]
) -> None:
    asked, told = set_up(checkout, has_uv=has_uv, fail=fail)
    assert asked == [*before, *PIP_INSTALLS]
    assert told.splitlines()[-1].startswith("uv cannot install here; the lines above say why.")
    assert len(told.splitlines()) == 3, "the start, the reason, and what follows"


def test_what_nobody_can_install_is_tried_again_the_next_time(checkout: Path) -> None:
    fail = "*torch*"
    assert set_up(checkout, fail=fail)[0] == [UV_INSTALLS[0], PIP_INSTALLS[0]]
    assert set_up(checkout)[0] == UV_INSTALLS


def uv_settings(tmp_path: Path, config: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the script with this configuration of pip."""
    (tmp_path / "pip.conf").write_text(config)
    return subprocess.run(
        [sys.executable, "-P", str(ROOT / "scripts" / "uv_settings.py")],
        env={
            "PATH": environment()["PATH"],
            "HOME": str(tmp_path),
            "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"),
            **env,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


SETTINGS = """
[global]
index-url = https://index.example/simple
extra-index-url =
    https://one.example/simple
    https://two.example/simple
find-links = /wheels /more
timeout = 60
trusted-host = index.example
[install]
constraint = /etc/constraints.txt
no-index =
[list]
format = columns
"""


def test_uv_is_told_what_pip_is_told(tmp_path: Path) -> None:
    result = uv_settings(
        tmp_path, SETTINGS, PIP_INDEX_URL="https://own.example/simple", UV_INSECURE_HOST="mine"
    )
    told = set(result.stdout.splitlines())
    assert told >= {
        "UV_INDEX_STRATEGY=unsafe-best-match",
        "UV_DEFAULT_INDEX=https://own.example/simple",
        "UV_INDEX=https://one.example/simple https://two.example/simple",
        "UV_FIND_LINKS=/wheels,/more",
        "UV_CONSTRAINT=/etc/constraints.txt",
    }, result.stderr
    assert not [line for line in told if line.startswith(("UV_INSECURE_HOST", "UV_NO_INDEX"))], (
        "set, or not in pip's"
    )


def test_a_setting_of_pip_s_that_uv_has_no_equal_for_is_named(tmp_path: Path) -> None:
    told = uv_settings(tmp_path, "[global]\nclient-cert = /etc/me.pem\n")
    assert (told.returncode, told.stderr) == (1, "pip's setting client-cert has no equal in uv\n")
