"""What the overhead benchmark makes of its timings."""

from __future__ import annotations

import pytest

from manylora.benchmarks.http import overhead
from manylora.benchmarks.http.generator import Target
from manylora.benchmarks.http.overhead import make_result, over_http
from manylora.errors import ManyloraError
from shop_window import ShopWindow


def test_each_round_over_http_has_prompts_of_its_own(
    server: ShopWindow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "OUTPUT_TOKENS", 3)
    gaps = [
        over_http([Target(server.url, "key", "a")], round_)["gap over HTTP"] for round_ in range(3)
    ]
    prompts = {str(body["prompt"]) for body in server.bodies}
    assert len(prompts) == 3 * 32, "a repeated prompt would be found in the prefix cache"
    assert all(gap > 0 for gap in gaps)


def test_shares_are_taken_within_rounds() -> None:
    runs = {
        "engine": [{"computed": 0.1, "step": 0.11}, {"computed": 0.2, "step": 0.22}],
        "server": [{"gap over HTTP": 0.121}, {"gap over HTTP": 0.22}],
    }
    result = make_result(runs)
    shares = result["share of a step"]
    assert shares["planning"]["median"] == pytest.approx(0.01 / 0.11, rel=1e-3)
    assert shares["processes and HTTP"]["repeats"] == pytest.approx([0.1, 0.0], abs=1e-3)
    assert shares["all"]["max"] == pytest.approx(0.021 / 0.11, rel=1e-3)
    assert result["ms"]["gap over HTTP"]["max"] == pytest.approx(220)


def test_a_failed_request_ends_it() -> None:
    with pytest.raises(ManyloraError, match="A request failed: ConnectionRefusedError"):
        over_http([Target("http://127.0.0.1:1/v1", "", "a")], 0)
