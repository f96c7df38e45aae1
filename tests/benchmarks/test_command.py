"""`weft bench` finds every benchmark and hands its options on."""

from __future__ import annotations

import importlib

import pytest
from typer.testing import CliRunner

from weft.benchmarks.main import BENCHMARKS
from weft.cli import make_app


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_command_shows_its_own_options(name: str) -> None:
    result = CliRunner().invoke(make_app(), ["bench", name, "--help"])
    assert result.exit_code == 0
    assert "--json" in result.output
    assert importlib.import_module(f"weft.benchmarks.{BENCHMARKS[name][0]}").__doc__ is not None


def test_a_benchmarks_exit_status_is_the_commands() -> None:
    assert CliRunner().invoke(make_app(), ["bench", "serve", "--models", "a"]).exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["kernels", "--rows", "x"],
        ["step", "--rows", "0"],
        ["kernels", "--rows", "1,,2"],
        ["step", "--steps", "0"],
        ["overhead", "--requests", "0"],
    ],
)
def test_numbers_that_make_no_sense_are_refused_at_once(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert CliRunner().invoke(make_app(), ["bench", *arguments]).exit_code == 2
