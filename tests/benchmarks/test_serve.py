"""`manylora bench serve`: its load against a small OpenAI-shaped server over a real socket, and its options."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from manylora import demo
from manylora.benchmarks.main import main
from manylora.benchmarks.workloads import poisson_arrivals
from shop_window import TOKEN_DELAY_S, ShopWindow

NOWHERE = "http://127.0.0.1:9/v1"


def run_load(server: ShopWindow, tmp_path: Path, arguments: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "r.json"
    status = main(
        "serve",
        ["--url", server.url, "--json", str(path), "--output-tokens", "4", *arguments.split()],
    )
    return status, json.loads(path.read_text())


def test_a_closed_loop_keeps_exactly_the_asked_number_in_flight(
    server: ShopWindow, tmp_path: Path
) -> None:
    status, result = run_load(
        server, tmp_path, "--models a,b --requests 12 --concurrency 3 --key secret"
    )
    assert status == 0
    assert server.most_in_flight == 3
    assert server.connections == 3, "connections are reused"
    assert server.authorizations == {"Bearer secret"}
    assert (
        Counter(body["model"] for body in server.bodies) == result["adapters"] == {"a": 6, "b": 6}
    )
    assert "secret" not in json.dumps(result)


def test_figures_agree_with_what_the_server_did(server: ShopWindow, tmp_path: Path) -> None:
    _, result = run_load(server, tmp_path, "--models a --requests 8 --concurrency 8")
    summary = result["summary"]
    assert (summary["errors"], summary["completion_tokens"], summary["prompt_tokens"]) == (
        0,
        32,
        8 * 64,
    )
    assert summary["latency_ms"]["p50"] >= TOKEN_DELAY_S * 1e3 * 4, (
        "tokens may come late and together, not early"
    )
    assert summary["tpot_ms"]["mean"] == pytest.approx(summary["itl_ms"]["mean"], rel=1e-6)
    assert summary["output_tokens_per_s"] == pytest.approx(32 / summary["duration_s"], rel=1e-3)


def test_an_open_loop_sends_when_due_and_does_not_wait_for_answers(
    server: ShopWindow, tmp_path: Path
) -> None:
    status, result = run_load(server, tmp_path, "--models a --requests 10 --rate 200")
    assert status == 0
    assert server.most_in_flight > 3
    due_s = poisson_arrivals(10, 200.0, 0)
    assert result["summary"]["duration_s"] >= due_s[-1] - due_s[0] + 4 * TOKEN_DELAY_S


def test_lengths_are_drawn_from_their_ranges(server: ShopWindow, tmp_path: Path) -> None:
    status, _ = run_load(
        server, tmp_path, "--models a --requests 20 --input-tokens 2:9 --output-tokens 1:4"
    )
    assert status == 0
    assert {len(body["prompt"]) for body in server.bodies} <= set(range(2, 9))
    assert {body["max_tokens"] for body in server.bodies} == {1, 2, 3}


def test_warm_up_reaches_every_model_and_is_not_measured(
    server: ShopWindow, tmp_path: Path
) -> None:
    _, result = run_load(server, tmp_path, "--models a,b --requests 4 --warmup 2")
    assert {body["model"] for body in server.bodies[:2]} == {"a", "b"}
    assert len(server.bodies) == 6
    assert result["summary"]["requests"] == 4


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("503", "HTTP 503: busy"),
        ("cut", "before the end of the answer"),
        ("error event", "engine restarted"),
        ("short", "usage says 3 tokens came, 4 were asked for"),
        ("no usage", "no usage came"),
        ("no end", "without finish_reason and"),
        ("no http", "is not HTTP"),
    ],
)
def test_a_wrong_answer_is_an_error_and_the_exit_status_says_so(
    server: ShopWindow, tmp_path: Path, fault: str, message: str
) -> None:
    server.fault = fault
    status, result = run_load(server, tmp_path, "--models a --requests 3")
    assert (status, result["summary"]["errors"]) == (1, 3)
    assert all(message in error for error in result["errors"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", NOWHERE], "--url needs --models"),
        (["--url", NOWHERE, "--models", ","], "--url needs --models"),
        (["--url", NOWHERE, "--models", "a", "--model", "m"], "leave out --model"),
        (["--url", NOWHERE, "--models", "a", "--input-tokens", "9:3"], "--input-tokens must be"),
        (["--models", "a"], "give its --url"),
        (["--adapter", "a"], "--adapter needs --model"),
        (
            ["--model", str(demo.MODEL), "--adapter", "nowhere"],
            "nowhere is no folder of an adapter",
        ),
        (
            ["--model", "m", "--adapter", "a/final", "--adapter", "b/final"],
            "must differ: got final, final",
        ),
        (["--model", "m", "--popularity", "none"], "popularity"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("serve", arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("serve: ")
    assert message in said


def test_a_server_that_does_not_start_is_told_with_its_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("serve", ["--model", str(tmp_path), "--requests", "1"]) == 1
    assert "config.json" in capsys.readouterr().err
