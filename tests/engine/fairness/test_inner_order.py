"""Order of the requests of one adapter of one tenant: none of them waits without end."""

from __future__ import annotations

import pytest

from manylora.engine.fairness.inner_order import (
    MAX_OVERTAKING_S,
    OVERTAKING_S_PER_TOKEN,
    InnerName,
    inner_order,
)
from manylora.engine.fairness.shares import FairPlace, Standing
from manylora.engine.request import FlowKey


def arrived(second: float, *, tokens: int = 1, start_by_s: float = float("inf")) -> FairPlace:
    return FairPlace(
        request_id="r",
        key=FlowKey(),
        arrival_index=second,
        arrived_s=second,
        standing=Standing(start_by_s=start_by_s),
        adapter=None,
        num_prompt=5,
        predicted_tokens=tokens,
    )


def is_first(name: InnerName, place: FairPlace, other: FairPlace) -> bool:
    order = inner_order(name)
    return order.key(place) < order.key(other)


def test_a_shorter_request_goes_first_if_it_does_not_come_much_later() -> None:
    long = arrived(0.0, tokens=200)
    assert is_first("shortest", arrived(5.0, tokens=100), long)
    assert is_first("shortest", long, arrived(100 * OVERTAKING_S_PER_TOKEN, tokens=100))


@pytest.mark.parametrize("name", ["shortest", "slack"])
def test_nothing_that_comes_a_minute_later_goes_first(name: InnerName) -> None:
    oldest = arrived(0.0, tokens=100_000)
    before = arrived(MAX_OVERTAKING_S - 1.0, tokens=1, start_by_s=MAX_OVERTAKING_S - 0.5)
    assert is_first(name, before, oldest)
    assert is_first(
        name, oldest, arrived(MAX_OVERTAKING_S, tokens=1, start_by_s=MAX_OVERTAKING_S + 1.0)
    )


def test_the_nearest_deadline_goes_first() -> None:
    assert is_first("slack", arrived(1.0, start_by_s=5.0), arrived(0.0, start_by_s=6.0))
    assert is_first("slack", arrived(1.0, start_by_s=5.0), arrived(0.0))
