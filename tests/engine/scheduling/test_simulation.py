"""The whole engine in virtual time, by seed; and defects planted to show that the simulation sees them."""

from __future__ import annotations

from collections import Counter

import pytest

from simulation.defects import DEFECTS, Plant
from simulation.engine import SimulationError, simulate

NUM_SEEDS = 500
NUM_ITEMS = 20
MAX_SEEDS_TO_CATCH = 600


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, NUM_SEEDS // NUM_ITEMS))
def test_nothing_that_must_not_happen_does(first: int) -> None:
    """More of them, or one alone: scripts/simulate."""
    for seed in range(first, first + NUM_SEEDS // NUM_ITEMS):
        simulate(seed)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("plant", DEFECTS, ids=lambda plant: plant.__name__)
def test_a_planted_defect_is_seen(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(MAX_SEEDS_TO_CATCH):
        said = failure(seed)
        if said is not None:
            assert f"scripts/simulate --seed {seed}" in said
            return
    pytest.fail(f"{MAX_SEEDS_TO_CATCH} seeds do not show it")


def failure(seed: int) -> str | None:
    try:
        simulate(seed)
    except SimulationError as error:
        return str(error)
    return None


def test_everything_that_can_happen_does() -> None:
    """What no scenario brings about is not tested by any."""
    counts: Counter[str] = Counter()
    for seed in range(60):
        counts += simulate(seed)
    rare = {
        "copies",
        "moves",
        "prefix_hits",
        "pauses",
        "preemptions:recompute",
        "preemptions:swap",
        "evictions:adapter",
        "evictions:prefix",
        "loads:stored>device:ok",
        "loads:stored>device:failed",
        "loads:host>device:ok",
        "end:stop",
        "end:length",
        "end:abort",
        "end:error:adapter_load_failed",
        "end:error:deadline.queue",
        "end:error:engine_overloaded",
        "end:error:internal_error",
        "end:error:request_too_large",
        "end:error:scores_not_finite",
    }
    assert not {kind for kind in rare if not counts[kind]}


def test_a_seed_is_played_the_same_way_each_time() -> None:
    for seed in range(5):
        assert simulate(seed) == simulate(seed)
