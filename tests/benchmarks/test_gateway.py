"""`manylora bench gateway` and the promises of a cluster, small: servers that they start, and what came of them."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from manylora.benchmarks.http import gateway

pytestmark = pytest.mark.slow
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[gateway.Servers, gateway.Servers]]:
    """The replicas and gateways of both tests, of which the last kills some."""
    with gateway.stepped_cluster() as started:
        yield started


def test_a_small_run_asks_both_ways_and_counts_the_time_of_the_processes(
    servers: tuple[gateway.Servers, gateway.Servers],
    measure: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway, "stepped_cluster", lambda: nullcontext(servers))
    monkeypatch.setattr(gateway, "NUM_ALONE", 20)
    result = measure("gateway", "--streams 4 --tokens 150 --repeats 1")
    direct, through = (result["paths"][name] for name in ("direct", "gateway"))
    for found in (direct, through):
        assert 0 < found["tokens_per_s"]["median"] <= 1.1 * 4 * 100, (
            "the engine's clock, whichever way"
        )
        assert found["replicas_cpu_us"]["median"] > 0
        assert 0 < found["ttft_p50_ms"]["median"] <= found["ttft_p99_ms"]["median"]
    assert direct["gateway_cpu_us"]["median"] < through["gateway_cpu_us"]["median"], (
        "it is asked by one of them only"
    )
    assert 0 < result["gateway_idle_mib"] <= through["gateway_mib"]["median"]
    goals = {goal["goal"]: goal["figure"] for goal in result["goals"]}
    assert goals["CPU of the gateway, us per token"] == through["gateway_cpu_us"]["median"]
    alone_ms = result["ttft_alone_p50_ms"]
    assert alone_ms["direct"] > 0
    more_ms = goals["TTFT p50 of one request at a time, ms more than direct"]
    assert more_ms == pytest.approx(alone_ms["gateway"] - alone_ms["direct"], abs=0.01)
    assert goals["tokens/s, of direct"] == result["ratios"]["tokens/s, gateway / direct"]["median"]


def test_promises_of_a_small_cluster(
    servers: tuple[gateway.Servers, gateway.Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    promises = importlib.import_module("cluster_promises")
    monkeypatch.setattr(promises, "stepped_cluster", lambda: nullcontext(servers))
    monkeypatch.setattr(promises, "TENANT", "another")
    result = promises.measure(Namespace(streams=6))
    killed = result["replica_killed"]
    assert killed["streams_lost"] + killed["streams_whole"] == 6
    assert killed["streams_lost"] > 0
    assert killed["streams_whole"] > 0
    assert killed["new_failed"] == 0
    assert killed["event_s"]["p50"] > 0
    assert [each["figure"] is not None for each in result["goals"]] == [True] * 4
