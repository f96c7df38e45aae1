"""What pip does not have is fetched once, or named; its tests are skipped on a desk and fail in CI."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from system_tools import require

SCRIPT = Path(__file__).parents[1] / "scripts" / "system_packages"
NEEDED = ("bash", "dirname", "id", "mktemp", "paste", "rm", "tail")


def run_with(tmp_path: Path, programs: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The script in a tree and on a PATH of its own, with these programs and what they do."""
    script, path = tmp_path / "tree" / "scripts" / SCRIPT.name, tmp_path / "bin"
    script.parent.mkdir(parents=True)
    path.mkdir()
    shutil.copy(SCRIPT, script)
    for name in NEEDED:
        (path / name).symlink_to(str(shutil.which(name)))
    for name, does in programs.items():
        (path / name).write_text(f"#!/bin/sh\n{does}\n")
        (path / name).chmod(0o755)
    command = [str(path / "bash"), str(script)]
    return subprocess.run(
        command, env={"PATH": str(path)}, check=False, capture_output=True, text=True
    )


def test_nothing_is_said_or_fetched_where_all_is_there(tmp_path: Path) -> None:
    ran = run_with(
        tmp_path, {"chromium": "", "prometheus": "", "promtool": "", "apt-get": "exit 3"}
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "apt_get", [{}, {"apt-get": "echo 'no network' >&2\nexit 100"}], ids=["other", "offline"]
)
def test_what_cannot_be_fetched_is_named_and_is_no_failure(
    apt_get: dict[str, str], tmp_path: Path
) -> None:
    ran = run_with(tmp_path, {"chromium": "", "promtool": "", **apt_get})
    assert ran.returncode == 0
    assert ran.stderr.endswith("sudo apt-get install --no-install-recommends prometheus\n")
    assert ("no network" in ran.stderr) == bool(apt_get)


def test_a_missing_program_skips_its_test_but_fails_it_in_ci(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Path(require("bash", package="bash")).is_file()
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="Debian's package nowhere"):
        require("manylora-has-no-such-program", package="nowhere")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="Debian's package nowhere"):
        require("manylora-has-no-such-program", package="nowhere")
