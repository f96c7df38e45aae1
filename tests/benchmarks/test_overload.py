"""The overload benchmark: its clients and their times, its figures, and a small run."""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from manylora.benchmarks.http.generator import Generator, Target
from manylora.benchmarks.http.overload import (
    QUIET,
    SHARES,
    Phase,
    make_goals,
    phase_result,
    plan_clients,
    vary_lengths,
)
from manylora.benchmarks.metrics import Reply

OPTIONS = argparse.Namespace(
    seed=0, seconds=60.0, input_tokens=1, output_tokens=2, ttft_s=10.0, tpot_ms=100.0
)


def target(model: str) -> Target:
    return Target("http://127.0.0.1:9/v1", "", model)


@pytest.mark.parametrize("factor", [1.0, 20.0])
def test_the_offered_load_is_what_was_asked_for(factor: float) -> None:
    targets = {name: [target(name)] for name in (*SHARES, QUIET)}
    planned = plan_clients(OPTIONS, targets, 10.0, factor, itertools.count(1))
    sent, kinds = Counter[str](), Counter[str]()
    for kind, load in planned:
        arrivals = load.arrivals_s or []
        assert arrivals == sorted(arrivals)
        assert 0 < arrivals[0] < arrivals[-1] < OPTIONS.seconds
        sent[load.targets[0].model] += len(arrivals)
        kinds[kind] += len(arrivals)
        assert load.heeds_retry_after is (kind == "honest")
    demand = 600 * factor
    for name, share in SHARES.items():
        assert sent[name] == pytest.approx(share * demand, rel=0.25)
    assert sent[QUIET] == pytest.approx(30, rel=0.5)
    assert kinds[QUIET] == sent[QUIET]
    assert kinds["honest"] == pytest.approx(0.3 * 600, rel=0.25), (
        "honest clients ask for a part of the capacity"
    )
    assert kinds["hammering"] == pytest.approx(0.1 * demand, rel=0.25)
    assert {kind: load.tries for kind, load in planned} == {
        "impatient": 1,
        "hammering": 4,
        "honest": 3,
        QUIET: 1,
    }
    assert len({load.seed for _, load in planned}) == len(planned), "prompts do not come again"


def test_answers_differ_in_length_and_no_two_prompts_are_the_same() -> None:
    options = argparse.Namespace(input_tokens=9, output_tokens=100)
    varied = vary_lengths(options, [target("m")], 3)
    sent = list(itertools.islice(varied.calls(Generator()), 400))
    lengths = [call.output_tokens or 0 for call in sent]
    assert min(lengths) in range(50, 60)
    assert max(lengths) in range(141, 151)
    assert sum(lengths) / 400 == pytest.approx(100, rel=0.05)
    assert len({call.body for call in sent}) == 400


def served(at_s: float, ttft_s: float, tpot_s: float = 0.01) -> Reply:
    times = [at_s + ttft_s, at_s + ttft_s + tpot_s]
    return Reply(
        "m",
        due_s=at_s,
        sent_s=at_s,
        status=200,
        token_times_s=times,
        done_s=times[-1],
        completion_tokens=2,
    )


def refused(at_s: float, told: bytes | None, took_s: float = 0.02) -> Reply:
    headers = {} if told is None else {b"retry-after": told}
    return Reply(
        "m",
        due_s=at_s,
        sent_s=at_s,
        status=429,
        headers=headers,
        head_s=at_s + took_s,
        error="HTTP 429",
    )


def tries(*replies: Reply) -> list[Reply]:
    """The tries of one client."""
    return [replace(reply, attempt=number) for number, reply in enumerate(replies, start=1)]


def make_phase() -> Phase:
    return Phase(
        [],
        {
            "impatient": [
                served(1.0, 0.1),  # while the server fills up
                served(20.0, 0.1),
                served(30.0, 11.0),  # first token too late
                served(31.0, 0.1, tpot_s=0.2),  # too slow
                replace(served(32.0, 0.1), error="usage says 2 tokens came, 3 were asked for"),
            ],
            "honest": [
                *tries(refused(20.0, b"3"), served(23.0, 0.1)),
                *tries(refused(20.0, b"3"), refused(23.0, b"3"), refused(26.0, None, took_s=0.2)),
            ],
            QUIET: [served(40.0, 0.5)],
            # cut when the benchmark ended
            "hammering": [replace(served(41.0, 0.1), completion_tokens=0)],
        },
        normal_after_s=2.0,
    )


def test_figures_of_a_phase() -> None:
    result = phase_result(OPTIONS, make_phase(), 1.0, 20.0)
    assert result["goodput"] == pytest.approx(3 / 50)
    assert result["statuses"] == {"200": 8, "429": 4}
    assert result["with_retry_after"] == 0.75
    assert result["refusal_ms"]["p50"] == pytest.approx(20)
    assert result["refusal_ms"]["max"] == pytest.approx(200)
    assert result["served"] == {"impatient": 0.8, "hammering": 0.0, "honest": 0.5, QUIET: 1.0}
    assert result["admitted_at_retry_after"] == 0.5
    assert result["quiet_ttft_ms"]["max"] == pytest.approx(500)
    reached = {goal["goal"]: goal["ok"] for goal in make_goals(result)}
    assert reached == {
        "20 times: goodput over capacity": False,
        "20 times: refusals p99, ms, at 0 requests/s": False,
        "20 times: share of refusals with Retry-After": False,
        "20 times: honest clients admitted at Retry-After": False,
        "20 times: honest clients served within 3 tries": False,
        "20 times: quiet tenant served": True,
        "20 times: normal again after, s": True,
    }


def test_what_was_not_measured_reaches_no_goal() -> None:
    nothing: dict[str, list[Reply]] = {"impatient": [], "honest": [], "hammering": []}
    phase = Phase([], {**nothing, QUIET: [served(40.0, 0.5)]})
    reached = {
        goal["goal"]: goal["ok"] for goal in make_goals(phase_result(OPTIONS, phase, 1.0, 20.0))
    }
    assert [name for name, ok in reached.items() if ok] == ["20 times: quiet tenant served"]


@pytest.mark.slow
def test_a_small_run_tells_of_every_phase(measure: Callable[..., dict[str, Any]]) -> None:
    small = "--factors 1,4 --seconds 1 --capacity-seconds 1 --settle-s 30 --output-tokens 4 --in-flight 4"
    settings = "--set=memory.gib=0.05 --set=memory.host_gib=0.05 --set=model.threads=1 --set=scheduler.max_waiting=1"
    result = measure("overload", f"{small} {settings}")
    assert result["capacity_requests_per_s"] > 0
    assert [phase["times"] for phase in result["phases"]] == [1, 4]
    for phase in result["phases"]:
        assert phase["statuses"]["200"] > 0
        assert set(phase["statuses"]) <= {"200", "429", "503"}, "whatever is not served is refused"
    assert len(result["goals"]) == 7
