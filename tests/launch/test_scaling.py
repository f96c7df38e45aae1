"""How many replicas the policy wants."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from manylora.launch.scaling import BUSY, TARGET_WAIT_S, WAIT, desired_replicas


def desired(waits: list[list[float]], busy: float = 0.0, target: int | None = None) -> int:
    """Of replicas that reported these waits, all as busy."""

    def points(values: list[float]) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(timestamp=float(at), value=value) for at, value in enumerate(values)
        ]

    metrics = {
        WAIT: {f"replica{n}": points(values) for n, values in enumerate(waits)},
        BUSY: {f"replica{n}": points([busy] * len(values)) for n, values in enumerate(waits)},
    }
    running = len(waits)
    context = SimpleNamespace(
        raw_metrics=metrics if waits and waits[0] else {},
        current_num_replicas=running,
        target_num_replicas=running if target is None else target,
    )
    return desired_replicas(context)[0]


@pytest.mark.parametrize(("wait", "wanted"), [(0.5, 2), (1.0, 2), (1.1, 3), (2.0, 4), (3.2, 7)])
def test_more_replicas_as_many_times_as_the_wait_is_too_long(wait: float, wanted: int) -> None:
    assert desired([[wait * TARGET_WAIT_S] * 5] * 2) == wanted


def test_one_replica_fewer_only_where_nothing_waits_and_the_rest_has_rows_for_all() -> None:
    idle = [[0.1 * TARGET_WAIT_S] * 5] * 3
    assert desired(idle) == 2
    assert desired(idle, busy=0.6) == 3
    assert desired([[0.0]]) == 1


def test_the_longest_twentieth_of_the_waits_counts() -> None:
    rare = [[0.0] * 99 + [50 * TARGET_WAIT_S], [0.0] * 100]
    assert desired(rare) == 1
    often = [[0.0] * 80 + [5 * TARGET_WAIT_S] * 20, [0.0] * 100]
    assert desired(often) == 10


def test_replicas_on_their_way_are_neither_forgotten_nor_counted_twice() -> None:
    assert desired([[2 * TARGET_WAIT_S]] * 2, target=6) == 6
    assert desired([[4 * TARGET_WAIT_S]] * 2, target=6) == 8


def test_without_reports_nothing_changes() -> None:
    assert desired([], target=3) == 3
