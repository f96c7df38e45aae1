"""Pieces of the verbs under a time: what hangs, dies or is cut off costs its case alone, and nothing is run twice."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from manylora.benchmarks.gpu import case_log, first
from manylora.benchmarks.gpu.case_log import DONE, FAILED, UNFINISHED, UNFINISHED_CASE
from manylora.benchmarks.gpu.first import CLOSING_S, PIECES, PREDICTIONS, FirstLook, Piece, row
from manylora.benchmarks.gpu.setup import Setup
from manylora.benchmarks.gpu.verbs import VERBS
from manylora.benchmarks.main import main

ROOT = Path(__file__).resolve().parents[2]
CASES = {"step": ["one", "two", "three"], "memory": ["copies"]}
STEP, COPIES = Piece("step", "", 1.0), Piece("memory", "copies", 1.0)
# Stands for a verb: a case that has a file of its name in the folder does what that says.
PROGRAM = """
import json, os, re, signal, sys, time
verb, only, out = sys.argv[1], sys.argv[3], sys.argv[5]
path = f"{out}/{verb}.json"
cases = json.load(open(path))["cases"] if os.path.exists(path) else {}
def keep(name, found):
    cases[name] = found
    json.dump({"cases": cases}, open(path + ".new", "w"))
    os.replace(path + ".new", path)
