"""What the overhead benchmark makes of its timings."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from shop_window import shop_window
from weft.benchmarks import overhead
from weft.benchmarks.main import main
from weft.benchmarks.overhead import Rounds, make_result, measure_rounds
from weft.benchmarks.own_server import Served
from weft.benchmarks.step import Case
from weft.engine.status import StepStats
from weft.errors import WeftError

OPTIONS = argparse.Namespace(requests=2, output_tokens=3, repeats=2)


class FakeEngine:
    """Steps of 4 ms, of which 1 ms is planning."""

    def __init__(self) -> None:
        self.cases: list[Case] = []

    def decode(self, case: Case, steps: int) -> list[float]:
        self.cases.append(case)
        return [0.004] * steps

    def last_steps(self, count: int) -> list[StepStats]:
        step = StepStats(step=1, seconds=0.003, requests=2, tokens=2, prefill_tokens=0, adapters=0, base_requests=2)
        return [step] * count


def test_engine_and_server_take_turns_and_the_first_round_does_not_count() -> None:
    engine = FakeEngine()
    with shop_window() as server:
        rounds = measure_rounds(engine, Served(server.url, "key", ["a"]), OPTIONS)
        assert len(server.bodies) == 3 * OPTIONS.requests
        prompts = {str(body["prompt"]) for body in server.bodies}
        assert len(prompts) == len(server.bodies), "a repeated prompt would be found in the prefix cache"
    assert [case.rows for case in engine.cases] == [2, 2, 2]
    assert rounds.step_s == [0.004] * 2
    assert rounds.computed_s == [0.003] * 2
    assert all(gap > 0 for gap in rounds.gap_s)


def test_shares_are_taken_within_rounds() -> None:
    result = make_result(OPTIONS, Rounds(computed_s=[0.1, 0.2], step_s=[0.11, 0.22], gap_s=[0.121, 0.22]))
    shares = result["share of a step"]
    assert shares["planning"]["median"] == pytest.approx(0.01 / 0.11, rel=1e-3)
    assert shares["processes and HTTP"]["repeats"] == pytest.approx([0.1, 0.0], abs=1e-3)
    assert shares["all"]["max"] == pytest.approx(0.021 / 0.11, rel=1e-3)
    assert result["ms"]["gap over HTTP"]["max"] == pytest.approx(220)


def test_a_failed_request_ends_it() -> None:
    served = Served("http://127.0.0.1:1/v1", "", ["a"])
    with pytest.raises(WeftError, match="over HTTP failed"):
        measure_rounds(FakeEngine(), served, OPTIONS)


@pytest.mark.parametrize("option", [["--output-tokens", "1"], ["--output-tokens", "257"]])
def test_options_are_checked(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main("overhead", option) == 2
    assert option[0] in capsys.readouterr().err


def test_a_server_that_does_not_start_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overhead, "make_checkpoints", lambda _: (tmp_path, []))
    assert main("overhead", []) == 1
    assert capsys.readouterr().err.startswith("overhead: ")


def test_the_server_has_the_settings_of_the_engine() -> None:
    settings = dict(setting.split("=") for setting in overhead.server_settings(64))
    assert settings["scheduler.max_running"] == "64"
    assert settings["scheduler.step_tokens"] == "4096"
