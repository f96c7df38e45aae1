"""`manylora quantize`: writes the checkpoint and shows the error of each weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from manylora.cli import make_app
from tiny_models import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama")


def run(*arguments: object) -> Any:
    env = {"NO_COLOR": "1", "COLUMNS": "200"}
    return CliRunner().invoke(make_app(), ["quantize", *map(str, arguments)], env=env)


def test_the_errors_are_shown_by_layer_and_module(model: Path, tmp_path: Path) -> None:
    done = run("--model", model, "--format", "int4", "--output", tmp_path / "out")
    assert done.exit_code == 0, done.output
    header, *rows, mean, empty, said = done.output.splitlines()
    assert header.split() == ["LAYER", "Q", "K", "V", "O", "GATE", "UP", "DOWN"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]
    assert all(
        0 < float(cell.removesuffix("%")) < 12 for row in [*rows, mean] for cell in row.split()[1:]
    )
    assert empty == ""
    assert said == f"{tmp_path / 'out'}: int4, relative errors of the weights by layer"
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_errors_are_told_as_json(model: Path, tmp_path: Path) -> None:
    done = run("--model", model, "--format", "q3.5", "--output", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert (told["format"], told["output"]) == ("q3.5", str(tmp_path / "out"))
    assert told["mean"].keys() == told["errors"].keys()
    assert told["mean"]["mlp.up_proj"] == pytest.approx(sum(told["errors"]["mlp.up_proj"]) / 3)


def test_what_cannot_be_done_ends_with_one_line(model: Path, tmp_path: Path) -> None:
    done = run("--model", model, "--format", "int3", "--output", tmp_path / "out")
    assert done.exit_code == 2
    assert done.output == "manylora: format must be one of int8, int4, q3.5, got 'int3'\n"
    assert run("--model", model, "--format", "int8", "--output", model).exit_code == 2
