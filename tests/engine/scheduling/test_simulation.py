"""The whole engine in virtual time, by seed; and defects planted to show that the simulation sees them."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from simulation.compare import compare_overlap, play
from simulation.defects import DEFECTS, Plant
from simulation.engine import SimulationError, simulate
from simulation.overlap_defects import OVERLAP_DEFECTS

pytestmark = pytest.mark.no_cover

NUM_SEEDS = 500
NUM_FAST_SEEDS = 60
SEEDS_PER_ITEM = 20
TELLING_SEEDS = (3, 18, 25, 2, 510)
"""One of them shows each of the planted defects, as long as the engine plans as it does now; else all are tried."""
MAX_SEEDS_TO_CATCH = 600

played = cache(play)
"""Tests share what they play: its arguments are written in one way."""


@pytest.mark.parametrize(
    ("first", "overlaps"),
    [
        pytest.param(
            *(first, overlaps),
            id=f"{first}-{'overlap' if overlaps else 'one by one'}",
            marks=[pytest.mark.slow] if first >= NUM_FAST_SEEDS else [],
        )
        for first in range(0, NUM_SEEDS, SEEDS_PER_ITEM)
        for overlaps in (False, True)
        if first < NUM_FAST_SEEDS or first // SEEDS_PER_ITEM % 2 == overlaps
    ],
)
def test_nothing_that_must_not_happen_does(first: int, overlaps: bool) -> None:
    """The first seeds both ways, the others one way each. More of them, or one alone: scripts/simulate."""
    for seed in range(first, first + SEEDS_PER_ITEM):
        played(seed, overlaps)


def test_overlap_changes_nothing_that_requests_get() -> None:
    assert sum(compare_overlap(seed, played) for seed in range(NUM_FAST_SEEDS)) > 500


@pytest.mark.parametrize("plant", [*DEFECTS, *OVERLAP_DEFECTS], ids=lambda plant: plant.__name__)
def test_a_planted_defect_is_seen(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    overlaps = plant in OVERLAP_DEFECTS
    for seed in (*TELLING_SEEDS, *range(MAX_SEEDS_TO_CATCH)):
        try:
            simulate(seed, overlaps=overlaps)
        except SimulationError as error:
            said = str(error)
            break
    else:
        pytest.fail(f"{MAX_SEEDS_TO_CATCH} seeds do not show it")
    assert f"scripts/simulate --seed {seed}{' --overlap' * overlaps}" in said


def test_everything_that_can_happen_does() -> None:
    """An event that no scenario brings about is tested by none."""
    counts = sum((played(seed, False)[0] for seed in range(NUM_FAST_SEEDS)), Counter[str]())
    rare = {
        *("copies", "moves", "prefix_hits", "pauses", "evictions:adapter", "evictions:prefix"),
        *("preemptions:recompute", "preemptions:swap", "end:stop", "end:length", "end:abort"),
        *("loads:stored>device:ok", "loads:stored>device:failed", "loads:host>device:ok"),
        *(
            "end:error:adapter_load_failed",
            "end:error:deadline.queue",
            "end:error:engine_overloaded",
        ),
        *("end:error:internal_error", "end:error:request_too_large", "end:error:scores_not_finite"),
    }
    assert not {kind for kind in rare if not counts[kind]}


def test_a_seed_is_played_the_same_way_each_time() -> None:
    for seed in range(5):
        for overlaps in (False, True):
            assert play(seed, overlaps) == played(seed, overlaps)