for name in json.loads(os.environ["CASES"])[verb]:
    if name in cases or not re.search(only, name):
        continue
    keep(name, {"error": "MARK"})
    print(name, file=open(f"{out}/ran", "a"))
    act = open(f"{out}/{name}").read() if os.path.exists(f"{out}/{name}") else ""
    if act == "die":
        print("illegal memory access", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if act == "terminate":
        os.kill(os.getppid(), signal.SIGTERM)
    if act in ("hang", "terminate"):
        time.sleep(600)
    keep(name, {"measured": 1.0, "unit": "ms"})
""".replace("MARK", UNFINISHED_CASE)


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, FirstLook]]:
    """Run these pieces in this time; returns the exit status."""
    monkeypatch.setenv("CASES", json.dumps(CASES))

    def run(*pieces: Piece, seconds: float = 60.0, program: str = PROGRAM) -> tuple[int, FirstLook]:
        made = FirstLook(
            out=tmp_path,
            options=[],
            cases=CASES,
            seconds=seconds + CLOSING_S,
            command=(sys.executable, "-I", "-S", "-c", program),
            pieces=pieces,
        )
        return made.run(), made

    return run


def ran(folder: Path) -> list[str]:
    return (folder / "ran").read_text().split() if (folder / "ran").exists() else []


def test_all_pieces_are_run_once_and_shown_beside_what_was_predicted(
    look: Callable[..., tuple[int, FirstLook]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert look(STEP, COPIES)[0] == DONE
    assert look(STEP, COPIES)[0] == DONE
    assert ran(tmp_path) == ["one", "two", "three", "copies"]
    table = (tmp_path / "first.md").read_text()
    assert table in capsys.readouterr().out
    assert "| memory | copies | 1 ms |  |  |" in table.splitlines()


def test_a_process_that_dies_costs_the_case_it_was_in(
    look: Callable[..., tuple[int, FirstLook]], tmp_path: Path
) -> None:
    (tmp_path / "two").write_text("die")
    for _ in range(2):
        status, found = look(STEP, COPIES)
        assert status == FAILED
        assert ran(tmp_path) == ["one", "two", "three", "copies"]
    assert found.found(STEP)["two"] == {"error": "ended with status -11: illegal memory access"}
    assert "| step | two | ended with status -11: illegal memory access |  |  |" in found.table()


def test_a_case_that_hangs_is_killed_and_the_others_are_run(
    look: Callable[..., tuple[int, FirstLook]], tmp_path: Path
) -> None:
    (tmp_path / "two").write_text("hang")
    status, found = look(STEP, COPIES)
    assert status == FAILED
    assert ran(tmp_path) == ["one", "two", "three", "copies"]
    assert found.found(STEP)["two"] == {"error": "did not end within 2 s"}


def test_what_is_cut_off_because_the_time_is_up_is_run_again(
    look: Callable[..., tuple[int, FirstLook]], tmp_path: Path
) -> None:
    (tmp_path / "two").write_text("hang")
    status, found = look(STEP, COPIES, seconds=1.5)
    assert status == UNFINISHED
    assert "| step | two | not run: no time was left |  |  |" in found.table()
    (tmp_path / "two").unlink()
    assert look(STEP, COPIES)[0] == DONE
    assert ran(tmp_path) == ["one", "two", "two", "three", "copies"]


def test_a_case_that_was_cut_off_with_all_others_is_run_again(
    look: Callable[..., tuple[int, FirstLook]], tmp_path: Path
) -> None:
    """As where the machine is taken away."""
    (tmp_path / "step.json").write_text(
        json.dumps({"cases": {"one": {"measured": 2}, "two": {"error": UNFINISHED_CASE}}})
    )
    assert look(STEP)[0] == DONE
    assert ran(tmp_path) == ["two", "three"]


def test_a_piece_that_does_not_fit_leaves_its_time_to_those_that_do(
    look: Callable[..., tuple[int, FirstLook]], tmp_path: Path
) -> None:
    status, found = look(replace(STEP, seconds=600.0), COPIES)
    assert status == UNFINISHED
    assert ran(tmp_path) == ["copies"]
    assert found.table().count("not run: no time was left") == 3


def test_a_verb_that_cannot_start_says_why(look: Callable[..., tuple[int, FirstLook]]) -> None:
    status, found = look(STEP, COPIES, program="import no_such_module")
    assert status == FAILED
    assert "| step | one | ended with status 1: " in found.table()
    assert "No module named 'no_such_module' |" in found.table()


def test_a_signal_ends_the_piece_and_shows_the_table(
    look: Callable[..., tuple[int, FirstLook]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "two").write_text("terminate")
    assert look(STEP, COPIES)[0] == UNFINISHED
    out = capsys.readouterr().out
    assert "ended early: run it again to go on" in out
    assert "| step | one | 1 ms |" in out
    assert "| memory | copies | not run" in out
    (tmp_path / "two").unlink()
    assert look(STEP, COPIES)[0] == DONE
    assert ran(tmp_path) == ["one", "two", "two", "three", "copies"]


def test_a_ratio_is_that_to_the_nearest_prediction() -> None:
    step, mixed = (
        ("step", "decode, 32 rows, 0 adapters"),
        ("kernels", "LoRA, mixed ranks as one rank"),
    )
    assert row(*step, {"measured": 15.0, "unit": "ms"}) == ["15 ms", "5.6 to 7.5", "2.00"]
    assert row(*step, {"measured": 6.0, "unit": "ms"}) == ["6 ms", "5.6 to 7.5", "1.00"]
    assert row(*step, {"measured": 2.8, "unit": "ms", "goal": 2.0}) == [
        "2.8 ms, missed 2",
        "5.6 to 7.5",
        "0.50",
    ]
    assert row(*mixed, {"measured": 55.0, "even": 50.0, "unit": "us"}) == [
        "55 us",
        "50 to 55",
        "1.00",
    ]
    assert row("check", "tests", {"absent": "pytest is not on PATH"}) == [
        "pytest is not on PATH",
        "",
        "",
    ]


@pytest.mark.parametrize("is_tiny", [False, True])
def test_pieces_and_predictions_name_cases(tmp_path: Path, is_tiny: bool) -> None:
    setup = Setup(device=torch.device("cpu"), out=tmp_path, is_tiny=is_tiny)
    cases = {verb: list(make(setup)) for verb, make in VERBS.items()}
    named = [(piece.verb, name) for piece in PIECES for name in piece.names(cases[piece.verb])]
    assert len(named) == len(set(named)), "no case is in two pieces"
    assert all(piece.names(cases[piece.verb]) for piece in PIECES)
    assert is_tiny or set(PREDICTIONS) <= set(named)
    first_s = [sum(piece.seconds for piece in PIECES[:count]) for count in range(len(PIECES) + 1)]
    assert first_s[8] < 520, "all but the tests and the search for constants"


def test_the_notes_have_the_predictions() -> None:
    notes = (ROOT / "benchmarks" / "results" / "nvidia-h200" / "NOTES.md").read_text()
    told = re.findall(
        r"^\| (step|kernels|memory) \| (.+?) \| (\S+) \| (\S+) \| (\w*) *\|", notes, re.MULTILINE
    )
    expected = [
        (*key, f"{each.low:.3g}", f"{each.high:.3g}", each.of) for key, each in PREDICTIONS.items()
    ]
    assert told == expected


def test_a_file_of_results_is_on_disk_before_the_next_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append((tmp_path / "verb.part").read_text()))
    case_log.write(tmp_path / "verb.json", {"cases": {}})
    assert synced == [(tmp_path / "verb.json").read_text()]


@pytest.mark.slow
def test_pieces_are_run_on_toy_sizes_cut_off_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernels of Triton in its interpreter among them."""
    pieces: Sequence[Piece] = [PIECES[0], Piece("memory", "copies of 256", 20)]
    monkeypatch.setattr(first, "PIECES", pieces)
    options = ["first", "--tiny", "--commit", "abc"]
    monkeypatch.setenv("OUT", str(tmp_path))
    assert main("gpu", [*options, "--seconds", "1"]) == UNFINISHED
    assert (
        "| agree | LoRA, as torch operators | not run: no time was left |  |  |"
        in capsys.readouterr().out
    )
    monkeypatch.setattr(first, "HANGS", 20.0)
    assert main("gpu", [*options, "--seconds", "500"]) in (DONE, FAILED), (
        "a copy on a CPU may miss its goal"
    )
    found: dict[str, Any] = json.loads((tmp_path / "agree.json").read_text())["cases"]
    assert not [
        name for name, case in found.items() if "error" in case or case["measured"] > case["goal"]
    ]
    assert len(found) == 7
    assert json.loads((tmp_path / "memory.json").read_text())["commit"] == "abc"
    assert "| memory | copies of 256 KiB | " in capsys.readouterr().out
