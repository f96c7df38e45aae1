"""`manylora bench` finds every benchmark and hands its options on."""

from __future__ import annotations

import importlib

import pytest
from typer.testing import CliRunner

from manylora.benchmarks.main import BENCHMARKS
from manylora.benchmarks.report import print_rows
from manylora.cli import make_app


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_command_shows_its_own_options(name: str) -> None:
    result = CliRunner().invoke(make_app(), ["bench", name, "--help"])
    assert result.exit_code == 0
    assert ("--out" if name == "gpu" else "--json") in result.output
    assert importlib.import_module(f"manylora.benchmarks.{BENCHMARKS[name][0]}").__doc__ is not None


def test_no_column_of_a_table_in_a_file_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"a long name of column {number}" for number in range(6)]
    print_rows([dict.fromkeys(names, 1.0)])
    header = capsys.readouterr().out.splitlines()[1]
    assert [name for name in names if name not in header] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["step", "--rows", "x"],
        ["step", "--rows", "0"],
        ["step", "--rows", "1,,2"],
        ["step", "--steps", "0"],
        ["step", "--weights", "int3"],
        ["overhead", "--requests", "0"],
        ["serve", "--models", "a"],
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(arguments: list[str]) -> None:
    assert CliRunner().invoke(make_app(), ["bench", *arguments]).exit_code == 2
